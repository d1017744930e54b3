"""A stream of an engine's events as server-sent events, in the manner of OpenAI: data frames, then [DONE].

The last frame of each event carries the event's number as its id, so that a reader that comes back with it goes on
with the next event; frames of control (heartbeats, [DONE], errors of ours) carry none.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi.sse import format_sse_event

from media_server.errors import MediaServerError, ServiceStopping
from media_server.text.answers import Answer
from media_server.text.engine import failure_error
from media_server.text.reading import Entry, Reading

HEARTBEAT_S = 15.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
MEDIA_TYPE = "text/event-stream"


async def frames(answer: Answer, entries: AsyncIterator[Entry | None]) -> AsyncIterator[bytes]:
    """Yield the frames of a stream until [DONE]; a failure is a frame with `error`, after which nothing comes."""
    sent_at = time.monotonic()
    try:
        async for entry in entries:
            if entry is None:
                if time.monotonic() - sent_at >= HEARTBEAT_S:
                    sent_at = time.monotonic()
                    yield format_sse_event(comment="heartbeat")
                continue
            sent_at = time.monotonic()
            if entry.event.error is not None:
                raise failure_error(entry.event.error)
            chunks = answer.chunks(entry.event)
            for number, chunk in enumerate(chunks, start=1):
                yield data_frame(chunk, id=f"{entry.number}-0" if number == len(chunks) else None)
    except ServiceStopping as error:
        # a reader that can take the stream up again takes this for a broken connection
        if not answer.is_resumable:
            yield data_frame({"error": error.to_body()["error"]})
        return
    except MediaServerError as error:
        yield data_frame({"error": error.to_body()["error"]})
        return
    yield format_sse_event(data_str="[DONE]")


async def until_stopped(
    entries: AsyncIterator[Entry | None], reading: Reading, stopping: asyncio.Event
) -> AsyncIterator[Entry | None]:
    """Pass events on. Raises ServiceStopping once the service stops, unless the last event has been read by then."""
    async for entry in entries:
        yield entry
        if stopping.is_set() and not reading.is_over:
            raise ServiceStopping


def data_frame(value: dict[str, Any], id: str | None = None) -> bytes:
    """Write a frame of JSON, in ASCII: some readers take U+2028 for the end of a line."""
    return format_sse_event(data_str=json.dumps(value, separators=(",", ":")), id=id)


def event_number(last_event_id: str | None) -> int | None:
    """Read Last-Event-ID; 0 if there is none, None if it is not one of ours."""
    if not last_event_id:
        return 0
    number, _, rest = last_event_id.partition("-")
    is_ours = number.isascii() and number.isdigit() and len(number) < 12 and rest in ("", "0")
    return int(number) if is_ours else None
