"""What the service logs of errors: types, places and codes, and no word of a prompt."""

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from sqlalchemy import event

from media_server.app import create_app
from media_server.jobs.database import open_database
from media_server.logging_setup import JsonFormatter, PlainFormatter, describe_exception
from media_server.models.card import VideoCard
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.fresh_database import open_migrated

CANARY = "xylophone"


@pytest.fixture(params=[PlainFormatter, lambda: JsonFormatter("test")], ids=["plain", "json"])
def logged(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    make: Callable[[], logging.Formatter] = request.param
    handler.setFormatter(make())
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_a_database_that_is_full_says_so_without_the_prompt(
    tmp_path: Path, card: VideoCard, logged: io.StringIO
) -> None:
    settings = Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0")
    db = open_migrated(settings.database)
    publish(db, card, "video-0@test:1")
    db.close()
    app = create_app(settings)
    with TestClient(app, base_url="http://127.0.0.1:8000") as http:
        engine = app.state.db.engine
        engine.dispose()

        @event.listens_for(engine, "connect")
        def _fill(connection: Any, _record: Any) -> None:
            # SQLite takes the size that the file has
            connection.execute("PRAGMA max_page_count = 1")

        for _ in range(200):
            answer = http.post("/v1/videos", json={"prompt": CANARY * 20, "metadata": {"a": CANARY * 20}})
            if answer.status_code != 200:
                break
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert "the database's disk is full" in logged.getvalue()
    assert CANARY not in logged.getvalue()


def test_errors_of_both_databases_hide_what_they_were_given(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path / 'a.db'}", "postgresql://127.0.0.1:1/none"):
        db = open_database(url)
        assert db.engine.hide_parameters is True
        db.close()


def test_a_chain_of_exceptions_is_told_without_their_words(logged: io.StringIO) -> None:
    nothing: dict[str, str] = {}

    def fail(value: str) -> None:
        try:
            nothing[value]
        except KeyError as error:
            raise ValueError(f"no {value}") from error

    try:
        fail(CANARY)
    except ValueError:
        logging.getLogger("test").exception("job 1: the worker failed")
    said = logged.getvalue()
    assert "job 1: the worker failed" in said
    assert said.index("KeyError") < said.index("which led to") < said.rindex("ValueError")
    assert "test_logging.py" in said
    assert CANARY not in said


def test_codes_are_kept() -> None:
    group = ExceptionGroup("words", [FileNotFoundError(2, "words", "words"), ValueError("words")])
    assert describe_exception(group).endswith("ExceptionGroup of FileNotFoundError errno=2, ValueError")
    assert describe_exception(None) == ""
    with pytest.raises(sa.exc.OperationalError) as caught:
        sa.create_engine("sqlite:////dev/null/none").connect()
    assert "sqlite_errorname=SQLITE_CANTOPEN" in describe_exception(caught.value)
