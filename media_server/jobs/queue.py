"""Which job is next, and how a worker takes it: owners take turns, an owner's jobs go by priority, then by age.

Invariant: an attempt's number is never given twice, so whoever holds it can be told apart for ever.
"""

import sqlalchemy as sa

from media_server import films
from media_server.jobs import events, previews
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import load
from media_server.jobs.spec import Claim, Job
from media_server.jobs.states import Status
from media_server.jobs.tables import attempts, jobs, turns

# a claim that meets a cancel on PostgreSQL looks again; each time it finds another job
_CLAIM_TRIES = 5


def claim_next(db: Database, pool: str, worker: str, lease_s: float) -> Claim | None:
    """Take the next job of a pool for `lease_s`: first those whose lease has lapsed, then the queue.

    Owners take turns; an owner's jobs go by priority, then by age. Returns None if nothing is to be had.
    """
    with db.read() as tx:
        if tx.conn.execute(_CANDIDATE, {"pool": pool, "now": tx.now()}).first() is None:
            # an idle worker does not ask for the write lock
            return None
    with db.write("claim") as tx:
        # one claim of a pool at a time, so that turns are kept
        tx.lock(f"claim:{pool}")
        for _ in range(_CLAIM_TRIES):
            found = tx.conn.execute(_CANDIDATE, {"pool": pool, "now": tx.now()}).first()
            if found is None:
                return None
            tx.lock(found.root_id)
            job = _take(tx, found.id, worker, lease_s)
            if job is not None:
                return Claim(job=job, attempt=job.attempt, worker=worker)
    return None


def is_lapsed(now: float | sa.BindParameter[float]) -> sa.ColumnElement[bool]:
    """Say of a row whether its worker has let the lease run out."""
    return sa.and_(jobs.c.status == Status.IN_PROGRESS, jobs.c.lease_until <= now)


def is_waiting(now: float | sa.BindParameter[float]) -> sa.ColumnElement[bool]:
    """Say of a row whether it is queued, and may be taken now."""
    return sa.and_(jobs.c.status == Status.QUEUED, sa.or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now))


def has_attempts(job: Job) -> bool:
    """Whether a job may be tried again; attempts that a drain gave back do not count."""
    return job.attempt - job.uncounted < job.max_attempts


def _select_candidate() -> sa.Select[tuple[str, str]]:
    """Select id and root of the job that a claim takes next; `pool` and `now` are bound."""
    pool = sa.bindparam("pool", type_=sa.String)
    now = sa.bindparam("now", type_=sa.Double)
    lapsed = (
        sa.select(jobs.c.id)
        .where(
            jobs.c.pool == pool,
            is_lapsed(now),
            jobs.c.cancel_requested_at.is_(None),
            jobs.c.attempt - jobs.c.uncounted < jobs.c.max_attempts,
        )
        .order_by(jobs.c.lease_until)
        .limit(1)
        .correlate(None)
        .scalar_subquery()
    )
    waiting = jobs.alias("waiting")
    owner = (
        sa.select(turns.c.queue_key)
        .where(
            turns.c.pool == pool,
            sa.exists().where(
                waiting.c.pool == pool,
                waiting.c.status == Status.QUEUED,
                waiting.c.queue_key == turns.c.queue_key,
                sa.or_(waiting.c.not_before.is_(None), waiting.c.not_before <= now),
            ),
        )
        .order_by(turns.c.turn, turns.c.queue_key)
        .limit(1)
        .scalar_subquery()
    )
    queued = (
        sa.select(jobs.c.id)
        .where(jobs.c.pool == pool, is_waiting(now), jobs.c.queue_key == owner)
        .order_by(jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id)
        .limit(1)
        .correlate(None)
        .scalar_subquery()
    )
    return sa.select(jobs.c.id, jobs.c.root_id).where(jobs.c.id == sa.func.coalesce(lapsed, queued))


def _take(tx: Transaction, id: str, worker: str, lease_s: float) -> Job | None:
    """Make a job this worker's, if it can still be had."""
    now = tx.now()
    taken = tx.conn.execute(
        jobs.update()
        .where(
            jobs.c.id == id,
            jobs.c.cancel_requested_at.is_(None),
            jobs.c.attempt - jobs.c.uncounted < jobs.c.max_attempts,
            sa.or_(is_waiting(now), is_lapsed(now)),
        )
        .values(
            status=Status.IN_PROGRESS,
            attempt=jobs.c.attempt + 1,
            lease_owner=worker,
            lease_until=now + lease_s,
            not_before=None,
            started_at=sa.func.coalesce(jobs.c.started_at, now),
            progress=0.0,
            stage=None,
            step=None,
            total_steps=None,
            eta_s=None,
        )
        .returning(jobs.c.pool, jobs.c.queue_key, jobs.c.attempt)
    ).first()
    if taken is None:
        return None
    previews.forget(tx, id)
    # the one before, if it never said how it ended
    tx.conn.execute(
        attempts.update()
        .where(attempts.c.job_id == id, attempts.c.attempt < taken.attempt, attempts.c.outcome == "running")
        .values(outcome="lost", ended_at=now)
    )
    tx.conn.execute(
        attempts.insert().values(job_id=id, attempt=taken.attempt, worker=worker, outcome="running", started_at=now)
    )
    next_turn = sa.select(sa.func.max(_LAST_TURN.c.turn) + 1).where(_LAST_TURN.c.pool == taken.pool).scalar_subquery()
    tx.conn.execute(
        turns.update().where(turns.c.pool == taken.pool, turns.c.queue_key == taken.queue_key).values(turn=next_turn)
    )
    job = load(tx, id, with_deleted=True)
    type = "job.started" if job.attempt == 1 else "job.attempt"
    events.append(tx, job, type, {"status": job.status, "attempt": job.attempt})
    if job.parent_id is not None:
        films.child_started(tx, job)
    return job


# built once: the claim is what idle workers do all the time
_CANDIDATE = _select_candidate()
_LAST_TURN = turns.alias("last_turn")
