"""An upgrade with queued jobs: the database that the first release's own code left behind, opened by this one."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from media_server.app import create_app
from media_server.artifacts.store import open_artifacts
from media_server.errors import SchemaVersionError
from media_server.jobs.database import migrate, open_database
from media_server.jobs.tables import outbox
from media_server.migrations import known_revisions
from media_server.models.card import TextCard, VideoCard
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.cards import TEXT_CARD, VIDEO_CARD
from tests.media_server.scripted_worker import ScriptedWorker

DUMP = Path(__file__).with_name("first_release.sql")


@pytest.fixture
def left_behind(settings: Settings) -> Iterator[Settings]:
    settings.data_dir.mkdir()
    with closing(sqlite3.connect(settings.data_dir / "media-server.db")) as conn:
        conn.executescript(DUMP.read_text())
    yield settings


def test_what_waited_and_what_ran_is_finished_by_this_release(left_behind: Settings, clip_bytes: bytes) -> None:
    db = open_database(left_behind.database)
    with db.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT version_num FROM alembic_version")) == "0001"
        assert "tallies" not in sa.inspect(conn).get_table_names()
    migrate(db)
    migrate(db)
    for card in (VIDEO_CARD, TEXT_CARD):
        assert isinstance(card, VideoCard | TextCard)
        publish(db, card, "scripted@test:2")
    worker = ScriptedWorker(db, open_artifacts(left_behind), clip_bytes, b"picture", name="scripted@test:2")
    with TestClient(create_app(left_behind), base_url="http://127.0.0.1:8000") as http:

        def listed(path: str, **query: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = http.get(path, params={"order": "asc", **query}).json()["data"]
            return found

        before = listed("/v1/jobs")
        assert [(job["kind"], job["status"]) for job in before] == [
            ("video", "completed"),
            ("video", "in_progress"),
            ("video", "queued"),
            ("storyboard", "queued"),
            ("film", "queued"),
            ("storyboard", "queued"),
        ]
        assert worker.run_all() >= 6
        after = {job["id"]: job for job in listed("/v1/jobs")}
        assert {job["status"] for job in after.values()} == {"completed"}
        # the one that ran is in its second attempt, whose number is its files' folder
        assert after[before[1]["id"]]["attempt"] == 2 and after[before[2]["id"]]["attempt"] == 1
        done, ran, waited = listed("/v1/videos")[:3]
        assert (done["prompt"], done["created_at"]) == ("a red ball moving left", before[0]["created_at"])
        for video in (ran, waited):
            assert http.get(f"/v1/videos/{video['id']}/content").content == clip_bytes
        assert [video["id"] for video in listed("/v1/videos", **{"metadata[scene]": "3"})] == [waited["id"]]
        film = listed("/v1/films")[0]
        assert http.get(f"/v1/films/{film['id']}/content").content == clip_bytes
    with db.read() as tx:
        told = tx.conn.execute(sa.select(outbox.c.url, outbox.c.receiver, outbox.c.job_id)).all()
    assert told == [("https://hooks.example.org/x", "https://hooks.example.org:443", waited["id"])]
    db.close()


def test_a_later_schema_is_refused(left_behind: Settings) -> None:
    db = open_database(left_behind.database)
    migrate(db)
    with db.engine.connect() as conn, conn.begin():
        conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999_later'"))
    again = open_database(left_behind.database)
    with pytest.raises(SchemaVersionError, match="9999_later, which this release does not know"):
        migrate(again)
    with pytest.raises(SchemaVersionError), again.read():
        pass
    assert "9999_later" not in known_revisions()
    with again.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT version_num FROM alembic_version")) == "9999_later"
    for opened in (db, again):
        opened.close()
