"""An OpenAI-compatible server (vLLM, SGLang, Dynamo) in the place of our engine, by its URL.

Bodies are checked by our rules and passed on as they came; answers come back as they are, errors as ours.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from media_server.errors import InvalidRequest, MediaServerError, ServiceStopping
from media_server.settings import Settings
from media_server.tasks import end_tasks
from media_server.text.messages import Grammar, Usage
from media_server.text.metering import Meter
from media_server.text.reading import EngineUnavailable
from media_server.text.requests import SamplingFields
from media_server.text.sse import HEADERS, MEDIA_TYPE, data_frame
from media_server.text.storyboard import Ask, StoryboardError

T = TypeVar("T")

# until the first byte of an answer; between chunks nobody is hurried
TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, read=600.0, pool=30.0)
# a text that is written for a job gives a sign of life so often, whatever the server does
SIGN_S = 0.5
# statuses below 500 that ask to come again
_LATER = (408, 425, 429)
# ours, which such a server does not know
_OURS = ("resume_s", "priority", "grammar")


def open_client(settings: Settings) -> httpx.AsyncClient:
    """Make a client of the server at `engine_url`."""
    return httpx.AsyncClient(base_url=base_url(settings), headers=auth_headers(settings), timeout=TIMEOUT)


def base_url(settings: Settings) -> str:
    """Give the server's address, up to and with /v1/."""
    assert settings.engine_url is not None
    url = settings.engine_url.rstrip("/")
    return f"{url}/" if url.endswith("/v1") else f"{url}/v1/"


def auth_headers(settings: Settings) -> dict[str, str]:
    """Give the header that carries the server's key, if there is one."""
    return {"authorization": f"Bearer {settings.engine_api_key}"} if settings.engine_api_key else {}


async def forward(
    settings: Settings,
    path: str,
    body: SamplingFields,
    values: Mapping[str, Any],
    meter: Meter,
    stopping: asyncio.Event,
    *,
    traceparent: str | None = None,
) -> Response:
    """Pass a request on and its answer back; a stream is always asked for its usage, which the meter takes.

    A server that has a `traceparent` puts its own spans under it.

    Raises InvalidRequest for a field of ours that the server does not know, EngineUnavailable if it does not answer,
    ServiceStopping if the service stops before it has.
    """
    try:
        for name in _OURS:
            if values.get(name) not in (None, 0):
                raise InvalidRequest(
                    f"{name}: the engine by URL does not do this.", code="unsupported_parameter", param=name
                )
        payload = {name: value for name, value in values.items() if name not in (*_OURS, "label")}
        if body.stream:
            payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
        client = open_client(settings)
        try:
            headers = {} if traceparent is None else {"traceparent": traceparent}
            sending = client.send(client.build_request("POST", path, json=payload, headers=headers), stream=True)
            answer = await _unless_stopped(stopping, sending)
        except httpx.HTTPError as error:
            await client.aclose()
            raise EngineUnavailable("The language engine by URL does not answer; try again.") from error
        except ServiceStopping:
            await client.aclose()
            raise
        if body.stream and answer.status_code == 200:
            has_usage = bool(body.stream_options and body.stream_options.include_usage)
            relayed = _relay(client, answer, meter, stopping, has_usage=has_usage)
            return StreamingResponse(relayed, headers=HEADERS, media_type=MEDIA_TYPE)
        try:
            await _unless_stopped(stopping, answer.aread())
            if answer.status_code != 200:
                raise remote_error(answer)
            whole = answer.json()
        finally:
            await client.aclose()
        _count(meter, whole)
        await meter.close()
        return JSONResponse(whole)
    except BaseException:
        await asyncio.shield(meter.close())
        raise


def remote_error(answer: httpx.Response) -> MediaServerError:
    """Turn the server's error into one of ours, with its message and status."""
    try:
        error = answer.json()
        error = error.get("error", error)
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, AttributeError, KeyError, TypeError):
        message, code, param = f"The language engine answered with status {answer.status_code}.", None, None
    if answer.status_code >= 500:
        return EngineUnavailable(message)
    return InvalidRequest(message, status=answer.status_code, code=code if isinstance(code, str) else None, param=param)


def write_remotely(settings: Settings, ask: Ask, model: str | None, usages: list[Usage]) -> Iterator[str]:
    """Have the server write one text under its grammar, by OpenAI's structured output; yields it as it comes.

    Yields "" as a sign of life at least every SIGN_S. Closed early, it ends the request.
    Raises StoryboardError if the answer is not what was asked for, EngineUnavailable if the server does not answer.
    """
    payload: dict[str, Any] = {
        "messages": list(ask.messages),
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        # servers differ in how many bits they take
        "seed": ask.seed % 2**31,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": _response_format(ask.grammar),
    }
    parts = []
    with closing(_with_signs_of_life(_chunks(settings, model, payload))) as chunks:
        for chunk in chunks:
            if chunk is None:
                yield ""
                continue
            if chunk.get("usage"):
                usages.append(Usage.model_validate(chunk["usage"]))
            for choice in chunk.get("choices", ()):
                parts.append(choice["delta"].get("content") or "")
                yield parts[-1] if ask.grammar.type == "json_schema" else ""
    if ask.grammar.type == "choice":
        # a choice is asked for as an object of one field
        try:
            yield str(json.loads("".join(parts))["choice"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoryboardError("The language engine by URL did not keep to the schema.") from error


def _response_format(grammar: Grammar) -> dict[str, Any]:
    if grammar.type == "choice":
        field = {"choice": {"type": "string", "enum": json.loads(grammar.value)}}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": field,
            "required": ["choice"],
            "additionalProperties": False,
        }
    else:
        assert grammar.type == "json_schema", f"storyboards ask for schemas and choices, not {grammar.type}"
        schema = json.loads(grammar.value)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def _chunks(
    settings: Settings, model: str | None, payload: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Ask the server and give the chunks of its answer."""
    async with open_client(settings) as client:
        body = {**payload, "model": model or await _first_model(client)}
        async with client.stream("POST", "chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _refusal(answer)
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield json.loads(data)


def _refusal(answer: httpx.Response) -> MediaServerError:
    """Turn the server's error into one that is stored with a job: without its message, which may quote the prompt."""
    message = f"The language engine by URL answered with status {answer.status_code}."
    if answer.status_code >= 500 or answer.status_code in _LATER:
        return EngineUnavailable(message)
    return InvalidRequest(message, status=answer.status_code)


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("models")
    if answer.status_code != 200:
        raise _refusal(answer)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError) as error:
        raise EngineUnavailable("The language engine by URL names no model.") from error


def _with_signs_of_life(
    chunks: AsyncGenerator[dict[str, Any], None],
) -> Generator[dict[str, Any] | None, None, None]:
    """Give chunks as they come, and None whenever SIGN_S went by without one. For a thread without an event loop."""

    async def read() -> dict[str, Any] | None:
        return await anext(chunks, None)

    async def wait(reading: asyncio.Task[dict[str, Any] | None]) -> bool:
        return bool((await asyncio.wait([reading], timeout=SIGN_S))[0])

    # a socket can be left in the middle of a wait by a loop, but not by a thread that reads from it
    with asyncio.Runner() as runner:
        try:
            while True:
                reading = runner.get_loop().create_task(read())
                while not runner.run(wait(reading)):
                    yield None
                chunk = reading.result()
                if chunk is None:
                    return
                yield chunk
        finally:
            reading.cancel()
            runner.run(_close(reading, chunks))


async def _close(reading: asyncio.Task[Any], chunks: AsyncGenerator[Any, None]) -> None:
    await asyncio.wait([reading])
    await chunks.aclose()


async def _relay(
    client: httpx.AsyncClient, answer: httpx.Response, meter: Meter, stopping: asyncio.Event, *, has_usage: bool
) -> AsyncIterator[bytes]:
    """Pass the stream on frame by frame, without the usage that only we asked for.

    If our reader leaves, or the service stops, the connection closes and the server ends the request; what it wrote is
    counted by chunks.
    """
    num_chunks, is_counted = 0, False
    frames = _frames(answer)
    try:
        while (lines := await _unless_stopped(stopping, _next(frames))) is not None:
            await meter.renew()
            data = "".join(line.removeprefix("data:").strip() for line in lines if line.startswith("data:"))
            chunk = json.loads(data) if data.startswith("{") else {}
            num_chunks += bool(chunk.get("choices"))
            if _count(meter, chunk):
                is_counted = True
                if not has_usage and not chunk.get("choices"):
                    continue
            elif not is_counted:
                meter.count(Usage(prompt_tokens=0, completion_tokens=num_chunks))
            yield ("\n".join(lines) + "\n\n").encode()
    except ServiceStopping as error:
        yield data_frame({"error": error.to_body()["error"]})
    finally:
        await answer.aclose()
        await client.aclose()
        await asyncio.shield(meter.close())


async def _unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Wait for something that a server does. Raises ServiceStopping, and leaves it, if the service stops first."""
    working, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ServiceStopping
        return working.result()
    finally:
        await end_tasks(working, stop)


async def _next(frames: AsyncIterator[list[str]]) -> list[str] | None:
    return await anext(frames, None)


async def _frames(answer: httpx.Response) -> AsyncIterator[list[str]]:
    """Yield the lines of each server-sent event."""
    lines: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            lines.append(line)
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines


def _count(meter: Meter, answer: Mapping[str, Any]) -> bool:
    """Have the meter take the usage that an answer or a chunk carries; False if it carries none."""
    try:
        meter.count(Usage.model_validate(answer["usage"]))
    except (KeyError, ValidationError):
        return False
    return True
