"""Moves of a job's row between its states, each with its event, inside a transaction that the caller holds.

Invariants: a row moves only from the state that the caller saw (the UPDATE carries it as a condition), the caller
holds the family's lock, and a terminal move writes row, event, outbox and garbage together or not at all.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from media_server.errors import JobError
from media_server.figures import JOBS_ENDED
from media_server.jobs import idempotency, ledger, outbox, previews
from media_server.jobs.database import Transaction
from media_server.jobs.events import append
from media_server.jobs.rows import load
from media_server.jobs.spec import Job
from media_server.jobs.states import ACTIVE, Status, check_move
from media_server.jobs.tables import attempts, checkpoints, events, garbage, job_metadata, jobs, prompts

# a worker that lost its lease may still write for a moment: it learns of it with its next beat
STRAGGLER_S = 30.0
# the folder of a job's finished parts, which outlive their attempts
SEGMENTS = "segments"


def end(
    tx: Transaction,
    job: Job,
    status: Status,
    *,
    error: JobError | None = None,
    winning_attempt: int | None = None,
    values: Mapping[str, Any] | None = None,
    outcome: str | None = None,
) -> bool:
    """End a job; returns whether it was still as the caller saw it.

    `values` are further columns of its row; `outcome` is what the attempts table says of a running attempt.
    """
    check_move(job.status, status)
    now = tx.now()
    columns: dict[str, Any] = {
        **(values or {}),
        "status": status,
        "completed_at": now,
        "expires_at": None if job.retention_s is None else now + job.retention_s,
        "winning_attempt": winning_attempt,
        "eta_s": None,
        "lease_until": None,
        "lease_owner": None,
        "error_code": error.code if error else None,
        "error_message": error.message if error else None,
    }
    if status is Status.COMPLETED:
        columns |= {"progress": 100.0, "stage": None, "step": None, "total_steps": None}
    moved = tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == job.id, jobs.c.status == job.status, jobs.c.attempt == job.attempt)
        .values(**columns)
    )
    if moved.rowcount == 0:
        return False
    end_attempt(tx, job, outcome or status.value, error)
    tx.counts.count(JOBS_ENDED, job.kind, status.value)
    ended = load(tx, job.id, with_deleted=True)
    data: dict[str, Any] = {"status": status}
    if error is not None:
        data["error"] = {"code": error.code, "message": error.message}
    type = f"{job.kind}.{status}"
    outbox.enqueue(tx, ended, append(tx, ended, type, data), type)
    if ended.answer_s is not None:
        _begin_to_forget(tx, ended)
    if ended.deleted_at is not None:
        erase(tx, ended)
        discard(tx, f"{job.id}/", delay_s=STRAGGLER_S)
    else:
        _discard_attempts(tx, ended)
    return True


def _begin_to_forget(tx: Transaction, job: Job) -> None:
    """Erase the prompts of a job that keeps no words, and say when its family's answers go; words.py has the rest."""
    assert job.answer_s is not None
    tx.conn.execute(prompts.delete().where(prompts.c.job_id == job.id))
    until = tx.now() + job.answer_s
    # a child that ends after its film brings words that are to go too
    has_ended = sa.and_(jobs.c.id == job.root_id, jobs.c.completed_at.is_not(None))
    tx.conn.execute(jobs.update().where(has_ended).values(words_until=until))


def requeue(
    tx: Transaction,
    job: Job,
    type: str,
    *,
    outcome: str,
    error: JobError | None = None,
    is_counted: bool,
    wait_s: float = 0.0,
) -> bool:
    """Put a running job back into the queue, for `wait_s` out of reach; returns whether it was as the caller saw it."""
    check_move(job.status, Status.QUEUED)
    moved = tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == job.id, jobs.c.status == job.status, jobs.c.attempt == job.attempt)
        .values(
            status=Status.QUEUED,
            uncounted=jobs.c.uncounted + (0 if is_counted else 1),
            lease_until=None,
            lease_owner=None,
            eta_s=None,
            # the sweeper rings when the wait is over
            doorbell_at=None if wait_s else tx.now(),
            not_before=tx.now() + wait_s if wait_s else None,
        )
    )
    if moved.rowcount == 0:
        return False
    end_attempt(tx, job, outcome, error)
    data = {"error": {"code": error.code, "message": error.message}} if error else {}
    append(tx, job, type, {"status": Status.QUEUED, **data})
    if not wait_s:
        tx.ring(job.pool)
    return True


def request_cancel(tx: Transaction, job: Job) -> None:
    """Note that a job that runs is to stop; it ends when its worker, or a film's last child, confirms."""
    asked = tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == job.id, jobs.c.status.in_(ACTIVE), jobs.c.cancel_requested_at.is_(None))
        .values(cancel_requested_at=tx.now())
    )
    if asked.rowcount:
        append(tx, job, "job.cancel_requested", {"status": job.status})


def end_attempt(tx: Transaction, job: Job, outcome: str, error: JobError | None = None) -> None:
    """Close the attempts row of the job's current attempt, if it is open; its picture goes with it."""
    previews.forget(tx, job.id)
    tx.conn.execute(
        attempts.update()
        .where(attempts.c.job_id == job.id, attempts.c.attempt == job.attempt, attempts.c.outcome == "running")
        .values(
            outcome=outcome,
            ended_at=tx.now(),
            error_code=error.code if error else None,
            error_message=error.message if error else None,
        )
    )


def erase(tx: Transaction, job: Job) -> None:
    """Remove everything that a caller wrote or a model answered in words; the bare row stays for a while.

    The ledger's label stays with it; the URL of a message that is still to be delivered goes when that is settled.
    """
    tx.conn.execute(prompts.delete().where(prompts.c.job_id == job.id))
    idempotency.erase_answers(tx, job.id)
    tx.conn.execute(job_metadata.delete().where(job_metadata.c.job_id == job.id))
    tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == job.id)
        .values(params={}, metadata={}, result=None, error_message=None, webhook_url=None)
    )
    # a message may repeat what it refused
    tx.conn.execute(attempts.update().where(attempts.c.job_id == job.id).values(error_message=None))
    tx.conn.execute(checkpoints.update().where(checkpoints.c.job_id == job.id).values(data={}))
    tx.conn.execute(events.update().where(events.c.job_id == job.id).values(data={}))
    outbox.forget_urls(tx, job.id)
    ledger.give_up_storage(tx, job)


def discard(tx: Transaction, prefix: str, *, delay_s: float = 0.0) -> None:
    """Hand the files under a key prefix to the sweeper, which removes them after the delay."""
    due_at = tx.now() + delay_s
    renewed = tx.conn.execute(garbage.update().where(garbage.c.prefix == prefix).values(due_at=due_at))
    if renewed.rowcount == 0:
        tx.conn.execute(garbage.insert().values(prefix=prefix, due_at=due_at))


def _discard_attempts(tx: Transaction, job: Job) -> None:
    """Hand over the files of every attempt that did not win; its checkpoints are needed by nobody now."""
    query = sa.select(attempts.c.attempt, attempts.c.outcome).where(attempts.c.job_id == job.id)
    for row in tx.conn.execute(query).all():
        if row.attempt != job.winning_attempt:
            discard(tx, f"{job.id}/{row.attempt}/", delay_s=STRAGGLER_S if row.outcome == "lost" else 0.0)
    if tx.conn.scalar(sa.select(sa.exists().where(checkpoints.c.job_id == job.id))):
        discard(tx, f"{job.id}/{SEGMENTS}/", delay_s=STRAGGLER_S)
