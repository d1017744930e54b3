"""The delivery log: each message to a receiver, each try at it, and sending one again.

A replay sends the same bytes under the same id, so that a receiver that has them can tell.
"""

from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from media_server.errors import Conflict, NotFound
from media_server.jobs.database import Database, Transaction
from media_server.jobs.outbox import DELIVERIES_POOL
from media_server.jobs.tables import deliveries, outbox, webhook_endpoints
from media_server.webhooks.pages import place_after

State = Literal["pending", "delivered", "dead"]
# how long the log says of a settled message what became of it
KEEP_S = 30 * 86400.0
_FORGET_A_ROUND = 1000


@dataclass(frozen=True)
class Try:
    """One try at a message."""

    number: int
    started_at: float
    duration_s: float
    status_code: int | None
    error: str | None


@dataclass(frozen=True)
class Delivery:
    """A message, its tries and what comes next; the URL is null if it was the request's own and is erased."""

    id: str
    job_id: str | None
    batch_id: str | None
    endpoint_id: str | None
    url: str | None
    type: str
    payload: str
    state: State
    attempts: int
    next_at: float | None
    created_at: float
    settled_at: float | None
    tries: list[Try]


def get(db: Database, id: str, owner_key_id: str | None) -> Delivery:
    """Read a message of an owner's. Raises NotFound."""
    with db.read() as tx:
        return _load(tx, id, owner_key_id)


def list_deliveries(
    db: Database,
    owner_key_id: str | None,
    *,
    endpoint_id: str | None = None,
    job_id: str | None = None,
    batch_id: str | None = None,
    state: State | None = None,
    type: str | None = None,
    after: str | None = None,
    limit: int = 20,
) -> tuple[list[Delivery], bool]:
    """List an owner's messages, newest first, and say whether there are more.

    Raises InvalidRequest if `after` is none of them.
    """
    query = _select().where(_is_of(owner_key_id))
    for column, wanted in (
        (outbox.c.endpoint_id, endpoint_id),
        (outbox.c.job_id, job_id),
        (outbox.c.batch_id, batch_id),
        (outbox.c.state, state),
        (outbox.c.type, type),
    ):
        if wanted is not None:
            query = query.where(column == wanted)
    with db.read() as tx:
        if after is not None:
            query = query.where(place_after(outbox, after, lambda id: _load(tx, id, owner_key_id), "delivery"))
        rows = tx.conn.execute(query.order_by(outbox.c.created_at.desc(), outbox.c.id.desc()).limit(limit + 1)).all()
        return _with_tries(tx, rows[:limit]), len(rows) > limit


def replay(db: Database, id: str, owner_key_id: str | None) -> Delivery:
    """Send a message again, now and by a fresh schedule; one that waits for its next try is tried now.

    Raises NotFound, or Conflict if it can go nowhere: its URL is erased or its endpoint is disabled.
    """
    with db.write() as tx:
        delivery = _load(tx, id, owner_key_id)
        if delivery.url is None:
            raise Conflict(
                f"{id} cannot be sent again: the URL went with the job that was deleted.", code="erased", value=id
            )
        if delivery.endpoint_id is not None:
            _check_enabled(tx, delivery.endpoint_id)
        _send_again(tx, outbox.c.id == id)
        return _load(tx, id, owner_key_id)


def replay_all(db: Database, endpoint_id: str, owner_key_id: str | None, *, since: float, until: float | None) -> int:
    """Send again what an endpoint did not get of the messages from `since` to before `until`; returns how many.

    Raises NotFound, or Conflict if the endpoint is disabled.
    """
    with db.write() as tx:
        _check_enabled(tx, endpoint_id)
        missed = [
            outbox.c.endpoint_id == endpoint_id,
            _is_of(owner_key_id),
            outbox.c.created_at >= since,
            outbox.c.state != "delivered",
        ]
        if until is not None:
            missed.append(outbox.c.created_at < until)
        return _send_again(tx, sa.and_(*missed))


def forget_settled(db: Database) -> int:
    """Remove messages that were settled more than KEEP_S ago, with their tries; returns how many.

    Those that have waited for so long for an endpoint that is disabled go too.
    """
    before = sa.bindparam("before", type_=sa.Double)
    disabled = sa.select(webhook_endpoints.c.id).where(~webhook_endpoints.c.is_enabled)
    waits_in_vain = sa.and_(
        outbox.c.endpoint_id.in_(disabled), outbox.c.state == "pending", outbox.c.created_at <= before
    )
    old = sa.select(outbox.c.id).where(sa.or_(outbox.c.settled_at <= before, waits_in_vain)).limit(_FORGET_A_ROUND)
    with db.read() as tx:
        if tx.conn.execute(old.limit(1), {"before": tx.now() - KEEP_S}).first() is None:
            return 0
    with db.write() as tx:
        return tx.conn.execute(outbox.delete().where(outbox.c.id.in_(old)), {"before": tx.now() - KEEP_S}).rowcount


def _send_again(tx: Transaction, which: sa.ColumnElement[bool]) -> int:
    """Make messages due now, settled ones by a fresh schedule; what is on its way is left alone."""
    now = tx.now()
    is_idle = sa.or_(outbox.c.lease_until.is_(None), outbox.c.lease_until <= now)
    due = tx.conn.execute(
        outbox.update()
        .where(which, is_idle)
        .values(
            state="pending",
            uncounted=sa.case((outbox.c.state == "pending", outbox.c.uncounted), else_=outbox.c.attempts),
            next_at=now,
            settled_at=None,
        )
    )
    tx.ring(DELIVERIES_POOL)
    return due.rowcount


def _check_enabled(tx: Transaction, endpoint_id: str) -> None:
    query = sa.select(webhook_endpoints.c.is_enabled).where(webhook_endpoints.c.id == endpoint_id)
    if not tx.conn.scalar(query):
        raise Conflict(
            f"{endpoint_id} is disabled: enable it first with is_enabled; what waits for it is sent then.",
            code="endpoint_disabled",
            rule="an endpoint that is enabled",
            value=endpoint_id,
        )


def _load(tx: Transaction, id: str, owner_key_id: str | None) -> Delivery:
    rows = tx.conn.execute(_select().where(outbox.c.id == id, _is_of(owner_key_id))).all()
    if not rows:
        raise NotFound(f"No delivery has the id {id!r}.", param="delivery_id", value=id)
    return _with_tries(tx, rows)[0]


def _select() -> sa.Select[Any]:
    table = outbox
    columns = (
        table.c.id,
        table.c.job_id,
        table.c.batch_id,
        table.c.endpoint_id,
        sa.func.coalesce(table.c.url, webhook_endpoints.c.url).label("url"),
        table.c.type,
        table.c.payload,
        table.c.state,
        table.c.attempts,
        table.c.next_at,
        table.c.created_at,
        table.c.settled_at,
    )
    both = table.outerjoin(webhook_endpoints, table.c.endpoint_id == webhook_endpoints.c.id)
    return sa.select(*columns).select_from(both)


def _with_tries(tx: Transaction, rows: Any) -> list[Delivery]:
    tries: dict[str, list[Try]] = {row.id: [] for row in rows}
    query = sa.select(deliveries).where(deliveries.c.outbox_id.in_(list(tries))).order_by(deliveries.c.number)
    for row in tx.conn.execute(query):
        tries[row.outbox_id].append(Try(row.number, row.started_at, row.duration_s, row.status_code, row.error))
    return [Delivery(**row._mapping, tries=tries[row.id]) for row in rows]


def _is_of(owner_key_id: str | None) -> sa.ColumnElement[bool]:
    return outbox.c.owner_key_id.is_(None) if owner_key_id is None else outbox.c.owner_key_id == owner_key_id
