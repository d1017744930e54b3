"""Upgrades from the release before, with its rows in place."""

import json
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from media_server.jobs import idempotency, outbox, store
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.idempotency import HeldKey, KeyedRequest
from media_server.jobs.lists import JobFilter
from media_server.jobs.states import Status
from media_server.migrations import HEAD, _config
from media_server.webhooks import log

METADATA = {"scene": "7", "note": "ü" * 512, "long": "x" * 3000}


@pytest.fixture
def first(database_url: str) -> Iterator[Database]:
    """A database as the first release left it."""
    db = open_database(database_url)
    config = _config()
    with db.engine.connect() as conn, conn.begin():
        config.attributes["connection"] = conn
        command.upgrade(config, "0001")
    yield db
    db.close()


def test_the_revision_that_a_release_needs_is_the_last_there_is() -> None:
    assert ScriptDirectory.from_config(_config()).get_heads() == [HEAD]


def _row(conn: sa.Connection, table: str, **values: object) -> None:
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    conn.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


def _job(conn: sa.Connection, id: str, **values: object) -> None:
    _row(
        conn, "jobs", id=id, kind="video", pool="video", priority=0, queue_key="", root_id=id, params="{}",
        progress=0.0, attempt=0, uncounted=0, max_attempts=3, created_at=1000.0,
        **{"status": "queued", "metadata": json.dumps(METADATA), **values},
    )  # fmt: skip


def _message(conn: sa.Connection, id: str, job_id: str, seq: int, **values: object) -> None:
    _row(
        conn, "outbox", id=id, event_seq=seq, job_id=job_id, type="video.completed", payload="{}", attempts=0,
        created_at=1000.0, **{"state": "pending", "next_at": 1000.0, **values},
    )  # fmt: skip


def test_rows_of_the_first_release_are_taken_along(first: Database) -> None:
    with first.engine.connect() as conn, conn.begin():
        _job(conn, "video_a")
        _job(conn, "video_b", status="completed", deleted_at=5.0)
        _row(
            conn, "webhook_endpoints", id="whe_1", name="n", url="https://Hooks.example.org:8443/a",
            event_types='["*"]', secret="whsec_x", is_enabled=True, created_at=1.0, updated_at=1.0,
        )  # fmt: skip
        _message(conn, "evt_1", "video_a", 1, url="https://one.example.org/secret?x=1")
        _message(conn, "evt_2", "video_a", 2, endpoint_id="whe_1")
        _message(conn, "evt_3", "video_a", 3, state="delivered", next_at=None)
        _message(conn, "evt_4", "video_a", 4, url="https://[broken")
        for number in (1, 2):
            _row(
                conn, "deliveries", outbox_id="evt_3", number=number, started_at=1.0, duration_s=0.5, status_code=200,
            )  # fmt: skip
    migrate(first)
    tries = [try_.number for try_ in log.get(first, "evt_3", None).tries]
    assert tries == [1, 2]
    page = store.list_jobs(first, only=JobFilter(metadata={"scene": "7"}, status=Status.QUEUED))
    assert [job.id for job in page.data] == ["video_a"]
    assert page.data[0].metadata == METADATA
    assert store.list_jobs(first, only=JobFilter(metadata={"note": "ü" * 512})).data == page.data
    receivers = {message.id: message.receiver for message in outbox.claim_due(first, "w", lease_s=60.0)}
    assert receivers == {"evt_1": "https://one.example.org:443", "evt_2": "https://hooks.example.org:8443"} | {
        "evt_4": "https://[broken"
    }
    held = idempotency.hold(first, KeyedRequest(None, "k", "a"), 200)
    assert isinstance(held, HeldKey)
