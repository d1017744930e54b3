"""The latest picture of each clip that is being made, for whoever follows it; each replaces the one before.

Invariant: a picture goes with its attempt: what has ended or waits again has none, and none stays behind.
"""

import sqlalchemy as sa

from media_server.jobs.database import Database, Transaction
from media_server.jobs.spec import Preview
from media_server.jobs.tables import previews


def keep(tx: Transaction, job_id: str, attempt: int, preview: Preview) -> None:
    """Put a picture in the place of the one before."""
    values = {"attempt": attempt, "number": preview.number, "data": preview.data, "jpeg": preview.jpeg}
    if tx.conn.execute(previews.update().where(previews.c.job_id == job_id).values(**values)).rowcount == 0:
        tx.conn.execute(previews.insert().values(job_id=job_id, **values))


def forget(tx: Transaction, job_id: str) -> None:
    """Remove a job's picture."""
    tx.conn.execute(previews.delete().where(previews.c.job_id == job_id))


def find(db: Database, job_id: str) -> tuple[int, Preview] | None:
    """Find the picture of a job and the attempt that has drawn it; None if there is none (any more)."""
    with db.read() as tx:
        row = tx.conn.execute(sa.select(previews).where(previews.c.job_id == job_id)).first()
    return None if row is None else (row.attempt, Preview(row.number, row.data, row.jpeg))
