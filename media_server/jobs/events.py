"""The append-only, versioned table of events that feeds SSE, webhooks, films and the studio.

Types: job.queued, job.started (the first attempt), job.attempt (each later one), job.progress, job.drift (what was
measured of a segment), job.cancel_requested, job.released, job.retry, and one terminal
`<kind>.completed | failed | cancelled`. job.position and job.preview are of the moment: http_events.py makes them, and
they have no row.
Invariant: events of one family (a root and its children) are numbered in the order of their commits, since whoever
appends holds the family's lock: a reader that has seen `seq` misses nothing below it.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from media_server.jobs.database import Database, Transaction
from media_server.jobs.spec import Event, Job
from media_server.jobs.tables import events

EVENT_VERSION = 1


def append(tx: Transaction, job: Job, type: str, data: Mapping[str, Any]) -> int:
    """Write an event of a job; returns its seq."""
    seq = tx.conn.scalar(
        events.insert()
        .values(
            v=EVENT_VERSION,
            job_id=job.id,
            root_id=job.root_id,
            attempt=job.attempt,
            type=type,
            data=dict(data),
            created_at=tx.now(),
        )
        .returning(events.c.seq)
    )
    assert seq is not None
    return int(seq)


def read_after(
    db: Database, *, job_id: str | None = None, root_id: str | None = None, after: int = 0, limit: int = 500
) -> list[Event]:
    """Read the next events of a job, of a whole family, or of all; `after` is the last seq that the caller has."""
    query = sa.select(events).where(events.c.seq > after).order_by(events.c.seq).limit(limit)
    if job_id is not None:
        query = query.where(events.c.job_id == job_id)
    if root_id is not None:
        query = query.where(events.c.root_id == root_id)
    with db.read() as tx:
        return [Event(**row) for row in tx.conn.execute(query).mappings()]
