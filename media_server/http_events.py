"""A job's events as server-sent events: each has an id, and a listener that comes back with it misses nothing.

One query in `poll_s` looks for news of all listeners at once and only wakes those concerned; what they send they read
themselves, by job, so that a wake-up that is lost costs `FALLBACK_S` and never an event. When the service stops
they send what there is and end, between two events.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import sqlalchemy as sa
from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool

from media_server.errors import NotFound
from media_server.jobs import store, tables
from media_server.jobs.database import Database
from media_server.jobs.events import read_after
from media_server.jobs.spec import Event, Job
from media_server.jobs.states import TERMINAL

POLL_S = 0.25
FALLBACK_S = 2.0
HEARTBEAT_S = 15.0
# a key that is revoked ends its streams after this
KEY_EVERY_S = 5.0
_BATCH = 500


class EventFeed:
    """Wakes the listeners of job families that have news; runs only while somebody listens."""

    def __init__(self, db: Database, *, poll_s: float = POLL_S) -> None:
        self.db = db
        self.poll_s = poll_s
        self.is_stopping = False
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listen(self, root_id: str) -> AsyncIterator[asyncio.Event]:
        """Give an event that is set whenever the family of `root_id` has news."""
        news = asyncio.Event()
        self._listeners.setdefault(root_id, set()).add(news)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield news
        finally:
            self._listeners[root_id].discard(news)
            if not self._listeners[root_id]:
                del self._listeners[root_id]

    def stop(self) -> None:
        """Wake every listener, to end: the service stops."""
        self.is_stopping = True
        for listeners in self._listeners.values():
            for news in listeners:
                news.set()

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        seen = await run_in_threadpool(self._last_seq)
        while self._listeners:
            await asyncio.sleep(self.poll_s)
            try:
                roots, seen = await run_in_threadpool(self._news, seen)
            except sa.exc.OperationalError:
                # listeners fall back to their own look
                continue
            for root_id in roots:
                for news in self._listeners.get(root_id, ()):
                    news.set()

    def _last_seq(self) -> int:
        with self.db.read() as tx:
            return int(tx.conn.scalar(sa.select(sa.func.max(tables.events.c.seq))) or 0)

    def _news(self, seen: int) -> tuple[set[str], int]:
        table = tables.events
        query = sa.select(table.c.root_id, table.c.seq).where(table.c.seq > seen).order_by(table.c.seq).limit(_BATCH)
        with self.db.read() as tx:
            rows = tx.conn.execute(query).all()
        return {row.root_id for row in rows}, rows[-1].seq if rows else seen


async def job_events(
    db: Database, feed: EventFeed, job: Job, *, after: int, is_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the events of a job, of a film with its children's, from `after` on until the job's last one.

    The stream also ends when the job is deleted, when the service stops, and when `is_allowed`, which is asked every
    KEY_EVERY_S and may block, says no.
    """
    yield format_sse_event(retry=2000)
    loop = asyncio.get_running_loop()
    sent_at = allowed_at = loop.time()
    async with feed.listen(job.root_id) as news:
        while True:
            news.clear()
            if loop.time() - allowed_at >= KEY_EVERY_S:
                if not await run_in_threadpool(is_allowed):
                    return
                allowed_at = loop.time()
            events = await run_in_threadpool(read_events, db, job, after)
            for event in events:
                yield _encode(event)
                after, sent_at = event.seq, loop.time()
                if is_last(event, job):
                    return
            if feed.is_stopping:
                return
            if len(events) == _BATCH:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), FALLBACK_S)
            if not news.is_set() and await run_in_threadpool(_is_over, db, job):
                # it may have ended after the last look
                for event in await run_in_threadpool(read_events, db, job, after):
                    yield _encode(event)
                return
            if loop.time() - sent_at >= HEARTBEAT_S:
                yield format_sse_event(comment="heartbeat")
                sent_at = loop.time()


def read_events(db: Database, job: Job, after: int) -> list[Event]:
    """Read the next events that belong to a job's stream."""
    if job.kind == "film":
        return read_after(db, root_id=job.root_id, after=after, limit=_BATCH)
    return read_after(db, job_id=job.id, after=after, limit=_BATCH)


def is_last(event: Event, job: Job) -> bool:
    """Say whether an event ends its job."""
    return event.job_id == job.id and event.type in {f"{job.kind}.{status}" for status in TERMINAL}


def _encode(event: Event) -> bytes:
    data = {
        "v": event.v,
        "seq": event.seq,
        "job_id": event.job_id,
        "root_id": event.root_id,
        "attempt": event.attempt,
        "type": event.type,
        "created_at": event.created_at,
        "data": event.data,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(id=str(event.seq), event=event.type, data_str=text)


def _is_over(db: Database, job: Job) -> bool:
    """Whether nothing more is to come: the job has ended, or is deleted."""
    try:
        return store.get(db, job.id).status.is_terminal
    except NotFound:
        return True
