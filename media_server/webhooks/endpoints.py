"""Managed webhook endpoints: where an owner's events go, which ones, and the secrets that sign them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from media_server.batches.store import ENDED as BATCH_ENDED
from media_server.errors import Conflict, NotFound
from media_server.ids import new_id
from media_server.jobs import idempotency
from media_server.jobs.database import Database, Transaction
from media_server.jobs.states import TERMINAL
from media_server.jobs.tables import webhook_endpoints
from media_server.webhooks.pages import place_after
from media_server.webhooks.signing import new_secret

# the ends that are announced: a film's children are its own affair, and joining is always one
EVENT_TYPES = (
    *(f"{kind}.{status}" for kind in ("video", "film", "storyboard") for status in TERMINAL),
    *(f"batch.{status}" for status in BATCH_ENDED),
)
# each adds a message to every job
MAX_ENDPOINTS = 100
OLD_SECRET_S = 86400.0
# each adds a signature to every message
MAX_OLD_SECRETS = 10


@dataclass(frozen=True)
class Endpoint:
    """A row of the endpoints table."""

    id: str
    owner_key_id: str | None
    name: str
    url: str
    event_types: list[str]
    secret: str
    old_secrets: list[tuple[str, float]]
    is_enabled: bool
    disabled_reason: str | None
    failing_since: float | None
    created_at: float
    updated_at: float

    def secrets_at(self, now: float) -> list[str]:
        """Give the secrets that sign at that time, newest first."""
        return [self.secret, *(secret for secret, until in self.old_secrets if until > now)]


def create(tx: Transaction, owner_key_id: str | None, *, name: str, url: str, event_types: Sequence[str]) -> Endpoint:
    """Write an endpoint with a fresh secret. Raises Conflict if the owner has MAX_ENDPOINTS."""
    tx.lock(f"webhook_endpoints:{owner_key_id or ''}")
    count = tx.conn.scalar(sa.select(sa.func.count()).select_from(webhook_endpoints).where(_is_of(owner_key_id)))
    if (count or 0) >= MAX_ENDPOINTS:
        rule = f"at most {MAX_ENDPOINTS} webhook endpoints"
        raise Conflict(f"There may be {rule}; delete one first.", code="too_many_endpoints", rule=rule, value=count)
    id, now = new_id("whe"), tx.now()
    tx.conn.execute(
        webhook_endpoints.insert().values(
            id=id,
            owner_key_id=owner_key_id,
            name=name,
            url=url,
            event_types=list(dict.fromkeys(event_types)),
            secret=new_secret(),
            old_secrets=[],
            is_enabled=True,
            created_at=now,
            updated_at=now,
        )
    )
    return load(tx, id, owner_key_id)


def load(tx: Transaction, id: str, owner_key_id: str | None) -> Endpoint:
    """Read an endpoint of an owner's. Raises NotFound."""
    row = tx.conn.execute(
        sa.select(webhook_endpoints).where(webhook_endpoints.c.id == id, _is_of(owner_key_id))
    ).first()
    if row is None:
        raise NotFound(f"No webhook endpoint has the id {id!r}.", param="webhook_endpoint_id", value=id)
    return Endpoint(**row._mapping)


def get(db: Database, id: str, owner_key_id: str | None) -> Endpoint:
    """Do as `load`, in a transaction of its own."""
    with db.read() as tx:
        return load(tx, id, owner_key_id)


def list_endpoints(
    db: Database, owner_key_id: str | None, *, after: str | None, limit: int
) -> tuple[list[Endpoint], bool]:
    """List an owner's endpoints, newest first, and say whether there are more.

    Raises InvalidRequest if `after` is none of them.
    """
    table = webhook_endpoints
    query = sa.select(table).where(_is_of(owner_key_id)).order_by(table.c.created_at.desc(), table.c.id.desc())
    with db.read() as tx:
        if after is not None:
            query = query.where(place_after(table, after, lambda id: load(tx, id, owner_key_id), "webhook endpoint"))
        rows = tx.conn.execute(query.limit(limit + 1)).all()
    return [Endpoint(**row._mapping) for row in rows[:limit]], len(rows) > limit


def update(db: Database, id: str, owner_key_id: str | None, changes: Mapping[str, Any]) -> Endpoint:
    """Change name, url, event_types or is_enabled; what waits for the endpoint goes to its new URL. Raises NotFound.

    An endpoint that is enabled again starts with a clean record, and gets what has waited for it meanwhile.
    """
    with db.write() as tx:
        before = load(tx, id, owner_key_id)
        values = {name: value for name, value in changes.items() if value != getattr(before, name)}
        if not values:
            return before
        if "is_enabled" in values:
            values |= {"failing_since": None, "disabled_reason": None if values["is_enabled"] else "by its owner"}
        table = webhook_endpoints
        tx.conn.execute(table.update().where(table.c.id == id).values(**values, updated_at=tx.now()))
        return load(tx, id, owner_key_id)


def rotate_secret(tx: Transaction, id: str, owner_key_id: str | None, *, keeps_old: bool) -> Endpoint:
    """Give an endpoint a fresh secret; those before it end at once, or OLD_SECRET_S after their rotation if kept.

    Raises NotFound, or Conflict if more than MAX_OLD_SECRETS would be valid beside it.
    """
    before = load(tx, id, owner_key_id)
    now = tx.now()
    old = [[secret, until] for secret, until in before.old_secrets if until > now]
    if keeps_old and len(old) >= MAX_OLD_SECRETS:
        rule = f"at most {MAX_OLD_SECRETS} old secrets that are still valid"
        raise Conflict(
            f"There may be {rule}; rotate without keeping them, or when one has ended.",
            code="too_many_secrets",
            param="keep_old_secret_active_for_24_hours",
            rule=rule,
            value=len(old),
        )
    values = {
        "secret": new_secret(),
        "old_secrets": [[before.secret, now + OLD_SECRET_S], *old] if keeps_old else [],
        "updated_at": now,
    }
    tx.conn.execute(webhook_endpoints.update().where(webhook_endpoints.c.id == id).values(**values))
    return load(tx, id, owner_key_id)


def delete(db: Database, id: str, owner_key_id: str | None) -> None:
    """Delete an endpoint with its secrets, its messages and their log. Raises NotFound."""
    with db.write() as tx:
        load(tx, id, owner_key_id)
        idempotency.erase_answers(tx, id)
        # the messages go with it, and their tries with them
        tx.conn.execute(webhook_endpoints.delete().where(webhook_endpoints.c.id == id))


def _is_of(owner_key_id: str | None) -> sa.ColumnElement[bool]:
    if owner_key_id is None:
        return webhook_endpoints.c.owner_key_id.is_(None)
    return webhook_endpoints.c.owner_key_id == owner_key_id
