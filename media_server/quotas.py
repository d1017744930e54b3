"""Whether a key may have what it asks for now, and what is left of its quotas.

Invariants: a job is admitted in the transaction that writes it, under its key's lock, so that requests at the same
time cannot pass a limit together; what was admitted once is finished, a film with all of its shots.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from media_server.errors import Forbidden, RateLimited
from media_server.jobs import ledger
from media_server.jobs.database import Database, Transaction
from media_server.jobs.spec import JobSpec
from media_server.jobs.states import Status
from media_server.jobs.tables import api_keys, jobs
from media_server.limits import Budget, KeyLimits

# a queue moves in seconds to minutes: it is worth another look soon
_QUEUE_RETRY_S = 10.0
# nothing says when files will be deleted
_STORAGE_RETRY_S = 3600.0
_NOUNS = {"gpu_seconds": "GPU seconds", "tokens": "tokens"}


@dataclass(frozen=True)
class Allowance:
    """One quota, and how much of it is used; `reset_s` is when it begins anew, if it does by itself."""

    name: str
    limit: float
    used: float
    reset_s: float | None = None

    def headers(self) -> dict[str, str]:
        """Give the headers that tell a client of this quota."""
        fields = {"limit": f"{self.limit:.0f}", "remaining": f"{max(0.0, self.limit - self.used):.0f}"}
        if self.reset_s is not None:
            # rounded up, in the manner of OpenAI
            fields["reset"] = f"{-int(-self.reset_s // 1)}s"
        return {f"x-ratelimit-{field}-{self.name}": value for field, value in fields.items()}


def admit(tx: Transaction, spec: JobSpec) -> None:
    """Let a job of a key's in, and count it; what no key owns, and a film's own jobs, are let in by themselves.

    Raises RateLimited if a quota or a budget of the key is used up, Forbidden if the job alone is more than a quota.
    """
    if spec.owner_key_id is None or spec.parent_id is not None:
        return
    owner, limits = spec.owner_key_id, read_limits(tx, spec.owner_key_id)
    ledger.lock_owner(tx, owner)
    check_budgets(tx, owner, limits, spec.label)
    if limits.queued_jobs is not None and (waiting := count_waiting(tx, owner)) >= limits.queued_jobs:
        raise RateLimited(
            f"This key may have {limits.queued_jobs} jobs waiting, and has {waiting}.",
            code="queue_quota",
            rule=f"at most {limits.queued_jobs} waiting jobs",
            value=waiting,
            retry_after_s=_QUEUE_RETRY_S,
        )
    _check_storage(tx, owner, limits, spec.input_bytes)
    ledger.count_work(tx, owner, spec.work)
    _check_work(tx, owner, limits, spec.work)


def admit_file(tx: Transaction, owner_key_id: str | None, size_bytes: int) -> None:
    """Let a file of a key's in. Raises RateLimited if it would pass the bytes that the key may keep."""
    if owner_key_id is not None:
        ledger.lock_owner(tx, owner_key_id)
        _check_storage(tx, owner_key_id, read_limits(tx, owner_key_id), size_bytes)


def check_budgets(tx: Transaction, owner_key_id: str, limits: KeyLimits, label: str | None) -> None:
    """Raise RateLimited if a budget that holds for this label is spent."""
    for budget in limits.budgets:
        if budget.label not in (None, label):
            continue
        period = ledger.month_of(tx.now()) if budget.per == "month" else ledger.TOTAL
        spent = ledger.read_tally(tx, owner_key_id, budget.kind, period, budget.label)
        if spent >= budget.amount:
            raise _spent(budget, spent, ledger.month_left_s(tx.now()))


def standing(db: Database, owner_key_id: str, limits: KeyLimits) -> list[Allowance]:
    """Say how much of a key's quotas is used; text streams are counted elsewhere."""
    with db.read() as tx:
        return list(_standing(tx, owner_key_id, limits))


def read_limits(tx: Transaction, owner_key_id: str) -> KeyLimits:
    """Read a key's limits as they are now; a key that is gone has none."""
    found = tx.conn.scalar(sa.select(api_keys.c.quotas).where(api_keys.c.id == owner_key_id))
    return KeyLimits.model_validate(found or {})


def count_waiting(tx: Transaction, owner_key_id: str) -> int:
    """Count a key's jobs that wait for a worker."""
    return int(tx.conn.scalar(WAITING, {"owner": owner_key_id}) or 0)


def _standing(tx: Transaction, owner: str, limits: KeyLimits) -> Iterator[Allowance]:
    if limits.queued_jobs is not None:
        yield Allowance("jobs", limits.queued_jobs, count_waiting(tx, owner))
    if limits.work_per_day is not None:
        done = ledger.read_tally(tx, owner, "work", ledger.day_of(tx.now()))
        yield Allowance("work", limits.work_per_day, done, ledger.day_left_s(tx.now()))
    if limits.storage_bytes is not None:
        kept = ledger.read_tally(tx, owner, "storage_bytes", ledger.TOTAL)
        yield Allowance("storage", limits.storage_bytes, kept)


def _check_work(tx: Transaction, owner: str, limits: KeyLimits, work: float) -> None:
    """Raise if what is submitted today, this job with it, is more than a day's work."""
    most = limits.work_per_day
    if most is None:
        return
    if work > most:
        raise Forbidden(
            f"This takes {work:.0f} of steps x pixels x frames; this key may have {most:.0f} a day.",
            code="over_work_quota",
            rule=f"at most {most:.0f} of steps x pixels x frames a day",
            value=work,
        )
    total = ledger.read_tally(tx, owner, "work", ledger.day_of(tx.now()))
    if total > most:
        raise RateLimited(
            f"This key may submit {most:.0f} of steps x pixels x frames a day and has submitted {total - work:.0f}; "
            f"this would be {work:.0f} more.",
            code="work_quota",
            rule=f"at most {most:.0f} of steps x pixels x frames a day",
            value=work,
            retry_after_s=ledger.day_left_s(tx.now()),
        )


def _check_storage(tx: Transaction, owner: str, limits: KeyLimits, input_bytes: int) -> None:
    most = limits.storage_bytes
    if most is None:
        return
    kept = ledger.read_tally(tx, owner, "storage_bytes", ledger.TOTAL)
    if kept >= most or kept + input_bytes > most:
        raise RateLimited(
            f"This key may keep {most} bytes of files, and keeps {kept:.0f}: delete some first.",
            code="storage_quota",
            rule=f"at most {most} bytes of files",
            value=kept + input_bytes,
            retry_after_s=_freed_in_s(tx, owner),
        )


def _freed_in_s(tx: Transaction, owner: str) -> float:
    """Say when the first of a key's files go by themselves."""
    query = sa.select(sa.func.min(jobs.c.expires_at)).where(jobs.c.owner_key_id == owner, jobs.c.deleted_at.is_(None))
    expires_at = tx.conn.scalar(query)
    return _STORAGE_RETRY_S if expires_at is None else max(1.0, expires_at - tx.now())


def _spent(budget: Budget, spent: float, month_left_s: float) -> RateLimited:
    whose = f"the label {budget.label!r}" if budget.label else "this key"
    each = " a month" if budget.per == "month" else ""
    return RateLimited(
        f"The budget of {whose} is {budget.amount:g} {_NOUNS[budget.kind]}{each}, and {spent:g} are spent.",
        code="budget_exhausted",
        param="label" if budget.label else None,
        rule=str(budget),
        value=spent,
        # what is spent in all comes back only when somebody raises the budget
        retry_after_s=month_left_s if budget.per == "month" else None,
    )


# who waits for a worker: nobody claims a film's own row, which is in the pool of films
WAITING = (
    sa.select(sa.func.count())
    .select_from(jobs)
    .where(jobs.c.queue_key == sa.bindparam("owner"), jobs.c.status == Status.QUEUED, jobs.c.kind != "film")
)
