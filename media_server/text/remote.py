"""An OpenAI-compatible server (vLLM, SGLang, Dynamo) in the place of our engine, by its URL.

Bodies are checked by our rules and passed on as they came; answers come back as they are, errors as ours.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from media_server.errors import InvalidRequest, MediaServerError, ServiceStopping
from media_server.settings import Settings
from media_server.tasks import end_tasks
from media_server.text.messages import Usage
from media_server.text.metering import Meter
from media_server.text.reading import EngineUnavailable
from media_server.text.remote_writing import open_client
from media_server.text.requests import SamplingFields
from media_server.text.sse import HEADERS, MEDIA_TYPE, data_frame

T = TypeVar("T")

# ours, which such a server does not know
_OURS = ("resume_s", "priority", "grammar")


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
        payload = {name: value for name, value in values.items() if name not in (*_OURS, "label", "collapse_guard")}
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
