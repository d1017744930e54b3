"""Where a job stands in its pool's queue, and how long it waits: what is taken before it, and what that takes.

Owners take turns, so a job waits for its owner's jobs before it and for as many of each other owner's. Seconds come
from the predictions on the rows and from what running jobs say; they are shared among the pool's living workers.
"""

from dataclasses import dataclass

import sqlalchemy as sa

from media_server.jobs.database import Transaction
from media_server.jobs.spec import Job
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs, models
from media_server.models.registry import LIVE_S


@dataclass(frozen=True)
class Place:
    """A place in a queue: jobs that are taken before, jobs of the same owner that wait in all, and the wait.

    `wait_s` is None where nothing is known of what the jobs take.
    """

    ahead: int
    waiting: int
    wait_s: float | None


@dataclass
class _Sum:
    """Jobs, and the seconds of those of them that are predicted."""

    jobs: int = 0
    predicted: int = 0
    seconds: float = 0.0

    def add(self, jobs: int, predicted: int, seconds: float | None) -> None:
        self.jobs += jobs
        self.predicted += predicted
        self.seconds += seconds or 0.0

    @property
    def mean_s(self) -> float | None:
        """Seconds a job."""
        return self.seconds / self.predicted if self.predicted else None


def place_of(tx: Transaction, job: Job) -> Place | None:
    """Find the place of a job: 0 is next; None if it does not wait."""
    if job.status is not Status.QUEUED:
        return None
    is_before = sa.or_(
        jobs.c.priority > job.priority,
        sa.and_(
            jobs.c.priority == job.priority,
            sa.tuple_(jobs.c.created_at, jobs.c.id) < sa.tuple_(sa.literal(job.created_at), sa.literal(job.id)),
        ),
    )
    return _find(tx, job.pool, job.owner_key_id or "", is_before)


def place_of_next(tx: Transaction, pool: str, owner_key_id: str | None, priority: int) -> Place:
    """Find the place that a job would have if its owner submitted it now."""
    return _find(tx, pool, owner_key_id or "", jobs.c.priority >= priority)


def live_workers(tx: Transaction, pool: str) -> int:
    """Count the workers of a pool that were seen lately; at least one, who will be back."""
    seen = sa.and_(models.c.pool == pool, models.c.seen_at > tx.now() - LIVE_S)
    return max(1, tx.conn.scalar(sa.select(sa.func.count(models.c.worker.distinct())).where(seen)) or 0)


def _find(tx: Transaction, pool: str, mine: str, is_before: sa.ColumnElement[bool]) -> Place:
    in_queue = sa.and_(jobs.c.pool == pool, jobs.c.status == Status.QUEUED)
    predicted = jobs.c.predicted_gpu_seconds
    figures = (sa.func.count(), sa.func.count(predicted), sa.func.sum(predicted))
    ahead = _Sum()
    ahead.add(*tx.conn.execute(sa.select(*figures).where(in_queue, jobs.c.queue_key == mine, is_before)).one())
    owners: dict[str, _Sum] = {}
    whole = _Sum()
    for key, *row in tx.conn.execute(sa.select(jobs.c.queue_key, *figures).where(in_queue).group_by(jobs.c.queue_key)):
        owners[key] = _Sum()
        owners[key].add(*row)
        whole.add(*row)
    order = [
        key
        for (key,) in tx.conn.execute(
            sa.text("SELECT queue_key FROM turns WHERE pool = :pool ORDER BY turn, queue_key"), {"pool": pool}
        )
    ]
    # owners take turns: each other one is served as often as this owner before this job, once more if it is
    # nearer to its turn
    num_mine = ahead.jobs
    is_nearer = True
    for key in order:
        if key == mine:
            is_nearer = False
        elif (other := owners.get(key)) is not None:
            count = min(other.jobs, num_mine + is_nearer)
            known = other.mean_s is not None
            ahead.add(count, count if known else 0, count * (other.mean_s or 0.0))
    waiting = owners[mine].jobs if mine in owners else 0
    return Place(ahead=ahead.jobs, waiting=waiting, wait_s=_wait_s(tx, pool, ahead, whole))


def _wait_s(tx: Transaction, pool: str, ahead: _Sum, whole: _Sum) -> float | None:
    """Add what runs to what is ahead; a job of which nothing is known counts as the pool's mean."""
    running = _Sum()
    remaining_s = 0.0
    now = tx.now()
    query = sa.select(jobs.c.predicted_gpu_seconds, jobs.c.eta_s, jobs.c.started_at)
    for row in tx.conn.execute(query.where(jobs.c.pool == pool, jobs.c.status == Status.IN_PROGRESS)):
        running.add(1, int(row.predicted_gpu_seconds is not None), row.predicted_gpu_seconds)
        if row.eta_s is not None:
            remaining_s += row.eta_s
        elif row.predicted_gpu_seconds is not None:
            remaining_s += max(0.0, row.predicted_gpu_seconds - (now - (row.started_at or now)))
    mean_s = whole.mean_s if whole.mean_s is not None else running.mean_s
    unknown = ahead.jobs - ahead.predicted
    if unknown and mean_s is None:
        return None
    return (remaining_s + ahead.seconds + unknown * (mean_s or 0.0)) / live_workers(tx, pool)
