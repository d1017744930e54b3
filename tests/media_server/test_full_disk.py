"""A disk that is full after all: what could not be written is refused as 507, by the store and by the database."""

import asyncio
import sqlite3
from typing import Any

import obstore
import psycopg
import pytest
import sqlalchemy as sa
from obstore.exceptions import GenericError
from starlette.requests import Request

from media_server.artifacts.room import check_room
from media_server.artifacts.store import open_artifacts
from media_server.errors import InsufficientStorage
from media_server.http_errors import _on_database_error
from media_server.jobs.database import open_database
from media_server.jobs.spec import JobSpec
from media_server.jobs.store import submit
from media_server.settings import Settings
from tests.fresh_database import open_migrated

# as the library says it (a tmpfs of 64 KiB, obstore 0.9)
NO_SPACE = "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)\n\nDebug"


def test_a_file_that_does_not_fit_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = open_artifacts(str(tmp_path))

    def fill(*_: Any) -> None:
        raise GenericError(NO_SPACE)

    monkeypatch.setattr(obstore, "put", fill)
    with pytest.raises(InsufficientStorage) as refused:
        artifacts.put_bytes("video_1/inputs/x.png", b"x", "image/png")
    assert (refused.value.status, str(tmp_path) in refused.value.message) == (507, False)


async def _status_of(error: sa.exc.OperationalError) -> int:
    return (await _on_database_error(Request({"type": "http"}), error)).status_code


@pytest.mark.parametrize(("is_full", "status"), [(True, 507), (False, 503)])
def test_a_database_without_room_is_told_from_one_that_is_away(
    tmp_path: Any, is_full: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    db = open_migrated(f"sqlite:///{tmp_path / 'jobs.db'}")
    with pytest.raises(sa.exc.OperationalError) as failed, db.write() as tx:
        if is_full:
            # SQLite's own limit gives the error of a full disk
            tx.conn.exec_driver_sql("PRAGMA max_page_count = 1")
            tx.conn.exec_driver_sql("CREATE TABLE big AS SELECT randomblob(1 << 20) AS b")
        else:
            tx.conn.exec_driver_sql("SELECT * FROM nothing")
    db.close()
    assert asyncio.run(_status_of(failed.value)) == status
    original = psycopg.errors.DiskFull("could not extend file") if is_full else psycopg.OperationalError("away")
    assert asyncio.run(_status_of(sa.exc.OperationalError("INSERT", {}, original))) == status
    # a full disk is one line, without a trace for every refused request
    said = [record for record in caplog.records if record.name == "media_server.http_errors"]
    assert [record.exc_info is None for record in said] == [is_full, is_full]
    if is_full:
        assert isinstance(failed.value.orig, sqlite3.OperationalError)
        # nothing was written, and the service goes on
        again = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
        submit(again, JobSpec(kind="video", pool="video"))
        again.close()


def test_both_disks_are_looked_at(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = open_artifacts(str(tmp_path / "elsewhere"))
    settings = Settings(
        data_dir=tmp_path / "not" / "made" / "yet", artifacts_url=str(artifacts.root), min_free_bytes=10
    )
    left = {"elsewhere": 10, tmp_path.name: 10}

    def usage(folder: Any) -> Any:
        return type("Usage", (), {"free": left[folder.name]})

    monkeypatch.setattr("shutil.disk_usage", usage)
    check_room(settings, artifacts)
    for name in list(left):
        left[name] = 9
        with pytest.raises(InsufficientStorage, match="9 bytes left"):
            check_room(settings, artifacts)
        check_room(settings.model_copy(update={"min_free_bytes": 0}), artifacts)
        left[name] = 10


def test_a_log_that_does_not_fit_into_the_file_is_emptied_another_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    said: list[str] = []
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorname = "SQLITE_FULL"

    class Cursor:
        def execute(self, statement: str) -> None:
            said.append(statement)
            if "checkpoint" in statement:
                raise full

    connection = type("Connection", (), {"cursor": lambda _: Cursor(), "close": lambda _: said.append("closed")})
    monkeypatch.setattr(db.engine, "raw_connection", connection)
    assert db.empty_log() is False
    # the connection is given back as it was: its next user waits for its turn
    assert said[-2:] == ["PRAGMA busy_timeout = 30000", "closed"]
    db.close()
