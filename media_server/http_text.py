"""An answer to a prompt: sent to an engine, then given whole or as a stream, counted by its meter either way.

A client that leaves ends its request, unless it asked for `resume_s`: then the request goes on, and is counted on.
Invariant: whatever becomes of an answer, its meter is closed when the request has ended.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from media_server.errors import Unprocessable
from media_server.models.registry import get_card
from media_server.tasks import end_tasks
from media_server.text.answers import Answer, Whole
from media_server.text.engine import AsyncEngineClient, Prompt, failure_error
from media_server.text.messages import TextEvent
from media_server.text.metering import Meter
from media_server.text.reading import Entry, Reading
from media_server.text.requests import SamplingFields
from media_server.text.sse import HEADERS, MEDIA_TYPE, frames, until_stopped
from media_server.text.templates import TextModel, TextModels


async def load_text_model(request: Request, name: str | None) -> TextModel:
    """Find a language model by name, None for the first, with what is needed to write for it.

    Raises NotFound if there is none of that name, NotReady if its files cannot be read.
    """
    state = request.app.state
    card = await run_in_threadpool(get_card, state.db, name, "text")
    if not hasattr(state, "text_models"):
        state.text_models = TextModels(state.artifacts)
    models: TextModels = state.text_models
    return await run_in_threadpool(models.load, card)


async def answer_prompt(request: Request, body: SamplingFields, prompt: Prompt, meter: Meter) -> Response:
    """Send the prompt, wait until an engine has accepted it, and answer as asked."""
    state = request.app.state
    client = AsyncEngineClient(state.redis, state.router)
    try:
        reading = await client.submit(prompt)
    except BaseException:
        await asyncio.shield(meter.close())
        raise
    answer = stored_answer(reading)
    entries = until_stopped(meter.watch(client, reading), reading, request.app.state.stopping)
    is_handed_on = False
    try:
        accepted = await _first(entries)
        if accepted.event.error is not None:
            raise failure_error(accepted.event.error)
        if body.stream:
            stream = _ending(client, reading, answer, meter, frames(answer, _from(accepted, entries)))
            is_handed_on = True
            return StreamingResponse(stream, headers=HEADERS, media_type=MEDIA_TYPE)
        return JSONResponse(await _gather(request, answer, entries))
    finally:
        if not is_handed_on:
            # this task may be being cancelled: what follows must happen all the same
            await asyncio.shield(_leave(client, reading, answer, meter))


async def _leave(client: AsyncEngineClient, reading: Reading, answer: Answer, meter: Meter) -> None:
    """End a request whose client has left or has all of it; one that can be taken up again goes on."""
    if answer.is_resumable and not reading.is_over:
        meter.follow(client, reading)
        return
    await client.abort(reading)
    await meter.close()


async def _first(entries: AsyncIterator[Entry | None]) -> Entry:
    async for entry in entries:
        if entry is not None:
            return entry
    raise AssertionError("a stream ends with an event")


async def _from(first: Entry, rest: AsyncIterator[Entry | None]) -> AsyncIterator[Entry | None]:
    yield first
    async for entry in rest:
        yield entry


async def _ending(
    client: AsyncEngineClient, reading: Reading, answer: Answer, meter: Meter, stream: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Pass a stream on; when its reader leaves, or has all of it, end the request."""
    try:
        async for frame in stream:
            yield frame
    finally:
        await asyncio.shield(_leave(client, reading, answer, meter))


async def _gather(request: Request, answer: Answer, entries: AsyncIterator[Entry | None]) -> dict[str, Any]:
    """Wait for the whole answer, or until the client leaves."""
    whole = Whole(answer)

    async def gather() -> TextEvent | None:
        async for entry in entries:
            if entry is None:
                continue
            if entry.event.error is not None:
                return entry.event
            whole.take(entry.event)
        return None

    gathering = asyncio.ensure_future(gather())
    leaving = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            # nobody reads this
            raise Unprocessable("The client has left.", code="client_closed_request")
        failed = gathering.result()
        if failed is not None and failed.error is not None:
            raise failure_error(failed.error)
        return whole.body()
    finally:
        await end_tasks(gathering, leaving)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stored_answer(reading: Reading) -> Answer:
    """Read how a stream is answered from what was stored with it."""
    return Answer(**{**reading.meta.answer, "created": reading.meta.created})
