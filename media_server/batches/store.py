"""What the API does to batches: create, read, list, cancel; and the end of those that are old.

    validating ──► in_progress ──► finalizing ──► completed | expired
        └──► failed     └──► cancelling ──► cancelled     (from validating too)

Invariant: a batch that has not ended belongs to its worker (`running.py`); the API only asks for its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from media_server.batches import files
from media_server.errors import Conflict, InvalidRequest, NotFound, RateLimited
from media_server.ids import new_id
from media_server.jobs import idempotency
from media_server.jobs.database import Database, Transaction
from media_server.jobs.idempotency import Hold
from media_server.jobs.tables import batches

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = ("failed", "completed", "expired", "cancelled")
# of one owner, that have not ended
MAX_OPEN = 100
_RETRY_S = 60.0
_A_ROUND = 50


@dataclass(frozen=True)
class BatchRow:
    """A row of the batches table."""

    id: str
    owner_key_id: str | None
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]
    model: str | None
    traceparent: str | None
    status: BatchStatus
    ending: Literal["completed", "expired", "cancelled"]
    errors: list[dict[str, Any]] | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    output_file_id: str | None
    error_file_id: str | None
    output_lifetime_s: float | None
    created_at: float
    expires_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    cancelling_at: float | None
    ended_at: float | None
    lease_owner: str | None
    lease_until: float | None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is done for it."""
        return self.status in ENDED


def create(
    db: Database,
    *,
    owner_key_id: str | None,
    input_file: files.FileRow,
    endpoint: str,
    completion_window: str,
    window_s: float,
    metadata: Mapping[str, str],
    output_lifetime_s: float | None,
    traceparent: str | None,
    key: Hold | None = None,
) -> BatchRow:
    """Write a batch, to be validated and run by a worker.

    Raises NotFound if its file was deleted meanwhile, RateLimited if its owner has too many batches.
    """
    batch_id = new_id("batch")
    with db.write() as tx:
        tx.lock(f"file:{input_file.id}")
        tx.lock(f"batches:{owner_key_id or ''}")
        files.load(tx, input_file.id)
        is_open = sa.and_(_is_of(owner_key_id), batches.c.ended_at.is_(None))
        count = tx.conn.scalar(sa.select(sa.func.count()).select_from(batches).where(is_open)) or 0
        if count >= MAX_OPEN:
            raise RateLimited(
                f"At most {MAX_OPEN} batches may be under way, and {count} are.",
                code="batch_quota",
                rule=f"at most {MAX_OPEN} batches",
                value=count,
                retry_after_s=_RETRY_S,
            )
        tx.conn.execute(
            batches.insert().values(
                id=batch_id,
                owner_key_id=owner_key_id,
                endpoint=endpoint,
                input_file_id=input_file.id,
                completion_window=completion_window,
                metadata=dict(metadata),
                traceparent=traceparent,
                status="validating",
                ending="completed",
                total=0,
                completed=0,
                failed=0,
                input_tokens=0,
                output_tokens=0,
                output_lifetime_s=output_lifetime_s,
                created_at=tx.now(),
                expires_at=tx.now() + window_s,
            )
        )
        if key is not None:
            idempotency.bind(tx, key, made_id=batch_id)
        return load(tx, batch_id)


def load(tx: Transaction, batch_id: str) -> BatchRow:
    """Read a batch. Raises NotFound if there is none."""
    row = tx.conn.execute(sa.select(batches).where(batches.c.id == batch_id)).mappings().first()
    if row is None:
        raise NotFound(f"No batch has the id {batch_id!r}.", param="id", value=batch_id)
    return BatchRow(**row)


def get(db: Database, batch_id: str) -> BatchRow:
    """Read a batch. Raises NotFound if there is none."""
    with db.read() as tx:
        return load(tx, batch_id)


def list_batches(
    db: Database, *, owner_key_id: str | None, after: str | None, limit: int
) -> tuple[list[BatchRow], bool]:
    """List batches, newest first, of everybody if no owner is named; returns a page and whether there are more.

    Raises InvalidRequest if there is no batch `after`.
    """
    query = sa.select(batches)
    if owner_key_id is not None:
        query = query.where(batches.c.owner_key_id == owner_key_id)
    with db.read() as tx:
        if after is not None:
            last = _last(tx, after, owner_key_id)
            place = sa.tuple_(batches.c.created_at, batches.c.id)
            query = query.where(place < sa.tuple_(sa.literal(last.created_at), sa.literal(last.id)))
        query = query.order_by(batches.c.created_at.desc(), batches.c.id.desc())
        rows = [BatchRow(**row) for row in tx.conn.execute(query.limit(limit + 1)).mappings()]
    return rows[:limit], len(rows) > limit


def cancel(db: Database, batch_id: str) -> BatchRow:
    """Ask a batch to stop; its worker ends its lines, and then says `cancelled`. Asking twice changes nothing.

    Raises NotFound, or Conflict if its lines have all ended.
    """
    with db.write() as tx:
        asked = tx.conn.execute(
            batches.update()
            .where(batches.c.id == batch_id, batches.c.status.in_(("validating", "in_progress")))
            .values(status="cancelling", ending="cancelled", cancelling_at=tx.now())
        )
        batch = load(tx, batch_id)
        if asked.rowcount == 0 and batch.status not in ("cancelling", "cancelled"):
            raise Conflict(
                f"{batch_id} is {batch.status}: there is nothing left to cancel.",
                code="batch_ended",
                param="batch_id",
                rule="validating or in_progress",
                value=batch.status,
            )
        return batch


def delete_expired(db: Database, *, keep_s: float) -> list[str]:
    """Remove the rows of batches that ended `keep_s` ago; returns their ids. Their files go by their own time."""
    with db.read() as tx:
        query = sa.select(batches.c.id).where(batches.c.ended_at <= tx.now() - keep_s)
        expired = list(tx.conn.scalars(query.limit(_A_ROUND)))
    if expired:
        with db.write() as tx:
            tx.conn.execute(batches.delete().where(batches.c.id.in_(expired)))
            for batch_id in expired:
                idempotency.erase_answers(tx, batch_id)
    return expired


def _is_of(owner_key_id: str | None) -> sa.ColumnElement[bool]:
    column = batches.c.owner_key_id
    return column.is_(None) if owner_key_id is None else column == owner_key_id


def _last(tx: Transaction, after: str, owner_key_id: str | None) -> BatchRow:
    rule = "the id of a batch"
    try:
        last = load(tx, after)
        if owner_key_id is not None and last.owner_key_id != owner_key_id:
            raise NotFound(after)
    except NotFound as error:
        message = f"after: must be {rule}; none has the id {after!r}."
        raise InvalidRequest(message, param="after", rule=rule, value=after) from error
    return last
