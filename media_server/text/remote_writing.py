"""An OpenAI-compatible server by URL: its client, and the texts that it writes for a worker, which serves no HTTP.

Requests of callers that are passed on to it are in remote.py.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import httpx

from media_server.certificates import certificates
from media_server.errors import InvalidRequest, MediaServerError
from media_server.settings import Settings
from media_server.text.messages import Grammar, Usage
from media_server.text.reading import EngineUnavailable
from media_server.text.storyboard import Ask, StoryboardError

# until the first byte of an answer; between chunks nobody is hurried
TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, read=600.0, pool=30.0)
# a text that is written for a job gives a sign of life so often, whatever the server does
SIGN_S = 0.5
# statuses below 500 that ask to come again
_LATER = (408, 425, 429)


def open_client(settings: Settings) -> httpx.AsyncClient:
    """Make a client of the server at `engine_url`."""
    return httpx.AsyncClient(
        base_url=base_url(settings),
        headers=auth_headers(settings),
        timeout=TIMEOUT,
        verify=certificates(trust_env=True),
    )


def base_url(settings: Settings) -> str:
    """Give the server's address, up to and with /v1/."""
    assert settings.engine_url is not None
    url = settings.engine_url.rstrip("/")
    return f"{url}/" if url.endswith("/v1") else f"{url}/v1/"


def auth_headers(settings: Settings) -> dict[str, str]:
    """Give the header that carries the server's key, if there is one."""
    return {"authorization": f"Bearer {settings.engine_api_key}"} if settings.engine_api_key else {}


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
