"""Rows of the jobs table in and out: the one place that translates between columns and `Job`."""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from media_server import quotas
from media_server.errors import NotFound
from media_server.ids import new_id
from media_server.jobs import events, idempotency, ledger
from media_server.jobs.database import Transaction
from media_server.jobs.spec import Job, JobSpec, UsageRecord
from media_server.jobs.states import Status
from media_server.jobs.tables import job_metadata, jobs, prompts

# the pool of films: no worker serves it, their transactions move them
FILMS_POOL = "films"
_OWN_COLUMNS = {"queue_key"}


def insert(tx: Transaction, spec: JobSpec) -> Job:
    """Write a job, its prompts and its first event; its pool's doorbell rings after the commit.

    Raises StillAccepting if the job's idempotency key is held for another request by now, RateLimited or Forbidden if
    the caller's key may not have it now.
    """
    id = spec.id or new_id(spec.kind)
    root_id = spec.root_id or spec.parent_id or id
    now = tx.now()
    tx.lock(root_id)
    quotas.admit(tx, spec)
    values: dict[str, Any] = {
        "id": id,
        "kind": spec.kind,
        "pool": spec.pool,
        "priority": spec.priority,
        "status": spec.status,
        "owner_key_id": spec.owner_key_id,
        "parent_id": spec.parent_id,
        "root_id": root_id,
        "traceparent": spec.traceparent,
        "model": spec.model,
        "params": dict(spec.params),
        "metadata": dict(spec.metadata),
        "label": spec.label,
        "progress": 0.0,
        "attempt": 0,
        "uncounted": 0,
        "max_attempts": spec.max_attempts,
        "created_at": now,
        "retention_s": spec.retention_s,
        "doorbell_at": now,
        "webhook_url": spec.webhook_url,
        "remixed_from_id": spec.remixed_from_id,
        "predicted_gpu_seconds": spec.predicted_gpu_seconds,
        "predicted_peak_memory_bytes": spec.predicted_peak_memory_bytes,
        "answer_s": spec.answer_s,
    }
    queue_key = spec.owner_key_id or ""
    tx.conn.execute(jobs.insert().values(**values, queue_key=queue_key))
    if spec.metadata:
        tx.conn.execute(
            job_metadata.insert(),
            [{"job_id": id, "key": key, "value": value, "created_at": now} for key, value in spec.metadata.items()],
        )
    if spec.idempotency_key is not None:
        idempotency.bind(tx, spec.idempotency_key, made_id=id)
    if spec.prompts:
        tx.conn.execute(
            prompts.insert(), [{"job_id": id, "field": field, "text": text} for field, text in spec.prompts.items()]
        )
    job = load(tx, id)
    if spec.input_bytes:
        ledger.enter(tx, job, [UsageRecord("storage_bytes", spec.input_bytes)])
    events.append(tx, job, "job.queued", {"status": job.status})
    if spec.pool != FILMS_POOL:
        _take_place(tx, spec.pool, queue_key)
        tx.ring(spec.pool)
    return job


def load(tx: Transaction, id: str, *, with_deleted: bool = False) -> Job:
    """Read a job. Raises NotFound if there is none, or if it is deleted."""
    found = select(tx, sa.select(jobs).where(jobs.c.id == id))
    if not found or (found[0].deleted_at is not None and not with_deleted):
        raise NotFound(f"No job has the id {id!r}.", param="id", value=id)
    return found[0]


def select(tx: Transaction, query: sa.Select[Any]) -> list[Job]:
    """Read the jobs that a query over the table's columns finds, with their prompts, in its order."""
    rows = list(tx.conn.execute(query).mappings())
    texts: dict[str, dict[str, str]] = {row["id"]: {} for row in rows}
    for ids in _chunks(list(texts)):
        for job_id, field, text in tx.conn.execute(
            sa.select(prompts.c.job_id, prompts.c.field, prompts.c.text).where(prompts.c.job_id.in_(ids))
        ):
            texts[job_id][field] = text
    return [_to_job(row, texts[row["id"]]) for row in rows]


def _to_job(row: RowMapping, texts: dict[str, str]) -> Job:
    values = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
    return Job(**{**values, "status": Status(row["status"]), "prompts": texts})


def _take_place(tx: Transaction, pool: str, queue_key: str) -> None:
    """Enter an owner into the pool's round, as one that was never served, unless it is there."""
    tx.conn.execute(
        sa.text("INSERT INTO turns (pool, queue_key, turn) VALUES (:pool, :key, 0) ON CONFLICT DO NOTHING"),
        {"pool": pool, "key": queue_key},
    )


def _chunks(ids: list[str]) -> Iterable[list[str]]:
    # SQLite takes a limited number of bound values in one statement
    return (ids[start : start + 500] for start in range(0, len(ids), 500))
