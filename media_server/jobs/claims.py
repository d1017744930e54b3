"""What workers do to the jobs they hold: beat, keep finished parts, finish, give back; with claim and sweep beside it.

Invariants: a job ends by the attempt that is current, in one transaction with its event and its outbox rows; the
other attempts learn that they lost.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from media_server import films
from media_server.errors import JobError
from media_server.ids import new_id
from media_server.jobs import events, ledger, previews, transitions
from media_server.jobs.database import Database, Transaction
from media_server.jobs.queue import claim_next, has_attempts
from media_server.jobs.rows import select
from media_server.jobs.spec import Beat, Checkpoint, Claim, Job, Preview, Result, UsageRecord
from media_server.jobs.states import Status
from media_server.jobs.sweep import end_leases, sweep
from media_server.jobs.tables import artifacts, attempts, jobs
from media_server.jobs.tables import checkpoints as checkpoints_table

__all__ = [
    "beat",
    "checkpoints",
    "claim_next",
    "complete",
    "confirm_cancel",
    "end_leases",
    "fail",
    "release",
    "save_checkpoint",
    "say_drift",
    "sweep",
]

# a language engine is back from a crash in seconds: attempts at once would only use them up
_RETRY_WAIT_S = {"engine_unavailable": 5.0}


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
    preview: Preview | None = None,
) -> Beat:
    """Renew a lease and say how far the work is; with nothing to say it is the lease alone.

    Progress (0 to 100) never goes backwards within an attempt: a lower figure leaves the row as it is. A preview takes
    the place of the one before; its event has its number, and a reader the picture for as long as there is one.
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
    with db.write("beat", is_durable=False) as tx:
        tx.lock(claim.job.root_id)
        row = tx.conn.execute(
            jobs.update()
            .where(_is_ours(claim))
            .values(**columns, lease_until=tx.now() + lease_s)
            .returning(jobs.c.cancel_requested_at, jobs.c.progress)
        ).first()
        if row is None:
            return Beat(is_ours=False, cancel_requested=False)
        if preview is not None:
            previews.keep(tx, claim.job.id, claim.attempt, preview)
            data = {**(data or {}), "preview": preview.number}
        if said or data or progress is not None:
            events.append(tx, claim.job, "job.progress", {**said, "progress": row.progress, **(data or {})})
        if progress is not None and claim.job.parent_id is not None:
            films.child_progressed(tx, claim.job.parent_id)
        return Beat(is_ours=True, cancel_requested=row.cancel_requested_at is not None)


def complete(db: Database, claim: Claim, result: Result) -> bool:
    """Publish an attempt's result and end the job; False if the attempt is not the job's any more.

    The files must be durable by now. An attempt that lost deletes its own.
    """
    with db.write("finish") as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        now = tx.now()
        stored = UsageRecord("storage_bytes", sum(record.size_bytes for record in result.artifacts))
        total = _spend(tx, job, result.gpu_seconds, [*result.usage, stored])
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
    with db.write("fail") as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        spent = {"gpu_seconds": _spend(tx, job, gpu_seconds)}
        if job.cancel_requested_at is not None:
            return films.end_job(tx, job, Status.CANCELLED, values=spent)
        if retryable and has_attempts(job):
            wait_s = _RETRY_WAIT_S.get(error.code, 0.0) if retry_in_s is None else retry_in_s
            return transitions.requeue(
                tx, job, "job.retry", outcome="failed", error=error, is_counted=True, wait_s=wait_s
            )
        return films.end_job(tx, job, Status.FAILED, error=error, values=spent)


def confirm_cancel(db: Database, claim: Claim, *, gpu_seconds: float | None = None) -> bool:
    """Say that the work has stopped; False if nobody asked for it or the attempt is not the job's any more."""
    with db.write("confirm_cancel") as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None or job.cancel_requested_at is None:
            return False
        return films.end_job(tx, job, Status.CANCELLED, values={"gpu_seconds": _spend(tx, job, gpu_seconds)})


def release(db: Database, claim: Claim, *, gpu_seconds: float | None = None) -> bool:
    """Give a job back unfinished, because its worker ends: the attempt does not count against max_attempts."""
    with db.write("release") as tx:
        tx.lock(claim.job.root_id)
        job = _mine(tx, claim)
        if job is None:
            return False
        spent = {"gpu_seconds": _spend(tx, job, gpu_seconds)}
        if job.cancel_requested_at is not None:
            return films.end_job(tx, job, Status.CANCELLED, values=spent)
        return transitions.requeue(tx, job, "job.released", outcome="released", is_counted=False)


def save_checkpoint(db: Database, claim: Claim, sequence: int, key: str, data: dict[str, Any]) -> bool:
    """Keep a finished part for later attempts; False if the attempt is not the job's any more."""
    with db.write("checkpoint") as tx:
        tx.lock(claim.job.root_id)
        if _mine(tx, claim) is None:
            return False
        values = {"attempt": claim.attempt, "key": key, "data": data, "created_at": tx.now()}
        mine = sa.and_(checkpoints_table.c.job_id == claim.job.id, checkpoints_table.c.sequence == sequence)
        if tx.conn.execute(checkpoints_table.update().where(mine).values(**values)).rowcount == 0:
            tx.conn.execute(checkpoints_table.insert().values(job_id=claim.job.id, sequence=sequence, **values))
        return True


def say_drift(db: Database, claim: Claim, finding: dict[str, Any]) -> bool:
    """Tell the job's readers what was measured of a segment; False if the attempt is not the job's any more."""
    with db.write(is_durable=False) as tx:
        tx.lock(claim.job.root_id)
        if _mine(tx, claim) is None:
            return False
        events.append(tx, claim.job, "job.drift", finding)
        return True


def checkpoints(db: Database, job_id: str) -> list[Checkpoint]:
    """List a job's finished parts in order."""
    table = checkpoints_table
    query = sa.select(table.c.sequence, table.c.attempt, table.c.key, table.c.data)
    with db.read() as tx:
        rows = tx.conn.execute(query.where(table.c.job_id == job_id).order_by(table.c.sequence))
        return [Checkpoint(**row) for row in rows.mappings()]


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
    ledger.enter(tx, job, entries)
    return total


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
