"""A job's events as server-sent events: each has an id, and a listener that comes back with it misses nothing.

One query in `poll_s` looks for news of all listeners at once and only wakes those concerned; what they send they read
themselves, by job, so that a wake-up that is lost costs `FALLBACK_S` and never an event. When the service stops
they send what there is and end, between two events.

Two kinds of events are of the moment: they have no row, no id and no seq, and a listener that comes back gets what is
so by then. `job.position` says where a job that waits stands, when that changes; `job.preview` carries the latest
picture of a clip that is being made, as a data URI, which a page shows without another request and without a header
that it could not send.
"""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import sqlalchemy as sa
from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool

from media_server.errors import NotFound
from media_server.jobs import previews, store, tables
from media_server.jobs.database import Database
from media_server.jobs.events import EVENT_VERSION, read_after
from media_server.jobs.place import eta_of, places_of
from media_server.jobs.rows import FILMS_POOL, select
from media_server.jobs.spec import Event, Job
from media_server.jobs.states import TERMINAL, Status

POLL_S = 0.25
# how often the places of all jobs that are listened to are found, in one look at each queue
POSITIONS_S = 2.0
FALLBACK_S = 2.0
HEARTBEAT_S = 15.0
# a key that is revoked ends its streams after this
KEY_EVERY_S = 5.0
_BATCH = 500
# families in one query, and jobs that are placed of them
_ROOTS = 500
_WAITING = 500

_TAKEN = frozenset({"job.started", "job.attempt"})
_GIVEN_BACK = frozenset({"job.released", "job.retry"})

# of jobs that wait: how many are before it, seconds until it has ended, and its attempts so far
Positions = dict[str, tuple[int, float | None, int]]


class EventFeed:
    """Wakes the listeners of job families that have news; runs only while somebody listens."""

    def __init__(self, db: Database, *, poll_s: float = POLL_S) -> None:
        self.db = db
        self.poll_s = poll_s
        self.is_stopping = False
        # of jobs that wait, by family
        self.positions: dict[str, Positions] = {}
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
                self.positions.pop(root_id, None)

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
        seen: int | None = None
        positions_at = 0.0
        while self._listeners:
            try:
                if seen is None:
                    seen = await run_in_threadpool(self._last_seq)
                await asyncio.sleep(self.poll_s)
                roots, seen = await run_in_threadpool(self._news, seen)
                if time.monotonic() - positions_at >= POSITIONS_S:
                    positions_at = time.monotonic()
                    found = await run_in_threadpool(self._positions, list(self._listeners))
                    roots |= {root for root in self._listeners if found.get(root) != self.positions.get(root)}
                    self.positions = found
            except sa.exc.SQLAlchemyError:
                # listeners fall back to their own look
                await asyncio.sleep(self.poll_s)
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

    def _positions(self, roots: list[str]) -> dict[str, "Positions"]:
        """Find the places of the jobs of these families that wait, of films those of their children."""
        jobs = tables.jobs
        found: dict[str, Positions] = {}
        with self.db.read() as tx:
            waiting: list[Job] = []
            for start in range(0, len(roots), _ROOTS):
                is_ours = jobs.c.root_id.in_(roots[start : start + _ROOTS])
                query = sa.select(jobs).where(is_ours, jobs.c.status == Status.QUEUED, jobs.c.pool != FILMS_POOL)
                waiting += select(tx, query.limit(_WAITING))
            places = places_of(tx, waiting)
        for job in waiting:
            if (place := places.get(job.id)) is not None:
                found.setdefault(job.root_id, {})[job.id] = (place.ahead, eta_of(job, place), job.attempt)
        return found


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
    moment = _Moment(db, job)
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
            positions = feed.positions.get(job.root_id, {})
            if events or positions:
                for frame in await run_in_threadpool(moment.frames, events, positions):
                    yield frame
                    sent_at = loop.time()
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


class _Moment:
    """What one listener was told of positions and pictures."""

    def __init__(self, db: Database, job: Job) -> None:
        self.db = db
        self.job = job
        self.positions: Positions = {}
        # which jobs run, by the events so far: a place that was found before is theirs no more
        self.running: set[str] = set()
        # of each clip, attempt and number of the picture that was sent
        self.pictures: dict[str, tuple[int, int]] = {}

    def frames(self, events: list[Event], positions: "Positions") -> list[bytes]:
        """Make the frames of what has changed: positions, and pictures that the events announce. Blocking."""
        for event in events:
            if event.type in _TAKEN:
                self.running.add(event.job_id)
            elif event.type in _GIVEN_BACK:
                self.running.discard(event.job_id)
        frames = []
        for job_id, position in positions.items():
            is_new = self.positions.get(job_id) != position
            if is_new and self._is_ours(job_id) and job_id not in self.running:
                ahead, eta_s, attempt = position
                data: dict[str, Any] = {"queue_position": ahead, "eta_s": eta_s}
                frames.append(self._encode(job_id, attempt, "job.position", data))
        self.positions = positions
        for job_id in dict.fromkeys(event.job_id for event in events if "preview" in event.data):
            found = previews.find(self.db, job_id)
            # it may be replaced or gone since
            if found is not None and self.pictures.get(job_id) != (found[0], found[1].number):
                attempt, preview = found
                self.pictures[job_id] = (attempt, preview.number)
                image = base64.b64encode(preview.jpeg).decode("ascii")
                data = {**preview.data, "image": f"data:image/jpeg;base64,{image}"}
                frames.append(self._encode(job_id, attempt, "job.preview", data))
        return frames

    def _is_ours(self, job_id: str) -> bool:
        return self.job.kind == "film" or job_id == self.job.id

    def _encode(self, job_id: str, attempt: int, type: str, data: dict[str, Any]) -> bytes:
        frame = {
            "v": EVENT_VERSION,
            "seq": None,
            "job_id": job_id,
            "root_id": self.job.root_id,
            "attempt": attempt,
            "type": type,
            "created_at": time.time(),
            "data": data,
        }
        return format_sse_event(event=type, data_str=json.dumps(frame, ensure_ascii=False, separators=(",", ":")))


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
