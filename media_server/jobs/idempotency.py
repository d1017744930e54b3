"""Idempotency keys: which request a caller's key stands for, and what it was answered.

Source: the IETF draft "The Idempotency-Key HTTP Header Field". A key is held while its first request is being
accepted, and bound by the transaction that writes what the request creates: both are there, or neither. So a request
that is sent again after a lost answer finds what the first one made.
Invariant: a key is bound by its holder alone; a holder that died lets go by not renewing.
"""

import secrets
from dataclasses import dataclass

import sqlalchemy as sa

from media_server.errors import Conflict, Unprocessable
from media_server.jobs.database import Database, Transaction
from media_server.jobs.tables import batch_lines, batches, idempotency_keys

# how long a key keeps its answer
KEEP_S = 86400.0
# how long a key stays held without being renewed
HOLD_S = 15.0
_RULE = "a key stands for one request"


@dataclass(frozen=True)
class KeyedRequest:
    """A request under its caller's key; the hash is of method, path and body."""

    owner_key_id: str | None
    key: str
    request_sha256: str


@dataclass(frozen=True)
class HeldKey:
    """A key that is held for a request that is being accepted, and the status it will be answered with."""

    request: KeyedRequest
    holder: str
    status_code: int


@dataclass(frozen=True)
class HeldLine:
    """A line of a batch that a worker runs: what it makes is bound to the line, as to a key that never expires."""

    batch_id: str
    number: int
    worker: str


Hold = HeldKey | HeldLine


@dataclass(frozen=True)
class KeptAnswer:
    """What the first request with a key made, and its answer; None if that was not written down any more."""

    made_id: str
    status_code: int
    response: str | None


class StillAccepting(Conflict):
    """The first request with this key is being accepted."""

    def headers(self) -> dict[str, str]:
        """Tell clients, the openai package among them, to come again: soon there is an answer."""
        return {"retry-after": "1", "x-should-retry": "true"}


def hold(db: Database, request: KeyedRequest, status_code: int) -> HeldKey | KeptAnswer:
    """Hold a key for a request that is to be accepted, or find what it was answered before.

    Raises Unprocessable if the key stands for another request, StillAccepting if its first request is under way,
    Conflict if what it made has been deleted.
    """
    held = HeldKey(request, secrets.token_hex(8), status_code)
    # a power cut may forget that a key was held, not what it is bound to
    with db.write("hold_key", is_durable=False) as tx:
        tx.lock(f"idempotency:{_owner(request)}:{request.key}")
        now = tx.now()
        tx.conn.execute(idempotency_keys.delete().where(_is_named(request), idempotency_keys.c.expires_at <= now))
        row = tx.conn.execute(sa.select(idempotency_keys).where(_is_named(request))).first()
        if row is None:
            tx.conn.execute(
                idempotency_keys.insert().values(
                    owner=_owner(request),
                    key=request.key,
                    request_sha256=request.request_sha256,
                    holder=held.holder,
                    created_at=now,
                    expires_at=now + HOLD_S,
                )
            )
            return held
    if row.request_sha256 == "":
        raise Conflict(
            "Idempotency-Key: what this key made has been deleted; a new request needs a new key.",
            code="idempotency_key_spent",
            param="Idempotency-Key",
            rule=_RULE,
        )
    if row.request_sha256 != request.request_sha256:
        raise Unprocessable(
            "Idempotency-Key: this key stands for another request: its path or its body differs.",
            code="idempotency_key_reused",
            param="Idempotency-Key",
            rule=_RULE,
        )
    if row.status_code is None:
        raise StillAccepting(
            "Idempotency-Key: the first request with this key is still being accepted; send it again in a moment.",
            code="idempotency_key_in_use",
            param="Idempotency-Key",
            rule=_RULE,
        )
    return KeptAnswer(row.made_id, row.status_code, row.response)


def renew(db: Database, held: HeldKey) -> None:
    """Keep holding a key: its request takes longer to accept."""
    with db.write(is_durable=False) as tx:
        tx.conn.execute(idempotency_keys.update().where(_is_held(held)).values(expires_at=tx.now() + HOLD_S))


def bind(tx: Transaction, held: Hold, *, made_id: str, response: str | None = None) -> None:
    """Bind a key, or a line of a batch, to what its request makes, in the transaction that makes it.

    Raises StillAccepting if it was let go and is another's by now; nothing is made then.
    """
    if isinstance(held, HeldLine):
        _bind_line(tx, held, made_id)
        return
    bound = tx.conn.execute(
        idempotency_keys.update()
        .where(_is_held(held))
        .values(made_id=made_id, status_code=held.status_code, response=response, expires_at=tx.now() + KEEP_S)
    )
    if bound.rowcount == 0:
        raise StillAccepting(
            "Idempotency-Key: accepting took too long, and another request with this key is under way.",
            code="idempotency_key_in_use",
            param="Idempotency-Key",
            rule=_RULE,
        )


def _bind_line(tx: Transaction, held: HeldLine, made_id: str) -> None:
    line, mine = batch_lines.c, sa.and_(batches.c.id == held.batch_id, batches.c.lease_owner == held.worker)
    bound = tx.conn.execute(
        batch_lines.update()
        .where(
            line.batch_id == held.batch_id,
            line.number == held.number,
            line.state == "running",
            line.job_id.is_(None),
            sa.exists().where(mine),
        )
        .values(job_id=made_id)
    )
    if bound.rowcount == 0:
        raise StillAccepting(
            f"Line {held.number} of {held.batch_id} is not this worker's any more.", code="batch_line_taken"
        )


def keep_answer(db: Database, held: HeldKey, response: str) -> None:
    """Write down what a bound key's request was answered, unless what it made has been deleted meanwhile."""
    table = idempotency_keys
    is_bound = sa.and_(table.c.holder == held.holder, table.c.request_sha256 != "")
    with db.write("keep_answer", is_durable=False) as tx:
        tx.conn.execute(table.update().where(_is_named(held.request), is_bound).values(response=response))


def let_go(db: Database, held: HeldKey) -> None:
    """Let a key go whose request was refused: the same key may be used for a better one."""
    with db.write(is_durable=False) as tx:
        tx.conn.execute(idempotency_keys.delete().where(_is_held(held)))


def erase_answers(tx: Transaction, made_id: str) -> None:
    """Forget what was asked and answered when this was made; its keys stay spent, so that no retry makes another."""
    mine = idempotency_keys.c.made_id == made_id
    tx.conn.execute(idempotency_keys.update().where(mine).values(request_sha256="", response=None))


def forget_expired(db: Database) -> int:
    """Remove the keys whose time is over; returns how many."""
    is_over = idempotency_keys.c.expires_at <= sa.bindparam("now", type_=sa.Double)
    with db.read() as tx:
        if (
            tx.conn.execute(sa.select(idempotency_keys.c.key).where(is_over).limit(1), {"now": tx.now()}).first()
            is None
        ):
            return 0
    with db.write() as tx:
        return tx.conn.execute(idempotency_keys.delete().where(is_over), {"now": tx.now()}).rowcount


def _owner(request: KeyedRequest) -> str:
    return request.owner_key_id or ""


def _is_named(request: KeyedRequest) -> sa.ColumnElement[bool]:
    return sa.and_(idempotency_keys.c.owner == _owner(request), idempotency_keys.c.key == request.key)


def _is_held(held: HeldKey) -> sa.ColumnElement[bool]:
    table = idempotency_keys
    return sa.and_(_is_named(held.request), table.c.holder == held.holder, table.c.status_code.is_(None))
