"""What a worker does to the batches that it holds: take, beat, ingest, begin and end lines; `outputs.py` ends them.

Invariants: whoever writes holds the batch's lease; a line ends once, in the transaction that counts it; a line that
makes a job makes one, which is bound to it by the transaction that writes the job (`idempotency.HeldLine`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from media_server.batches.lines import LineSpec, failed
from media_server.batches.store import ENDED, BatchRow, load
from media_server.jobs import outbox
from media_server.jobs.database import Database, Transaction
from media_server.jobs.states import TERMINAL
from media_server.jobs.tables import batch_lines, batches, jobs

# of one owner at a time: another's batch is not kept waiting by a hundred of one
MAX_PER_OWNER = 4
_ROWS = 500
# of a line that has not ended
_OPEN = ("pending", "running")
_LOOK = 200


class BatchLost(Exception):
    """The batch is another worker's by now."""


@dataclass(frozen=True)
class Line:
    """A line that is not ended."""

    number: int
    custom_id: str | None
    start: int
    length: int
    tries: int
    job_id: str | None


def claim(db: Database, worker: str, *, lease_s: float, room: int) -> list[BatchRow]:
    """Take up to `room` batches that nobody holds, the oldest of each owner first."""
    held: dict[str | None, int] = {}
    chosen: list[str] = []
    with db.read() as tx:
        now = tx.now()
        open_ = sa.select(batches.c.id, batches.c.owner_key_id, batches.c.lease_until).where(
            batches.c.status.not_in(ENDED)
        )
        rows = tx.conn.execute(open_.order_by(batches.c.created_at, batches.c.id)).all()
    for row in rows:
        if row.lease_until is not None and row.lease_until > now:
            held[row.owner_key_id] = held.get(row.owner_key_id, 0) + 1
    for row in rows[: _LOOK * MAX_PER_OWNER]:
        is_free = row.lease_until is None or row.lease_until <= now
        if is_free and len(chosen) < room and held.get(row.owner_key_id, 0) < MAX_PER_OWNER:
            held[row.owner_key_id] = held.get(row.owner_key_id, 0) + 1
            chosen.append(row.id)
    return [batch for batch_id in chosen if (batch := _take(db, batch_id, worker, lease_s)) is not None]


def beat(db: Database, batch_id: str, worker: str, *, lease_s: float) -> BatchRow:
    """Renew a lease and see how the batch stands; one whose time is over ends as expired. Raises BatchLost."""
    line = batch_lines.c
    # what has ended in time is complete, also if it is seen a moment later
    is_open = sa.exists().where(line.batch_id == batch_id, line.state.in_(_OPEN))
    with db.write(is_durable=False) as tx:
        _renew(tx, batch_id, worker, tx.now() + lease_s)
        tx.conn.execute(
            batches.update()
            .where(
                batches.c.id == batch_id,
                batches.c.status == "in_progress",
                batches.c.expires_at <= tx.now(),
                is_open,
            )
            .values(ending="expired")
        )
        return load(tx, batch_id)


def release(db: Database, batch_id: str, worker: str) -> None:
    """Give a batch back: the next worker goes on with it at once."""
    with db.write() as tx:
        mine = sa.and_(batches.c.id == batch_id, batches.c.lease_owner == worker)
        tx.conn.execute(batches.update().where(mine).values(lease_owner=None, lease_until=None))


def hold(tx: Transaction, batch_id: str, worker: str) -> None:
    """Hold a batch's row for this transaction. Raises BatchLost."""
    _renew(tx, batch_id, worker, batches.c.lease_until)  # type: ignore[arg-type]


def ingest(db: Database, batch: BatchRow, worker: str, lines: Sequence[LineSpec]) -> None:
    """Write a batch's lines and say that it is in progress; those that break a rule have ended. Raises BatchLost."""
    models = {line.model for line in lines if line.record is None}
    num_failed = sum(line.record is not None for line in lines)
    with db.write() as tx:
        hold(tx, batch.id, worker)
        tx.conn.execute(batch_lines.delete().where(batch_lines.c.batch_id == batch.id))
        for start in range(0, len(lines), _ROWS):
            tx.conn.execute(
                batch_lines.insert(), [_line_row(batch.id, line) for line in lines[start : start + _ROWS]]
            )
        values: dict[str, Any] = {"total": len(lines), "completed": 0, "failed": num_failed}
        values["model"] = models.pop() if len(models) == 1 else None
        tx.conn.execute(batches.update().where(batches.c.id == batch.id).values(**values))
        is_new = sa.and_(batches.c.id == batch.id, batches.c.status == "validating")
        tx.conn.execute(batches.update().where(is_new).values(status="in_progress", in_progress_at=tx.now()))


def fail(db: Database, batch_id: str, worker: str, errors: list[dict[str, Any]]) -> None:
    """End a batch whose file is none that can be run. Raises BatchLost."""
    with db.write() as tx:
        hold(tx, batch_id, worker)
        tx.conn.execute(
            batches.update()
            .where(batches.c.id == batch_id)
            .values(status="failed", errors=errors, ended_at=tx.now(), lease_owner=None, lease_until=None)
        )
        outbox.enqueue_batch(tx, batch_id, load(tx, batch_id).owner_key_id, "batch.failed")


def begin_lines(db: Database, batch_id: str, worker: str, limit: int) -> list[Line]:
    """Take the next lines to be sent, in their order. Raises BatchLost."""
    table = batch_lines.c
    with db.read() as tx:
        is_due = sa.or_(table.not_before.is_(None), table.not_before <= tx.now())
        query = sa.select(table.number).where(table.batch_id == batch_id, table.state == "pending", is_due)
        numbers = list(tx.conn.scalars(query.order_by(table.number).limit(limit)))
    if not numbers:
        return []
    with db.write() as tx:
        hold(tx, batch_id, worker)
        taken = tx.conn.execute(
            batch_lines.update()
            .where(table.batch_id == batch_id, table.number.in_(numbers), table.state == "pending")
            .values(state="running", tries=table.tries + 1)
            .returning(*_COLUMNS)
        )
        return sorted((Line(**row) for row in taken.mappings()), key=lambda line: line.number)


def put_back(db: Database, batch_id: str, worker: str, number: int, wait_s: float) -> None:
    """Have a line sent again later: it was refused for a while, or broken off. Raises BatchLost."""
    table = batch_lines.c
    with db.write() as tx:
        hold(tx, batch_id, worker)
        is_free = sa.and_(table.state == "running", table.job_id.is_(None))
        tx.conn.execute(
            batch_lines.update()
            .where(table.batch_id == batch_id, table.number == number, is_free)
            .values(state="pending", not_before=tx.now() + wait_s if wait_s else None)
        )


def end_line(
    db: Database,
    batch_id: str,
    worker: str,
    number: int,
    record: str,
    *,
    is_error: bool,
    input_tokens: int = 0,
    output_tokens: int = 0,
) -> bool:
    """End a line with its record and count it; False if it has ended already. Raises BatchLost."""
    table = batch_lines.c
    with db.write() as tx:
        hold(tx, batch_id, worker)
        ended = tx.conn.execute(
            batch_lines.update()
            .where(table.batch_id == batch_id, table.number == number, table.state.in_(_OPEN))
            .values(state="ended", is_error=is_error, record=record)
        )
        if ended.rowcount:
            _count(tx, batch_id, int(not is_error), int(is_error), input_tokens, output_tokens)
        return bool(ended.rowcount)


def end_unsent(db: Database, batch_id: str, worker: str, code: str, message: str) -> int:
    """End every line that has made no job; returns how many. Raises BatchLost."""
    table = batch_lines.c
    is_unsent = sa.and_(table.batch_id == batch_id, table.state.in_(_OPEN), table.job_id.is_(None))
    number, record = sa.bindparam("line", type_=sa.Integer), sa.bindparam("text", type_=sa.Text)
    update = batch_lines.update().where(table.batch_id == batch_id, table.number == number)
    count = 0
    while True:
        with db.write() as tx:
            hold(tx, batch_id, worker)
            rows = tx.conn.execute(sa.select(table.number, table.custom_id).where(is_unsent).limit(_ROWS)).all()
            if not rows:
                return count
            tx.conn.execute(
                update.values(state="ended", is_error=True, record=record),
                [
                    {"line": row.number, "text": failed(batch_id, row.number, row.custom_id, None, code, message)}
                    for row in rows
                ],
            )
            _count(tx, batch_id, 0, len(rows))
            count += len(rows)


def lines_with_jobs(db: Database, batch_id: str, *, has_ended: bool) -> list[Line]:
    """List lines under way whose jobs have ended, were deleted, or are no more; or those whose jobs go on."""
    table = batch_lines.c
    is_over = sa.or_(jobs.c.id.is_(None), jobs.c.deleted_at.is_not(None), jobs.c.status.in_(TERMINAL))
    query = (
        sa.select(*_COLUMNS)
        .select_from(batch_lines.outerjoin(jobs, jobs.c.id == table.job_id))
        .where(table.batch_id == batch_id, table.state == "running", table.job_id.is_not(None))
        .where(is_over if has_ended else ~is_over)
    )
    with db.read() as tx:
        return [Line(**row) for row in tx.conn.execute(query.order_by(table.number)).mappings()]


def count_open(db: Database, batch_id: str) -> int:
    """Count the lines that have not ended."""
    query = sa.select(sa.func.count()).select_from(batch_lines)
    with db.read() as tx:
        is_open = sa.and_(batch_lines.c.batch_id == batch_id, batch_lines.c.state.in_(_OPEN))
        return int(tx.conn.scalar(query.where(is_open)) or 0)


def _take(db: Database, batch_id: str, worker: str, lease_s: float) -> BatchRow | None:
    table = batch_lines.c
    with db.write() as tx:
        now = tx.now()
        is_free = sa.or_(batches.c.lease_until.is_(None), batches.c.lease_until <= now)
        taken = tx.conn.execute(
            batches.update()
            .where(batches.c.id == batch_id, batches.c.status.not_in(ENDED), is_free)
            .values(lease_owner=worker, lease_until=now + lease_s)
        )
        if taken.rowcount == 0:
            return None
        # what another worker had sent and not heard of: what made a job is waited for, the rest is sent again
        is_cut = sa.and_(table.batch_id == batch_id, table.state == "running", table.job_id.is_(None))
        tx.conn.execute(batch_lines.update().where(is_cut).values(state="pending", not_before=None))
        return load(tx, batch_id)


def _renew(tx: Transaction, batch_id: str, worker: str, lease_until: float) -> None:
    mine = sa.and_(batches.c.id == batch_id, batches.c.lease_owner == worker, batches.c.ended_at.is_(None))
    if tx.conn.execute(batches.update().where(mine).values(lease_until=lease_until)).rowcount == 0:
        raise BatchLost(batch_id)


def _count(
    tx: Transaction, batch_id: str, completed: int, failed: int, input_tokens: int = 0, output_tokens: int = 0
) -> None:
    added = {"completed": completed, "failed": failed, "input_tokens": input_tokens, "output_tokens": output_tokens}
    values = {name: batches.c[name] + amount for name, amount in added.items() if amount}
    tx.conn.execute(batches.update().where(batches.c.id == batch_id).values(**values))


def _line_row(batch_id: str, line: LineSpec) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "number": line.number,
        "custom_id": line.custom_id,
        "start": line.start,
        "length": line.length,
        "state": "pending" if line.record is None else "ended",
        "tries": 0,
        "is_error": None if line.record is None else True,
        "record": line.record,
    }


_COLUMNS = tuple(batch_lines.c[name] for name in ("number", "custom_id", "start", "length", "tries", "job_id"))
