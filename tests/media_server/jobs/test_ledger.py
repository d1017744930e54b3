"""The ledger and its sums on every database, and a ledger that the release before has written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from media_server import migrations
from media_server.jobs import ledger
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.spec import UsageRecord
from media_server.keys import create_key
from media_server.usage_report import GROUPS, Period, columns_of, report, write_csv


@pytest.fixture
def owners(db: Database) -> dict[str, str]:
    """Two keys with entries, and entries of nobody."""
    ids = {name: create_key(db, name)[0].id for name in ("a", "b")}
    for owner, label, model, kind, amount in (
        ("a", "spot", "big", "prompt_tokens", 5.0),
        ("a", "spot", "big", "completion_tokens", 7.0),
        ("a", None, "small", "completion_tokens", 1.0),
        ("b", "spot", "big", "completion_tokens", 100.0),
        (None, None, "big", "completion_tokens", 1000.0),
    ):
        ledger.enter_text(db, ids.get(owner or ""), label, model, f"req_{label}", [UsageRecord(kind, amount)])
    return ids


def test_reports_group_filter_and_order_alike_everywhere(db: Database, owners: dict[str, str]) -> None:
    by_key = [(line["key_name"], line["completion_tokens"]) for line in report(db, ["key"])]
    assert sorted(by_key, key=lambda line: line[1]) == [("a", 8.0), ("b", 100.0), (None, 1000.0)]
    # what belongs to nobody comes first
    assert by_key[0] == (None, 1000.0)
    mine = report(db, ["label", "model"], owner_key_id=owners["a"])
    assert [(line["label"], line["model"], line["prompt_tokens"], line["completion_tokens"]) for line in mine] == [
        (None, "small", 0.0, 1.0),
        ("spot", "big", 5.0, 7.0),
    ]
    assert [line["label"] for line in report(db, ["label"], label="spot")] == ["spot"]
    assert report(db, GROUPS, period=Period(until=1.0)) == []
    assert {line["completion_tokens"] for line in report(db, ["model"], period=Period(since=4e9))} == {0.0}
    whole = report(db, GROUPS)
    assert [
        line for start in range(0, len(whole) + 1, 2) for line in report(db, GROUPS, limit=2, offset=start)
    ] == whole
    text = b"".join(write_csv(columns_of(GROUPS), whole)).decode()
    assert len(text.splitlines()) == len(whole) + 1


def test_sums_are_those_of_the_entries(db: Database, owners: dict[str, str]) -> None:
    with db.read() as tx:
        month = ledger.month_of(tx.now())
        for period in (ledger.TOTAL, month):
            assert ledger.read_tally(tx, owners["a"], "tokens", period) == 13.0
            assert ledger.read_tally(tx, owners["a"], "tokens", period, "spot") == 12.0
            assert ledger.read_tally(tx, owners["b"], "tokens", period, "spot") == 100.0
        assert ledger.read_tally(tx, owners["a"], "gpu_seconds", month) == 0.0


def test_long_reports_are_written_in_parts() -> None:
    lines = [{"label": f"l{number}", "amount": 0.1 * number} for number in range(1200)]
    parts = list(write_csv(["label", "amount"], lines))
    assert len(parts) == 3
    assert b"".join(parts).decode().splitlines()[-1] == "l1199,119.9"


@pytest.fixture
def before(tmp_path: Path) -> Iterator[Database]:
    """A database of the revision before this ledger's."""
    db = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    config = migrations._config()
    scripts = list(ScriptDirectory.from_config(config).walk_revisions())
    ours = next(script for script in scripts if script.path.endswith("_keys_and_ledger.py"))
    with db.engine.connect() as plain, plain.begin():
        config.attributes["connection"] = plain
        command.upgrade(config, str(ours.down_revision))
    yield db
    db.close()


def test_a_ledger_of_the_release_before_is_kept(before: Database) -> None:
    with before.engine.connect() as conn, conn.begin():
        conn.execute(
            sa.text("INSERT INTO usage (created_at, job_id, root_id, kind, amount) VALUES (1, 'v', 'film_1', :k, 2.5)"),
            {"k": "gpu_seconds"},
        )
    migrate(before)
    assert report(before, ["film", "shot"]) == [
        {
            "film_id": "film_1",
            "shot": None,
            "gpu_seconds": 2.5,
            "prompt_tokens": 0.0,
            "completion_tokens": 0.0,
            "storage_bytes": 0,
        }
    ]
