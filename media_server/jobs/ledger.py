"""The ledger: what was used, by whom and for what, in rows that outlive the jobs; and the sums that limits are held to.

An entry has a kind: `gpu_seconds`, `prompt_tokens`, `completion_tokens`, `storage_bytes`. Bytes are entered when a file
is kept and taken off when it is given up, so that their sum is what is kept now.
Invariants: a tally is written in the transaction of the entry that it counts; whoever writes tallies of a key holds the
key's lock (`lock_owner`), after the lock of a family if it holds one.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import sqlalchemy as sa

from media_server.figures import GPU_SECONDS, STORED_BYTES, TOKENS
from media_server.jobs.database import Database, Transaction
from media_server.jobs.spec import Job, UsageRecord
from media_server.jobs.tables import tallies, usage

TallyKind = Literal["gpu_seconds", "tokens", "storage_bytes", "work"]
TOTAL = "total"
_TALLY_KINDS: dict[str, TallyKind] = {
    "gpu_seconds": "gpu_seconds",
    "prompt_tokens": "tokens",
    "completion_tokens": "tokens",
    "storage_bytes": "storage_bytes",
}
_ADD = sa.text(
    "INSERT INTO tallies (owner_key_id, label, kind, period, amount) VALUES (:owner, :label, :kind, :period, :amount) "
    "ON CONFLICT (owner_key_id, label, kind, period) DO UPDATE SET amount = tallies.amount + excluded.amount"
)


def enter(tx: Transaction, job: Job, records: Sequence[UsageRecord]) -> None:
    """Write what a job used into the ledger."""
    film = job.params.get("film") or {}
    for record in records:
        _enter(tx, job.owner_key_id, job.label, record, job.id, job.root_id, film.get("shot"), job.model)


def enter_attempt(db: Database, job: Job, records: Sequence[UsageRecord]) -> None:
    """Write into the ledger what an attempt used that did not complete its job, or whose job is another's by now."""
    with db.write() as tx:
        tx.lock(job.root_id)
        enter(tx, job, records)


def enter_text(
    db: Database, owner_key_id: str | None, label: str | None, model: str, request_id: str, records: list[UsageRecord]
) -> None:
    """Write what a request for text used into the ledger."""
    with db.write() as tx:
        for record in records:
            _enter(tx, owner_key_id, label, record, request_id, request_id, None, model)


def give_up_storage(tx: Transaction, job: Job) -> None:
    """Take a job's files off the ledger: they are given up. Doing it twice takes nothing more."""
    if kept := _kept_bytes(tx, job.id):
        enter(tx, job, [UsageRecord("storage_bytes", -kept)])


def keep_file(tx: Transaction, owner_key_id: str | None, file_id: str, size_bytes: int) -> None:
    """Enter an uploaded file, or one of a batch, that is kept from now on."""
    record = UsageRecord("storage_bytes", size_bytes)
    _enter(tx, owner_key_id, None, record, file_id, file_id, None, None)


def give_up_file(tx: Transaction, owner_key_id: str | None, file_id: str) -> None:
    """Take such a file off the ledger again."""
    keep_file(tx, owner_key_id, file_id, -_kept_bytes(tx, file_id))


def count_work(tx: Transaction, owner_key_id: str, work: float) -> None:
    """Count the work that a key has submitted today."""
    lock_owner(tx, owner_key_id)
    _add(tx, owner_key_id, "", "work", day_of(tx.now()), work)


def read_tally(tx: Transaction, owner_key_id: str, kind: TallyKind, period: str, label: str | None = None) -> float:
    """Read a sum of a key's, or of one of its labels."""
    query = sa.select(tallies.c.amount).where(
        tallies.c.owner_key_id == owner_key_id,
        tallies.c.label == (label or ""),
        tallies.c.kind == kind,
        tallies.c.period == period,
    )
    return float(tx.conn.scalar(query) or 0.0)


def lock_owner(tx: Transaction, owner_key_id: str) -> None:
    """Wait until no other transaction counts for this key."""
    tx.lock(f"ledger:{owner_key_id}")


def day_of(now: float) -> str:
    """Name the day of a time, in UTC."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")


def month_of(now: float) -> str:
    """Name the month of a time, in UTC."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m")


def day_left_s(now: float) -> float:
    """Give the seconds until the next day begins."""
    start = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return (start + timedelta(days=1)).timestamp() - now


def month_left_s(now: float) -> float:
    """Give the seconds until the next month begins."""
    start = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # 32 days after the first of a month lie in the next
    return (start + timedelta(days=32)).replace(day=1).timestamp() - now


def _kept_bytes(tx: Transaction, id: str) -> int:
    query = sa.select(sa.func.sum(usage.c.amount)).where(usage.c.job_id == id, usage.c.kind == "storage_bytes")
    return int(tx.conn.scalar(query) or 0)


def _enter(
    tx: Transaction,
    owner_key_id: str | None,
    label: str | None,
    record: UsageRecord,
    job_id: str,
    root_id: str,
    shot: int | None,
    model: str | None,
) -> None:
    if not record.amount:
        return
    tx.conn.execute(
        usage.insert().values(
            created_at=tx.now(),
            owner_key_id=owner_key_id,
            job_id=job_id,
            root_id=root_id,
            shot=shot,
            label=label,
            model=model,
            kind=record.kind,
            amount=record.amount,
        )
    )
    _show(tx, record)
    kind = _TALLY_KINDS.get(record.kind)
    if owner_key_id is None or kind is None:
        # limits are those of keys
        return
    lock_owner(tx, owner_key_id)
    periods = (TOTAL,) if kind == "storage_bytes" else (TOTAL, month_of(tx.now()))
    for name in {"", label or ""}:
        for period in periods:
            _add(tx, owner_key_id, name, kind, period, record.amount)


def _show(tx: Transaction, record: UsageRecord) -> None:
    """Count an entry for /metrics."""
    if record.kind == "gpu_seconds":
        tx.counts.count(GPU_SECONDS, amount=record.amount)
    elif record.kind == "storage_bytes":
        tx.counts.count(STORED_BYTES, amount=record.amount)
    elif record.kind in ("prompt_tokens", "completion_tokens"):
        tx.counts.count(TOKENS, record.kind.removesuffix("_tokens"), amount=record.amount)


def _add(tx: Transaction, owner_key_id: str, label: str, kind: TallyKind, period: str, amount: float) -> None:
    values = {"owner": owner_key_id, "label": label, "kind": kind, "period": period, "amount": amount}
    tx.conn.execute(_ADD, values)
