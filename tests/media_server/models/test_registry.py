"""Cards that workers publish, and how a model is found by them."""

from typing import Any

import pytest
import sqlalchemy as sa

from media_server.errors import NotFound, NotReady, SchemaVersionError
from media_server.jobs.database import Database
from media_server.jobs.tables import models
from media_server.models.card import TextCard, VideoCard, parse_card, parse_size
from media_server.models.registry import LIVE_S, get_card, list_cards, publish, seen

TEXT: dict[str, Any] = {
    "v": 1,
    "name": "smollm2",
    "kind": "text",
    "pool": "text",
    "revision": "1",
    "hash": "sha256:11",
    "license": "Apache-2.0",
    "origin": "huggingface",
    "context_length": 8192,
    "tokenizer": "models/smollm2/11/tokenizer.json",
    "chat_template": "models/smollm2/11/chat_template.jinja",
    "eos_token_ids": [2],
}


def _age(db: Database, worker: str, seconds: float) -> None:
    with db.write() as tx:
        tx.conn.execute(models.update().where(models.c.worker == worker).values(seen_at=tx.now() - seconds))


def test_a_published_card_is_found_by_name_and_as_its_kinds_default(db: Database, card: VideoCard) -> None:
    with pytest.raises(NotReady, match="No video model has been loaded yet"):
        get_card(db, None, "video")
    text = parse_card(TEXT)
    publish(db, text, "engine-0")
    with pytest.raises(NotReady):
        get_card(db, "smollm2", "video")
    publish(db, card, "video-0")
    assert get_card(db, None, "video") == get_card(db, "tiny-wan", "video") == card
    assert get_card(db, None, "text") == text
    with pytest.raises(NotFound, match="'sora'; there are: tiny-wan") as missing:
        get_card(db, "sora", "video")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_a_model_lives_while_a_worker_is_seen(db: Database, card: VideoCard) -> None:
    publish(db, card, "video-0")
    publish(db, card, "video-1")
    (model,) = list_cards(db)
    assert (model.workers, model.is_live) == (2, True)
    _age(db, "video-0", LIVE_S + 1)
    (model,) = list_cards(db)
    assert (model.workers, model.is_live) == (1, True)
    _age(db, "video-1", LIVE_S + 1)
    (model,) = list_cards(db)
    assert (model.workers, model.is_live) == (0, False)
    # jobs queue for it until a worker is back
    assert get_card(db, None, "video") == card
    seen(db, "video-0")
    assert list_cards(db)[0].is_live


def test_a_new_card_replaces_that_of_gone_workers(db: Database, card: VideoCard) -> None:
    publish(db, card, "video-0")
    _age(db, "video-0", LIVE_S + 1)
    newer = card.model_copy(update={"revision": "2"})
    publish(db, newer, "video-0b")
    assert get_card(db, None, "video").revision == "2"
    publish(db, card.model_copy(update={"revision": "3"}), "video-0b")
    assert get_card(db, None, "video").revision == "3"
    with db.read() as tx:
        assert tx.conn.scalar(sa.select(sa.func.count()).select_from(models)) == 1


def test_the_default_is_the_first_that_lives(db: Database, card: VideoCard) -> None:
    publish(db, card, "video-0")
    publish(db, card.model_copy(update={"name": "wan-2.2"}), "video-1")
    assert get_card(db, None, "video").name == "tiny-wan"
    _age(db, "video-0", LIVE_S + 1)
    assert get_card(db, None, "video").name == "wan-2.2"


def test_cards_of_another_version_are_refused(card: VideoCard) -> None:
    assert parse_card(card.model_dump(mode="json")) == card
    assert isinstance(parse_card(TEXT), TextCard)
    for version in (2, None, "1"):
        with pytest.raises(SchemaVersionError, match="version 1"):
            parse_card({**TEXT, "v": version})
    with pytest.raises(SchemaVersionError, match="context_length"):
        parse_card({**TEXT, "context_length": 0})
    with pytest.raises(SchemaVersionError, match="kind"):
        parse_card({**TEXT, "kind": "audio"})
    # what a newer worker adds is kept
    assert parse_card({**TEXT, "mood": "calm"}).model_dump()["mood"] == "calm"


@pytest.mark.parametrize(
    ("text", "size"),
    [("160x96", (160, 96)), ("0x96", None), ("160X96", None), ("160x96 ", None), ("-1x5", None), ("123456x1", None)],
)
def test_sizes(text: str, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size
