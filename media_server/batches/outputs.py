"""The end of a batch: its lines' records become the output file and the error file, and the lines go.

Invariant: a file is named after its batch, so that what a worker wrote that died is written again over it, and kept
once.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO

import sqlalchemy as sa

from media_server.artifacts.store import ArtifactStore
from media_server.batches import files
from media_server.batches.running import hold
from media_server.batches.store import BatchRow, load
from media_server.jobs import outbox
from media_server.jobs.database import Database
from media_server.jobs.tables import batch_lines, batches
from media_server.jobs.tables import files as files_table

_ROWS = 500


def finish(db: Database, artifacts: ArtifactStore, batch_id: str, worker: str, *, keep_s: float) -> BatchRow:
    """Write a batch's files and end it; its lines are in them and go. Raises BatchLost. Blocking."""
    with db.write() as tx:
        hold(tx, batch_id, worker)
        is_running = sa.and_(batches.c.id == batch_id, batches.c.status == "in_progress")
        tx.conn.execute(batches.update().where(is_running).values(status="finalizing", finalizing_at=tx.now()))
        batch = load(tx, batch_id)
    lifetime_s = keep_s if batch.output_lifetime_s is None else min(keep_s, batch.output_lifetime_s)
    made: dict[str, str] = {}
    for column, is_error in (("output_file_id", False), ("error_file_id", True)):
        with tempfile.TemporaryFile() as file:
            if not _write_records(db, batch_id, file, is_error=is_error):
                continue
            file_id = _file_id(batch_id, column)
            with files.writing(db, artifacts, file_id, file) as stored, db.write() as tx:
                hold(tx, batch_id, worker)
                if tx.conn.scalar(sa.select(files_table.c.id).where(files_table.c.id == file_id)) is None:
                    files.insert(
                        tx,
                        file_id,
                        stored,
                        owner_key_id=batch.owner_key_id,
                        filename=f"{batch_id}_{column.removesuffix('_file_id')}.jsonl",
                        purpose="batch_output",
                        lifetime_s=lifetime_s,
                    )
            made[column] = file_id
    with db.write() as tx:
        hold(tx, batch_id, worker)
        tx.conn.execute(
            batches.update()
            .where(batches.c.id == batch_id)
            .values(status=batch.ending, ended_at=tx.now(), lease_owner=None, lease_until=None, **made)
        )
        tx.conn.execute(batch_lines.delete().where(batch_lines.c.batch_id == batch_id))
        outbox.enqueue_batch(tx, batch_id, batch.owner_key_id, f"batch.{batch.ending}")
        return load(tx, batch_id)


def _write_records(db: Database, batch_id: str, file: IO[bytes], *, is_error: bool) -> int:
    """Write the records of a batch's lines in their order; returns how many."""
    count = 0
    for record in _records(db, batch_id, is_error=is_error):
        file.write(record.encode() + b"\n")
        count += 1
    return count


def _records(db: Database, batch_id: str, *, is_error: bool) -> Iterator[str]:
    table = batch_lines.c
    last = 0
    while True:
        query = sa.select(table.number, table.record).where(
            table.batch_id == batch_id, table.number > last, table.is_error.is_(is_error)
        )
        with db.read() as tx:
            rows = tx.conn.execute(query.order_by(table.number).limit(_ROWS)).all()
        if not rows:
            return
        yield from (row.record for row in rows)
        last = rows[-1].number


def _file_id(batch_id: str, column: str) -> str:
    return f"file_{hashlib.sha256(f'{batch_id}:{column}'.encode()).hexdigest()[:32]}"
