"""Where a job stands in its pool's queue, and how long it waits: what is taken before it, and what that takes.

Owners take turns, so a job waits for its owner's jobs before it and for as many of each other owner's. Seconds come
from the predictions on the rows and from what running jobs say; they are shared among the pool's living workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from media_server.jobs.database import Transaction
from media_server.jobs.spec import Job, Place
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs, models
from media_server.models.registry import LIVE_S

__all__ = ["Place", "eta_of", "live_workers", "place_of", "place_of_next", "places_of"]

# a part of a queue that is summed up either way before two more look-ups could have paid
_SHORT = 200


@dataclass(frozen=True)
class _Sum:
    """Jobs, and the seconds of those of them that are predicted; a database's sum of nothing is None."""

    jobs: int = 0
    predicted: int = 0
    seconds: float | None = 0.0

    def plus(self, other: "_Sum") -> "_Sum":
        """Add up two."""
        return _Sum(
            self.jobs + other.jobs, self.predicted + other.predicted, (self.seconds or 0.0) + (other.seconds or 0.0)
        )

    def minus(self, other: "_Sum") -> "_Sum":
        """Take a part out; what rounding leaves of nothing is nothing."""
        seconds = max(0.0, (self.seconds or 0.0) - (other.seconds or 0.0))
        return _Sum(self.jobs - other.jobs, self.predicted - other.predicted, seconds)

    @property
    def mean_s(self) -> float | None:
        """Seconds a job."""
        return (self.seconds or 0.0) / self.predicted if self.predicted else None


def place_of(tx: Transaction, job: Job) -> Place | None:
    """Find the place of a job: 0 is next; None if it does not wait."""
    return places_of(tx, [job]).get(job.id)


def places_of(tx: Transaction, page: Sequence[Job]) -> dict[str, Place]:
    """Find the places of those jobs of a page that wait: each queue is read once, from each job on to the next."""
    waiting = [job for job in page if job.status is Status.QUEUED]
    queues = {pool: _read_queue(tx, pool) for pool in {job.pool for job in waiting}}
    found: dict[str, Place] = {}
    before: Job | None = None
    ahead = _Sum()
    for job in sorted(waiting, key=lambda job: (job.pool, _owner(job), -job.priority, job.created_at, job.id)):
        if before is not None and _rank(before) == _rank(job):
            between = (jobs.c.priority == job.priority, _place(before) <= _PLACE, _place(job) > _PLACE)
            ahead = ahead.plus(_sum_of(tx, job.pool, _owner(job), *between))
        else:
            ahead = queues[job.pool].above(_owner(job), job.priority).plus(_earlier(tx, job, queues[job.pool]))
        before = job
        found[job.id] = queues[job.pool].place(_owner(job), ahead)
    return found


def place_of_next(tx: Transaction, pool: str, owner_key_id: str | None, priority: int) -> Place:
    """Find the place that a job would have if its owner submitted it now."""
    mine = owner_key_id or ""
    queue = _read_queue(tx, pool)
    return queue.place(mine, queue.above(mine, priority - 1))


def eta_of(job: Job, place: Place) -> float | None:
    """Add what a job itself takes to its wait, in seconds, if both are known."""
    if place.wait_s is None or job.predicted_gpu_seconds is None:
        return None
    return round(place.wait_s + job.predicted_gpu_seconds, 1)


def live_workers(tx: Transaction, pool: str) -> int:
    """Count the workers of a pool that were seen lately; at least one, who will be back."""
    seen = sa.and_(models.c.pool == pool, models.c.seen_at > tx.now() - LIVE_S)
    return max(1, tx.conn.scalar(sa.select(sa.func.count(models.c.worker.distinct())).where(seen)) or 0)


@dataclass(frozen=True)
class _Queue:
    """A pool's queue as a whole: what each owner has in it, in the order of their turns, and what runs.

    `parts` are each owner's by priority.
    """

    owners: dict[str, _Sum]
    parts: dict[str, dict[int, _Sum]]
    order: list[str]
    whole: _Sum
    running: _Sum
    remaining_s: float
    num_workers: int

    def above(self, mine: str, priority: int) -> _Sum:
        """Sum up an owner's jobs of a higher priority."""
        total = _Sum()
        for other, part in self.parts.get(mine, {}).items():
            if other > priority:
                total = total.plus(part)
        return total

    def place(self, mine: str, own: _Sum) -> Place:
        """Give the place of a job that has `own` of its owner's before it.

        Owners take turns: each other one is served as often as this owner before this job, once more if it is nearer
        to its turn.
        """
        ahead = own
        is_nearer = True
        for key in self.order:
            if key == mine:
                is_nearer = False
            elif (other := self.owners.get(key)) is not None:
                count = min(other.jobs, own.jobs + is_nearer)
                known = other.mean_s is not None
                ahead = ahead.plus(_Sum(count, count if known else 0, count * (other.mean_s or 0.0)))
        waiting = self.owners[mine].jobs if mine in self.owners else 0
        return Place(ahead=ahead.jobs, waiting=waiting, wait_s=self._wait_s(ahead))

    def _wait_s(self, ahead: _Sum) -> float | None:
        """Add what runs to what is ahead; a job of which nothing is known counts as the pool's mean."""
        mean_s = self.whole.mean_s if self.whole.mean_s is not None else self.running.mean_s
        unknown = ahead.jobs - ahead.predicted
        if unknown and mean_s is None:
            return None
        return (self.remaining_s + (ahead.seconds or 0.0) + unknown * (mean_s or 0.0)) / self.num_workers


def _read_queue(tx: Transaction, pool: str) -> _Queue:
    in_queue = sa.and_(jobs.c.pool == pool, jobs.c.status == Status.QUEUED)
    owners: dict[str, _Sum] = {}
    parts: dict[str, dict[int, _Sum]] = {}
    whole = _Sum()
    by = (jobs.c.queue_key, jobs.c.priority)
    # the one pass over the queue, read from an index alone; priorities fall in it
    for key, priority, *figures in tx.conn.execute(
        sa.select(*by, *_FIGURES).where(in_queue).group_by(*by).order_by(by[0], by[1].desc())
    ):
        part = _Sum().plus(_Sum(*figures))
        parts.setdefault(key, {})[priority] = part
        owners[key] = owners.get(key, _Sum()).plus(part)
        whole = whole.plus(part)
    order = tx.conn.scalars(
        sa.text("SELECT queue_key FROM turns WHERE pool = :pool ORDER BY turn, queue_key"), {"pool": pool}
    )
    running = _Sum()
    remaining_s = 0.0
    now = tx.now()
    query = sa.select(jobs.c.predicted_gpu_seconds, jobs.c.eta_s, jobs.c.started_at)
    for row in tx.conn.execute(query.where(jobs.c.pool == pool, jobs.c.status == Status.IN_PROGRESS)):
        running = running.plus(_Sum(1, int(row.predicted_gpu_seconds is not None), row.predicted_gpu_seconds))
        if row.eta_s is not None:
            remaining_s += row.eta_s
        elif row.predicted_gpu_seconds is not None:
            remaining_s += max(0.0, row.predicted_gpu_seconds - (now - (row.started_at or now)))
    return _Queue(owners, parts, list(order), whole, running, remaining_s, live_workers(tx, pool))


def _earlier(tx: Transaction, job: Job, queue: _Queue) -> _Sum:
    """Sum up the jobs of a job's owner and priority that came before it, by way of the shorter side.

    Who asks most is who has just submitted: nearly all of the queue is before that job, and nearly nothing behind it.
    """
    peers = queue.parts.get(_owner(job), {}).get(job.priority, _Sum())
    same = (jobs.c.priority == job.priority,)
    if peers.jobs > _SHORT:
        times = sa.select(jobs.c.created_at).where(*_waits(job.pool, _owner(job)), *same).limit(1)
        first = tx.conn.scalar(times.order_by(jobs.c.created_at))
        last = tx.conn.scalar(times.order_by(jobs.c.created_at.desc()))
        if first is not None and last is not None and job.created_at - first > last - job.created_at:
            return peers.minus(_sum_of(tx, job.pool, _owner(job), *same, _place(job) <= _PLACE))
    return _sum_of(tx, job.pool, _owner(job), *same, _place(job) > _PLACE)


def _sum_of(tx: Transaction, pool: str, mine: str, *which: sa.ColumnElement[bool]) -> _Sum:
    """Sum up those jobs of an owner that wait."""
    row = tx.conn.execute(sa.select(*_FIGURES).where(*_waits(pool, mine), *which)).one()
    return _Sum().plus(_Sum(*row))


def _waits(pool: str, mine: str) -> tuple[sa.ColumnElement[bool], ...]:
    return jobs.c.pool == pool, jobs.c.status == Status.QUEUED, jobs.c.queue_key == mine


def _owner(job: Job) -> str:
    return job.owner_key_id or ""


def _rank(job: Job) -> tuple[str, str, int]:
    return job.pool, _owner(job), job.priority


def _place(job: Job) -> sa.Tuple:
    return sa.tuple_(sa.literal(job.created_at), sa.literal(job.id))


_PLACE = sa.tuple_(jobs.c.created_at, jobs.c.id)
# a sum's three, as the database gives them
_FIGURES = (sa.func.count(), sa.func.count(jobs.c.predicted_gpu_seconds), sa.func.sum(jobs.c.predicted_gpu_seconds))
