"""What workers do to jobs: claim, beat, finish, give back; and the sweep that cares for what workers left behind.

Invariants: an attempt's number is never given twice, so whoever holds it can be told apart for ever; a job ends by
the attempt that is current, in one transaction with its event and its outbox rows; the others learn that they lost.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from media_server import films
from media_server.errors import JobError
from media_server.ids import new_id
from media_server.jobs import events, transitions
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import FILMS_POOL, load, select
from media_server.jobs.spec import Beat, Checkpoint, Claim, Job, Result, SweepReport, UsageRecord
from media_server.jobs.states import Status
from media_server.jobs.tables import artifacts, attempts, jobs, turns, usage
from media_server.jobs.tables import checkpoints as checkpoints_table

# a claim that meets a cancel on PostgreSQL looks again; each time it finds another job
_CLAIM_TRIES = 5
# a language engine is back from a crash in seconds: attempts at once would only use them up
_RETRY_WAIT_S = {"engine_unavailable": 5.0}


def claim_next(db: Database, pool: str, worker: str, lease_s: float) -> Claim | None:
    """Take the next job of a pool for `lease_s`: first those whose lease has lapsed, then the queue.

    Owners take turns; an owner's jobs go by priority, then by age. Returns None if nothing is to be had.
    """
    with db.read() as tx:
        if tx.conn.execute(_CANDIDATE, {"pool": pool, "now": tx.now()}).first() is None:
            # an idle worker does not ask for the write lock
            return None
    with db.write() as tx:
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


def beat(
    db: Database,
    claim: Claim,
    *,
    lease_s: float,
    stage: str | None = None,
    step: int | None = None,
    total_steps: int | None = None,
    progress: float | None = None,
    eta_s: float | None = None,
    data: dict[str, Any] | None = None,
) -> Beat:
    """Renew a lease and say how far the work is; with nothing to say it is the lease alone.

    Progress (0 to 100) never goes backwards within an attempt: a lower figure leaves the row as it is.
    """
    said: dict[str, Any] = {
        name: value
        for name, value in {"stage": stage, "step": step, "total_steps": total_steps, "eta_s": eta_s}.items()
        if value is not None
    }
    columns: dict[str, Any] = dict(said)
    if progress is not None:
        progress = min(max(progress, 0.0), 100.0)
        columns["progress"] = sa.case((jobs.c.progress < progress, progress), else_=jobs.c.progress)
    with db.write(is_durable=False) as tx:
        tx.lock(claim.job.root_id)
        row = tx.conn.execute(
            jobs.update()
            .where(_is_ours(claim))
            .values(**columns, lease_until=tx.now() + lease_s)
            .returning(jobs.c.cancel_requested_at, jobs.c.progress)
        ).first()
        if row is None:
            return Beat(is_ours=False, cancel_requested=False)
        if said or data or progress is not None:
            events.append(tx, claim.job, "job.progress", {**said, "progress": row.progress, **(data or {})})
        if progress is not None and claim.job.parent_id is not None:
            films.child_progressed(tx, claim.job.parent_id)
        return Beat(is_ours=True, cancel_requested=row.cancel_requested_at is not None)


def complete(db: Database, claim: Claim, result: Result) -> bool:
    """Publish an attempt's result and end the job; False if the attempt is not the job's any more.

    The files must be durable by now. An attempt that lost deletes its own.
    """
    with db.write() as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        now = tx.now()
        total = _spend(tx, job, result.gpu_seconds, result.usage)
        for record in result.artifacts:
            tx.conn.execute(
                artifacts.insert().values(
                    id=new_id("art"),
                    job_id=job.id,
                    attempt=claim.attempt,
                    name=record.name,
                    sequence=record.sequence,
                    state=record.state,
                    key=record.key,
                    content_type=record.content_type,
                    size_bytes=record.size_bytes,
                    sha256=record.sha256,
                    created_at=now,
                )
            )
        return films.end_job(
            tx,
            job,
            Status.COMPLETED,
            winning_attempt=claim.attempt,
            values={
                "result": result.result,
                "gpu_seconds": total,
                "peak_memory_bytes": result.peak_memory_bytes,
            },
        )


def fail(
    db: Database,
    claim: Claim,
    error: JobError,
    retryable: bool = False,
    *,
    retry_in_s: float | None = None,
    gpu_seconds: float | None = None,
) -> bool:
    """End the job as failed or, if it may be tried again, put it back; False if the attempt is not the job's.

    `retry_in_s` is how long it waits for its next attempt (None: as long as the error's code suggests). A job whose
    cancel was asked for ends as cancelled: its work has stopped.
    """
    with db.write() as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        spent = {"gpu_seconds": _spend(tx, job, gpu_seconds)}
        if job.cancel_requested_at is not None:
            return films.end_job(tx, job, Status.CANCELLED, values=spent)
        if retryable and _has_attempts(job):
            wait_s = _RETRY_WAIT_S.get(error.code, 0.0) if retry_in_s is None else retry_in_s
            return transitions.requeue(
                tx, job, "job.retry", outcome="failed", error=error, is_counted=True, wait_s=wait_s
            )
        return films.end_job(tx, job, Status.FAILED, error=error, values=spent)


def confirm_cancel(db: Database, claim: Claim, *, gpu_seconds: float | None = None) -> bool:
    """Say that the work has stopped; False if nobody asked for it or the attempt is not the job's any more."""
    with db.write() as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None or job.cancel_requested_at is None:
            return False
        return films.end_job(tx, job, Status.CANCELLED, values={"gpu_seconds": _spend(tx, job, gpu_seconds)})


def release(db: Database, claim: Claim, *, gpu_seconds: float | None = None) -> bool:
    """Give a job back unfinished, because its worker ends: the attempt does not count against max_attempts."""
    with db.write() as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        spent = {"gpu_seconds": _spend(tx, job, gpu_seconds)}
        if job.cancel_requested_at is not None:
            return films.end_job(tx, job, Status.CANCELLED, values=spent)
        return transitions.requeue(tx, job, "job.released", outcome="released", is_counted=False)


def end_leases(db: Database, worker: str) -> int:
    """End the leases of a worker that was seen to die, so that its jobs go on at once; returns how many."""
    with db.read() as tx:
        held = tx.conn.execute(
            sa.select(jobs.c.id, jobs.c.root_id).where(
                jobs.c.lease_owner == worker, jobs.c.status == Status.IN_PROGRESS
            )
        ).all()
    count = 0
    for row in held:
        with db.write() as tx:
            tx.lock(row.root_id)
            ended = tx.conn.execute(
                jobs.update()
                .where(jobs.c.id == row.id, jobs.c.lease_owner == worker, jobs.c.status == Status.IN_PROGRESS)
                .values(lease_until=tx.now())
                .returning(jobs.c.pool)
            ).first()
            if ended is not None:
                count += 1
                tx.ring(ended.pool)
    return count


def save_checkpoint(db: Database, claim: Claim, sequence: int, key: str, data: dict[str, Any]) -> bool:
    """Keep a finished part for later attempts; False if the attempt is not the job's any more."""
    with db.write() as tx:
        tx.lock(claim.job.root_id)
        if _mine(tx, claim) is None:
            return False
        values = {"attempt": claim.attempt, "key": key, "data": data, "created_at": tx.now()}
        mine = sa.and_(checkpoints_table.c.job_id == claim.job.id, checkpoints_table.c.sequence == sequence)
        if tx.conn.execute(checkpoints_table.update().where(mine).values(**values)).rowcount == 0:
            tx.conn.execute(checkpoints_table.insert().values(job_id=claim.job.id, sequence=sequence, **values))
        return True


def checkpoints(db: Database, job_id: str) -> list[Checkpoint]:
    """List a job's finished parts in order."""
    table = checkpoints_table
    query = sa.select(table.c.sequence, table.c.attempt, table.c.key, table.c.data)
    with db.read() as tx:
        rows = tx.conn.execute(query.where(table.c.job_id == job_id).order_by(table.c.sequence))
        return [Checkpoint(**row) for row in rows.mappings()]


def sweep(db: Database, *, doorbell_s: float) -> SweepReport:
    """Care for what workers left: end jobs that nobody may take again, ring for those that somebody should.

    A lapsed job ends as cancelled if that was asked for, as `worker_lost` if its attempts are used up.
    """
    lost: list[str] = []
    cancelled: list[str] = []
    with db.read() as tx:
        lapsed = select(tx, sa.select(jobs).where(_is_lapsed(tx.now())))
    for seen in lapsed:
        if seen.cancel_requested_at is None and _has_attempts(seen):
            continue
        with db.write() as tx:
            tx.lock(seen.root_id)
            found = select(tx, sa.select(jobs).where(jobs.c.id == seen.id, _is_lapsed(tx.now())))
            if not found:
                continue
            (job,) = found
            if job.cancel_requested_at is not None:
                films.end_job(tx, job, Status.CANCELLED, outcome="lost")
                cancelled.append(job.id)
            elif not _has_attempts(job):
                error = JobError("worker_lost", f"Its worker was lost {job.max_attempts} times.")
                films.end_job(tx, job, Status.FAILED, error=error, outcome="lost")
                lost.append(job.id)
    return SweepReport(lost=lost, cancelled=cancelled, rung=_ring_again(db, doorbell_s))


def _select_candidate() -> sa.Select[tuple[str, str]]:
    """Select id and root of the job that a claim takes next; `pool` and `now` are bound."""
    pool = sa.bindparam("pool", type_=sa.String)
    now = sa.bindparam("now", type_=sa.Double)
    lapsed = (
        sa.select(jobs.c.id)
        .where(
            jobs.c.pool == pool,
            _is_lapsed(now),
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
        .where(jobs.c.pool == pool, _is_waiting(now), jobs.c.queue_key == owner)
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
            sa.or_(_is_waiting(now), _is_lapsed(now)),
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


def _spend(tx: Transaction, job: Job, gpu_seconds: float | None, further: Sequence[UsageRecord] = ()) -> float | None:
    """Enter what an attempt used into the ledger; returns the GPU seconds of all attempts so far."""
    entries = list(further)
    total = job.gpu_seconds
    if gpu_seconds is not None:
        total = (total or 0.0) + gpu_seconds
        entries.append(UsageRecord("gpu_seconds", gpu_seconds))
        tx.conn.execute(jobs.update().where(jobs.c.id == job.id).values(gpu_seconds=total))
        tx.conn.execute(
            attempts.update()
            .where(attempts.c.job_id == job.id, attempts.c.attempt == job.attempt)
            .values(gpu_seconds=gpu_seconds)
        )
    for entry in entries:
        tx.conn.execute(
            usage.insert().values(
                created_at=tx.now(),
                owner_key_id=job.owner_key_id,
                job_id=job.id,
                root_id=job.root_id,
                label=job.label,
                model=job.model,
                kind=entry.kind,
                amount=entry.amount,
            )
        )
    return total


def _ring_again(db: Database, doorbell_s: float) -> list[str]:
    """Ring for pools that have work to take and whose bell has been silent for `doorbell_s`."""
    with db.read() as tx:
        now = tx.now()
        last = sa.func.max(jobs.c.doorbell_at)
        waiting = sa.or_(_is_waiting(now), _is_lapsed(now))
        silent = tx.conn.execute(
            sa.select(jobs.c.pool, sa.func.min(jobs.c.id).label("id"))
            .where(waiting, jobs.c.pool != FILMS_POOL)
            .group_by(jobs.c.pool)
            .having(sa.func.coalesce(last, 0.0) <= now - doorbell_s)
        ).all()
    for row in silent:
        with db.write() as tx:
            # one row carries the bell of its pool
            tx.conn.execute(jobs.update().where(jobs.c.id == row.id).values(doorbell_at=tx.now()))
            tx.ring(row.pool)
    return [row.pool for row in silent]


def _mine(tx: Transaction, claim: Claim) -> Job | None:
    found = select(tx, sa.select(jobs).where(_is_ours(claim)))
    return found[0] if found else None


def _is_ours(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.and_(
        jobs.c.id == claim.job.id,
        jobs.c.attempt == claim.attempt,
        jobs.c.status == Status.IN_PROGRESS,
        jobs.c.lease_owner == claim.worker,
    )


def _is_lapsed(now: float | sa.BindParameter[float]) -> sa.ColumnElement[bool]:
    return sa.and_(jobs.c.status == Status.IN_PROGRESS, jobs.c.lease_until <= now)


def _is_waiting(now: float | sa.BindParameter[float]) -> sa.ColumnElement[bool]:
    return sa.and_(jobs.c.status == Status.QUEUED, sa.or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now))


def _has_attempts(job: Job) -> bool:
    return job.attempt - job.uncounted < job.max_attempts


# built once: the claim is what idle workers do all the time
_CANDIDATE = _select_candidate()
_LAST_TURN = turns.alias("last_turn")
