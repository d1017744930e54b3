"""The models that workers have loaded, by the cards they publish into the database.

A card stays when its worker goes: jobs for it queue until a worker of its pool is back. The default of a kind is the
model that was published first among those whose workers live.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import sqlalchemy as sa

from media_server.errors import NotFound, NotReady
from media_server.jobs.database import Database, Transaction
from media_server.jobs.tables import models
from media_server.models.card import TextCard, VideoCard, parse_card
from media_server.models.clip import (
    ClipParams,
    ClipRequest,
    parse_clip_request,
    validate_clip,
)

__all__ = [
    "ClipParams",
    "ClipRequest",
    "Published",
    "find_card",
    "get_card",
    "list_cards",
    "parse_clip_request",
    "publish",
    "seen",
    "validate_clip",
]

# workers refresh every 5 s; three missed are a worker that is gone
LIVE_S = 20.0


@dataclass(frozen=True)
class Published:
    """A model's card, with what is known of the workers that carry it."""

    card: VideoCard | TextCard
    workers: int
    is_live: bool
    published_at: float
    seen_at: float


def publish(db: Database, card: VideoCard | TextCard, worker: str) -> None:
    """Say that a worker has loaded a model; a card of the same name from it is replaced."""
    values = {
        "kind": card.kind,
        "pool": card.pool,
        "hash": card.hash,
        "card": card.model_dump(mode="json"),
    }
    with db.write() as tx:
        tx.lock(f"models:{card.name}")
        now = tx.now()
        mine = sa.and_(models.c.name == card.name, models.c.worker == worker)
        renewed = tx.conn.execute(models.update().where(mine).values(**values, seen_at=now))
        if renewed.rowcount == 0:
            # a worker that is back under a new name does not push the model behind the others
            first = tx.conn.scalar(sa.select(sa.func.min(models.c.published_at)).where(models.c.name == card.name))
            # its rows of gone workers carry an older card; one is enough, and this is it
            tx.conn.execute(models.delete().where(models.c.name == card.name, models.c.seen_at < now - LIVE_S))
            tx.conn.execute(
                models.insert().values(
                    name=card.name, worker=worker, published_at=now if first is None else first, seen_at=now, **values
                )
            )


def seen(db: Database, worker: str, figures: Mapping[str, float] | None = None) -> None:
    """Refresh the cards of a living worker, and what it says of itself; call it every 5 s."""
    values = {} if figures is None else {"figures": dict(figures)}
    with db.write() as tx:
        tx.conn.execute(models.update().where(models.c.worker == worker).values(**values, seen_at=tx.now()))


def list_cards(db: Database) -> list[Published]:
    """List the models, those that were published first at the head."""
    with db.read() as tx:
        return _published(tx)


@overload
def get_card(db: Database, name: str | None, kind: Literal["video"]) -> VideoCard: ...
@overload
def get_card(db: Database, name: str | None, kind: Literal["text"]) -> TextCard: ...
def get_card(db: Database, name: str | None, kind: Literal["video", "text"]) -> VideoCard | TextCard:
    """Find a model by name, or the default of its kind.

    Raises NotFound, which names the models there are, if there is none of that name and kind; NotReady if no model
    of that kind has been loaded yet.
    """
    with db.read() as tx:
        return find_card(tx, name, kind)


@overload
def find_card(tx: Transaction, name: str | None, kind: Literal["video"]) -> VideoCard: ...
@overload
def find_card(tx: Transaction, name: str | None, kind: Literal["text"]) -> TextCard: ...
def find_card(tx: Transaction, name: str | None, kind: Literal["video", "text"]) -> VideoCard | TextCard:
    """Do as `get_card`, within a transaction."""
    found = [model for model in _published(tx) if model.card.kind == kind]
    if not found:
        raise NotReady(f"No {kind} model has been loaded yet; try again in a moment.", param="model", value=name)
    if name is None:
        return next((model for model in found if model.is_live), found[0]).card
    for model in found:
        if model.card.name == name:
            return model.card
    names = ", ".join(model.card.name for model in found)
    raise NotFound(
        f"No {kind} model is named {name!r}; there are: {names}.",
        code="model_not_found",
        param="model",
        rule=f"one of {names}",
        value=name,
    )


def _published(tx: Transaction) -> list[Published]:
    now = tx.now()
    by_name: dict[str, list[sa.Row[tuple[object, ...]]]] = {}
    for row in tx.conn.execute(sa.select(models).order_by(models.c.published_at, models.c.name, models.c.seen_at)):
        by_name.setdefault(row.name, []).append(row)
    found = []
    for rows in by_name.values():
        # the card of the worker heard of last speaks for the model
        newest = rows[-1]
        live = [row for row in rows if row.seen_at > now - LIVE_S]
        found.append(
            Published(
                card=parse_card(newest.card),
                workers=len(live),
                is_live=bool(live),
                published_at=newest.published_at,
                seen_at=newest.seen_at,
            )
        )
    return found
