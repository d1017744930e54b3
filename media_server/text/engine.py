"""The way to an engine and back: a request to the replica that suits it best (routing.py), its events as they come.

Two clients do the same, one for coroutines (the API) and one for threads (the storyboard worker). What a stream means
is in reading.py; the messages are in messages.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from pydantic import ValidationError

from media_server.errors import InvalidRequest, MediaServerError, NotReady
from media_server.text.messages import (
    ENGINES_KEY,
    INBOX_S,
    Abort,
    Announcement,
    Failure,
    Generate,
    Grammar,
    RequestMeta,
    Sampling,
    engine_key,
    inbox_key,
    meta_key,
    outbox_key,
)
from media_server.text.reading import EngineUnavailable, Entry, Reading
from media_server.text.routing import Router

__all__ = ["GRAMMAR_TOO_COMPLEX", "AsyncEngineClient", "EngineClient", "EngineUnavailable", "Prompt", "failure_error"]

# an engine's word for a grammar past its parser's limits: the fault of whoever wrote the grammar
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
DEADLINE_S = 900.0
# the API's connection gives up after 10 s
_BLOCK_MS = 1000
_RETRY_S = 0.1
_BATCH = 256
_INBOX_LENGTH = 100_000
_BROKEN = (redis.RedisError, OSError)


@dataclass(frozen=True)
class Prompt:
    """What is asked of an engine; `answer` is what the asker must know to go on with the stream later."""

    id: str
    model: str
    token_ids: Sequence[int]
    sampling: Sampling
    grammar: Grammar | None = None
    resume_s: float | None = None
    deadline_s: float = DEADLINE_S
    priority: int = 0
    trace: str | None = None
    owner_key_id: str | None = None
    answer: dict[str, Any] | None = None
    # whether nothing of it may outlive the answer
    is_forgotten: bool = False


class AsyncEngineClient:
    """For coroutines."""

    def __init__(self, client: redis.asyncio.Redis, router: Router | None = None) -> None:
        """`router`: what is known of the replicas; one of its own knows nothing yet."""
        self._redis = client
        self._router = router or Router()

    async def submit(self, prompt: Prompt) -> Reading:
        """Send a prompt to a replica; read its events with `events`.

        Raises EngineUnavailable if no replica serves the model.
        """
        try:
            message = _address(prompt, await self._living(), self._router)
            await self._send(message)
        except _BROKEN as error:
            raise _no_broker() from error
        return Reading(message.id, message.meta, message=message)

    async def announcements(self) -> list[Announcement] | None:
        """List the replicas that live; None if Valkey does not answer."""
        try:
            return await self._living()
        except _BROKEN:
            return None

    async def served_models(self) -> set[str]:
        """Name the models that a prompt could be sent to now. Raises EngineUnavailable if the broker is away."""
        try:
            living = await self._living()
        except _BROKEN as error:
            raise _no_broker() from error
        return {item.model for item in living if not item.is_draining}

    async def resume(self, request_id: str, after: int) -> Reading | None:
        """Find a stream to be taken up after event number `after`; None if it is not kept (any more)."""
        try:
            found = await self._redis.get(meta_key(request_id))
        except _BROKEN as error:
            raise _no_broker() from error
        return None if found is None else Reading(request_id, RequestMeta.model_validate_json(found), after)

    async def events(self, reading: Reading) -> AsyncIterator[Entry | None]:
        """Yield the events of a stream until its last; None each second without news.

        Raises EngineUnavailable if the engine goes away.
        """
        while not reading.is_over:
            try:
                reply: Any = await self._redis.xread(reading.position, block=_BLOCK_MS, count=_BATCH)
                entries = reading.take(reply)
                if reading.is_over and reading.meta.is_forgotten:
                    await self._redis.unlink(*_keys_of(reading))
                for entry in entries:
                    yield entry
                if not entries:
                    again = reading.check(_announcement(await self._redis.get(engine_key(reading.meta.engine))))
                    if again is not None:
                        await self._send(again)
                    if reply:
                        # a gap: what is missing is being written again
                        await asyncio.sleep(_RETRY_S)
                    yield None
            except _BROKEN:
                reading.note_outage()
                await asyncio.sleep(_RETRY_S)

    async def abort(self, reading: Reading) -> None:
        """Ask the engine to end a request; one that has ended is left alone."""
        if not reading.is_over:
            try:
                await self._redis.xadd(inbox_key(reading.meta.engine), {"m": _abort(reading)}, maxlen=_INBOX_LENGTH)
            except _BROKEN:
                # the deadline ends it
                return

    async def _living(self) -> list[Announcement]:
        names: Any = await self._redis.smembers(ENGINES_KEY)
        found = await self._redis.mget([engine_key(name.decode()) for name in sorted(names)]) if names else []
        return _living(found)

    async def _send(self, message: Generate) -> None:
        key = inbox_key(message.meta.engine)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(key, {"m": message.model_dump_json()}, maxlen=_INBOX_LENGTH)
        pipeline.expire(key, INBOX_S)
        await pipeline.execute()


class EngineClient:
    """For threads."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._router = Router()

    def submit(self, prompt: Prompt) -> Reading:
        """Send a prompt to a replica. Raises EngineUnavailable if no replica serves the model."""
        try:
            names: Any = self._redis.smembers(ENGINES_KEY)
            found: Any = self._redis.mget([engine_key(name.decode()) for name in names]) if names else []
            message = _address(prompt, _living(found), self._router)
            self._send(message)
        except _BROKEN as error:
            raise _no_broker() from error
        return Reading(message.id, message.meta, message=message)

    def events(self, reading: Reading) -> Iterator[Entry | None]:
        """Yield the events of a stream until its last; None each second without news.

        Raises EngineUnavailable if the engine goes away.
        """
        while not reading.is_over:
            try:
                reply: Any = self._redis.xread(reading.position, block=_BLOCK_MS, count=_BATCH)
                entries = reading.take(reply)
                if reading.is_over and reading.meta.is_forgotten:
                    self._redis.unlink(*_keys_of(reading))
                yield from entries
                if not entries:
                    found: Any = self._redis.get(engine_key(reading.meta.engine))
                    again = reading.check(_announcement(found))
                    if again is not None:
                        self._send(again)
                    if reply:
                        time.sleep(_RETRY_S)
                    yield None
            except _BROKEN:
                reading.note_outage()
                time.sleep(_RETRY_S)

    def abort(self, reading: Reading) -> None:
        """Ask the engine to end a request; one that has ended is left alone."""
        if not reading.is_over:
            try:
                self._redis.xadd(inbox_key(reading.meta.engine), {"m": _abort(reading)}, maxlen=_INBOX_LENGTH)
            except _BROKEN:
                return

    def _send(self, message: Generate) -> None:
        key = inbox_key(message.meta.engine)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(key, {"m": message.model_dump_json()}, maxlen=_INBOX_LENGTH)
        pipeline.expire(key, INBOX_S)
        pipeline.execute()


def failure_error(failure: Failure) -> MediaServerError:
    """Turn an engine's failure into the error that leaves by HTTP."""
    if failure.code in ("invalid_request", "context_length_exceeded", GRAMMAR_TOO_COMPLEX):
        return InvalidRequest(failure.message, code=failure.code, param=failure.param)
    if failure.code == "engine_unavailable":
        return EngineUnavailable(failure.message)
    if failure.code == "deadline_exceeded":
        return NotReady(failure.message, code=failure.code)
    return MediaServerError(failure.message, code=failure.code)


def _living(announcements: Sequence[bytes | str | None]) -> list[Announcement]:
    return [announcement for text in announcements if (announcement := _announcement(text)) is not None]


def _address(prompt: Prompt, living: Sequence[Announcement], router: Router) -> Generate:
    """Choose a replica, and write the message to it."""
    able = [item for item in living if item.model == prompt.model and not item.is_draining]
    if not able:
        raise EngineUnavailable(
            f"No engine serves {prompt.model} at the moment; try again.", param="model", value=prompt.model
        )
    replica = router.choose(able, prompt.token_ids, prompt.owner_key_id or "", is_kept=not prompt.is_forgotten)
    return Generate(
        id=prompt.id,
        trace=prompt.trace,
        deadline=time.time() + prompt.deadline_s,
        model=prompt.model,
        prompt_token_ids=list(prompt.token_ids),
        sampling=prompt.sampling,
        grammar=prompt.grammar,
        resume_s=prompt.resume_s,
        priority=prompt.priority,
        meta=RequestMeta(
            engine=replica.name,
            instance=replica.instance,
            model=prompt.model,
            created=int(time.time()),
            owner_key_id=prompt.owner_key_id,
            answer=prompt.answer or {},
            is_forgotten=prompt.is_forgotten,
        ),
    )


def _announcement(text: bytes | str | None) -> Announcement | None:
    if text is None:
        return None
    try:
        return Announcement.model_validate_json(text)
    except ValidationError:
        # a replica of another version
        return None


def _keys_of(reading: Reading) -> tuple[str, str]:
    return outbox_key(reading.request_id), meta_key(reading.request_id)


def _abort(reading: Reading) -> str:
    return Abort(id=reading.request_id).model_dump_json()


def _no_broker() -> EngineUnavailable:
    return EngineUnavailable("The broker does not answer; try again.", code="broker_unavailable")
