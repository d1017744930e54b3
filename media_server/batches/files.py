"""Uploaded files, and the files of answers that batches leave: rows that own one file of the artifact store each.

Invariant: a file in the store has a row, or stands in `garbage`: it is entered there before it is written, and taken
out again by the transaction that writes its row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import sqlalchemy as sa

from media_server import quotas
from media_server.artifacts.store import ArtifactStore, StoredFile
from media_server.errors import Conflict, InvalidRequest, NotFound
from media_server.jobs import idempotency, ledger
from media_server.jobs.database import Database, Transaction
from media_server.jobs.idempotency import Hold
from media_server.jobs.tables import batches, files, garbage
from media_server.jobs.transitions import discard

# as OpenAI keeps files of this purpose
KEEP_S = 30 * 86400.0
# a file that is being written is nobody's for so long at most
_WRITING_S = 3600.0
_A_ROUND = 50
CONTENT_TYPE = "application/jsonl"

FilePurpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class FileRow:
    """A row of the files table."""

    id: str
    owner_key_id: str | None
    filename: str
    purpose: FilePurpose
    key: str
    size_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None


@contextmanager
def writing(
    db: Database, artifacts: ArtifactStore, file_id: str, source: Path | IO[bytes]
) -> Iterator[StoredFile]:
    """Put a file into the store; the block writes its row with `insert`, or the file goes again. Blocking."""
    prefix = f"{file_id}/"
    _discard_ownerless(db, file_id, delay_s=_WRITING_S)
    try:
        yield artifacts.put_file(f"{prefix}content.jsonl", source, CONTENT_TYPE)
    except BaseException:
        _discard_ownerless(db, file_id)
        raise


def insert(
    tx: Transaction,
    file_id: str,
    stored: StoredFile,
    *,
    owner_key_id: str | None,
    filename: str,
    purpose: FilePurpose,
    lifetime_s: float | None,
) -> FileRow:
    """Write the row of a file that is in the store by now, and count it among its owner's bytes."""
    row = FileRow(
        id=file_id,
        owner_key_id=owner_key_id,
        filename=filename,
        purpose=purpose,
        key=stored.key,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        created_at=tx.now(),
        expires_at=None if lifetime_s is None else tx.now() + lifetime_s,
    )
    tx.conn.execute(files.insert().values(**vars(row)))
    tx.conn.execute(garbage.delete().where(garbage.c.prefix == f"{file_id}/"))
    ledger.keep_file(tx, owner_key_id, file_id, stored.size_bytes)
    return row


def upload(
    db: Database,
    artifacts: ArtifactStore,
    file_id: str,
    source: IO[bytes],
    *,
    owner_key_id: str | None,
    filename: str,
    lifetime_s: float | None,
    key: Hold | None = None,
) -> FileRow:
    """Keep a file that a caller sends. Raises RateLimited if its key may keep no more. Blocking."""
    source.seek(0, 2)
    size_bytes = source.tell()
    with db.read() as tx:
        # before it is copied for nothing; the row's own transaction asks again
        quotas.admit_file(tx, owner_key_id, size_bytes)
    with writing(db, artifacts, file_id, source) as stored, db.write() as tx:
        quotas.admit_file(tx, owner_key_id, size_bytes)
        if key is not None:
            idempotency.bind(tx, key, made_id=file_id)
        return insert(
            tx,
            file_id,
            stored,
            owner_key_id=owner_key_id,
            filename=filename,
            purpose="batch",
            lifetime_s=lifetime_s,
        )


def load(tx: Transaction, file_id: str) -> FileRow:
    """Read a file's row. Raises NotFound if there is none."""
    row = tx.conn.execute(sa.select(files).where(files.c.id == file_id)).mappings().first()
    if row is None:
        raise NotFound(f"No file has the id {file_id!r}.", param="id", value=file_id)
    return FileRow(**row)


def list_files(
    db: Database,
    *,
    owner_key_id: str | None,
    purpose: str | None,
    after: str | None,
    limit: int,
    order: Literal["asc", "desc"],
) -> tuple[list[FileRow], bool]:
    """List files, of everybody if no owner is named; returns a page and whether there are more.

    Raises InvalidRequest if there is no file `after`.
    """
    query = sa.select(files)
    if owner_key_id is not None:
        query = query.where(files.c.owner_key_id == owner_key_id)
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    place = sa.tuple_(files.c.created_at, files.c.id)
    with db.read() as tx:
        if after is not None:
            last = _last(tx, after, owner_key_id)
            at = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
            query = query.where(place < at if order == "desc" else place > at)
        columns = (files.c.created_at, files.c.id)
        query = query.order_by(*(column.desc() if order == "desc" else column for column in columns))
        rows = [FileRow(**row) for row in tx.conn.execute(query.limit(limit + 1)).mappings()]
    return rows[:limit], len(rows) > limit


def delete(db: Database, file_id: str) -> FileRow:
    """Delete a file; returns what it was.

    Raises NotFound, or Conflict while a batch still reads it.
    """
    with db.write() as tx:
        tx.lock(f"file:{file_id}")
        row = load(tx, file_id)
        reader = tx.conn.scalar(sa.select(batches.c.id).where(_reads(file_id)).limit(1))
        if reader is not None:
            raise Conflict(
                f"{file_id} is read by {reader}, which has not ended: cancel that first.",
                code="file_in_use",
                param="file_id",
                rule="no batch that has not ended reads it",
                value=file_id,
            )
        _remove(tx, row)
        return row


def delete_expired(db: Database) -> list[str]:
    """Delete files whose time is over, but for those that a batch still reads; returns their ids."""
    is_read = sa.exists().where(batches.c.input_file_id == files.c.id, batches.c.ended_at.is_(None))
    with db.read() as tx:
        query = sa.select(files.c.id).where(files.c.expires_at <= tx.now(), ~is_read)
        expired = list(tx.conn.scalars(query.limit(_A_ROUND)))
    deleted = []
    for file_id in expired:
        try:
            delete(db, file_id)
        except (NotFound, Conflict):
            # another sweeper was first, or a batch began
            continue
        deleted.append(file_id)
    return deleted


def _discard_ownerless(db: Database, file_id: str, *, delay_s: float = 0.0) -> None:
    """Hand a file to the sweeper unless its row is there: another worker may have written the same file."""
    with db.write() as tx:
        if tx.conn.scalar(sa.select(files.c.id).where(files.c.id == file_id)) is None:
            discard(tx, f"{file_id}/", delay_s=delay_s)


def _remove(tx: Transaction, row: FileRow) -> None:
    tx.conn.execute(files.delete().where(files.c.id == row.id))
    discard(tx, f"{row.id}/")
    idempotency.erase_answers(tx, row.id)
    ledger.give_up_file(tx, row.owner_key_id, row.id)


def _reads(file_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(batches.c.input_file_id == file_id, batches.c.ended_at.is_(None))


def _last(tx: Transaction, after: str, owner_key_id: str | None) -> FileRow:
    rule = "the id of a file"
    try:
        last = load(tx, after)
        if owner_key_id is not None and last.owner_key_id != owner_key_id:
            raise NotFound(after)
    except NotFound as error:
        message = f"after: must be {rule}; none has the id {after!r}."
        raise InvalidRequest(message, param="after", rule=rule, value=after) from error
    return last
