"""API keys: made once and shown once, kept as a hash, with their scopes and limits.

A key is `msk_<10 characters>_<43 characters>`: the first two parts are its prefix, by which its row is found, the
third is 256 random bits. The row holds an HMAC-SHA256 of the whole key under the row's id, so a hash that is copied
to another row opens nothing. With that many random bits nothing can be guessed from the hash, so no secret of the
service's has to be shared between machines, or can be lost.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from media_server.errors import Conflict, InvalidRequest, NotFound
from media_server.ids import new_id
from media_server.jobs.database import Database
from media_server.jobs.tables import api_keys
from media_server.limits import KeyLimits

Scope = Literal["submit", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_KEY = re.compile(r"(msk_[a-z2-7]{10})_[A-Za-z0-9_-]{43}")
_PREFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
# how often it is written down that a key is in use
_USED_EVERY_S = 60.0


@dataclass(frozen=True)
class ApiKey:
    """A key as its row says, without the key itself."""

    id: str
    name: str
    prefix: str
    scopes: frozenset[Scope]
    limits: KeyLimits
    created_at: float
    last_used_at: float | None
    expires_at: float | None
    revoked_at: float | None


def create_key(
    db: Database,
    name: str,
    *,
    scopes: Iterable[Scope] = ("submit", "read"),
    limits: KeyLimits | None = None,
    lifetime_s: float | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; returns its row, and the key itself, which is kept nowhere.

    Raises Conflict if a key that is not revoked has this name, InvalidRequest if the name could be taken for an id.
    """
    if not 1 <= len(name) <= 100 or name.startswith(("key_", "msk_")):
        rule = "1 to 100 characters, and not the beginning of an id or of a key"
        raise InvalidRequest(f"name: {rule}; got {name[:100]!r}.", param="name", rule=rule, value=name[:100])
    id = new_id("key")
    prefix = "msk_" + "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(10))
    text = f"{prefix}_{secrets.token_urlsafe(32)}"
    with db.write() as tx:
        tx.lock("keys")
        taken = sa.select(api_keys.c.id).where(api_keys.c.name == name, api_keys.c.revoked_at.is_(None))
        if tx.conn.scalar(taken) is not None:
            raise Conflict(f"A key has the name {name!r}: revoke it, or take another name.", param="name", value=name)
        tx.conn.execute(
            api_keys.insert().values(
                id=id,
                name=name,
                prefix=prefix,
                hash=_hash(id, text),
                scopes=sorted(scopes),
                quotas=(limits or KeyLimits()).model_dump(mode="json", exclude_defaults=True),
                created_at=tx.now(),
                expires_at=None if lifetime_s is None else tx.now() + lifetime_s,
            )
        )
        row = tx.conn.execute(sa.select(api_keys).where(api_keys.c.id == id)).mappings().one()
    return _to_key(row), text


def list_keys(db: Database) -> list[ApiKey]:
    """List every key there ever was, oldest first."""
    with db.read() as tx:
        rows = tx.conn.execute(sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)).mappings()
        return [_to_key(row) for row in rows]


def revoke_key(db: Database, name: str) -> ApiKey:
    """End a key's validity at once; its jobs and its ledger stay.

    `name` is a key's id, prefix or name. Raises NotFound if there is no such key, or if it is revoked already.
    """
    with db.write() as tx:
        row = tx.conn.execute(
            api_keys.update()
            .where(_is_named(name), api_keys.c.revoked_at.is_(None))
            .values(revoked_at=tx.now())
            .returning(*api_keys.c)
        ).mappings()
        return _to_key(_one(row.first(), name))


def change_limits(db: Database, name: str, limits: KeyLimits) -> ApiKey:
    """Give a key other limits, which hold from its next request on. Raises NotFound."""
    with db.write() as tx:
        row = tx.conn.execute(
            api_keys.update()
            .where(_is_named(name), api_keys.c.revoked_at.is_(None))
            .values(quotas=limits.model_dump(mode="json", exclude_defaults=True))
            .returning(*api_keys.c)
        ).mappings()
        return _to_key(_one(row.first(), name))


def get_key(db: Database, name: str) -> ApiKey:
    """Read a key that is not revoked by its id, prefix or name. Raises NotFound."""
    with db.read() as tx:
        query = sa.select(api_keys).where(_is_named(name), api_keys.c.revoked_at.is_(None))
        return _to_key(_one(tx.conn.execute(query).mappings().first(), name))


def find_key(db: Database, text: str) -> ApiKey | None:
    """Find the key that a caller sent; None if it is not known, revoked, or past its end."""
    form = _KEY.fullmatch(text)
    if form is None:
        return None
    with db.read() as tx:
        now = tx.now()
        row = tx.conn.execute(sa.select(api_keys).where(api_keys.c.prefix == form[1])).mappings().first()
    if row is None or not hmac.compare_digest(row["hash"], _hash(row["id"], text)):
        return None
    if row["revoked_at"] is not None or (row["expires_at"] is not None and row["expires_at"] <= now):
        return None
    if row["last_used_at"] is None or row["last_used_at"] <= now - _USED_EVERY_S:
        # on a full disk a key still opens what can be read
        with suppress(OperationalError), db.write(is_durable=False) as tx:
            tx.conn.execute(api_keys.update().where(api_keys.c.id == row["id"]).values(last_used_at=now))
    return _to_key(row)


def find_valid_key(db: Database, id: str) -> ApiKey | None:
    """Find a key by its id; None if there is none, or if it is revoked or past its end."""
    with db.read() as tx:
        row = tx.conn.execute(sa.select(api_keys).where(api_keys.c.id == id)).mappings().first()
        is_over = row is not None and row["expires_at"] is not None and row["expires_at"] <= tx.now()
    return None if row is None or is_over or row["revoked_at"] is not None else _to_key(row)


def has_keys(db: Database) -> bool:
    """Whether a key was ever made: from then on no request is taken without one."""
    with db.read() as tx:
        return tx.conn.execute(sa.select(api_keys.c.id).limit(1)).first() is not None


def has_valid_keys(db: Database) -> bool:
    """Whether there is a key that opens the service now."""
    with db.read() as tx:
        is_current = sa.or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > tx.now())
        query = sa.select(api_keys.c.id).where(api_keys.c.revoked_at.is_(None), is_current)
        return tx.conn.execute(query.limit(1)).first() is not None


def _hash(id: str, text: str) -> str:
    return hmac.new(f"media-server-key:{id}".encode(), text.encode(), hashlib.sha256).hexdigest()


def _is_named(name: str) -> sa.ColumnElement[bool]:
    return sa.or_(api_keys.c.id == name, api_keys.c.prefix == name, api_keys.c.name == name)


def _one(row: Any, name: str) -> Any:
    if row is None:
        raise NotFound(f"No valid key has the id, prefix or name {name!r}.", param="key", value=name)
    return row


def _to_key(row: Any) -> ApiKey:
    columns = {name: row[name] for name in ("id", "name", "prefix", "created_at", "last_used_at")}
    return ApiKey(
        **columns,
        scopes=frozenset(row["scopes"]),
        limits=KeyLimits.model_validate(row["quotas"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
