"""Transactions, the database's clock, revisions, the data folder's lock."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from media_server.errors import ConfigurationError, DataDirLocked, SchemaVersionError
from media_server.jobs.database import Database, lock_data_dir, migrate, open_database
from media_server.jobs.queue import _CANDIDATE
from media_server.jobs.tables import garbage, metadata
from media_server.migrations import HEAD


def test_the_clock_is_unix_seconds(db: Database) -> None:
    before = time.time()
    with db.read() as tx:
        now = tx.now()
        assert tx.now() == now
    # both databases run on this machine; SQLite's julian day is good to a millisecond
    assert before - 0.01 <= now <= time.time() + 0.01


def test_an_exception_rolls_back_and_rings_nobody(db: Database, rings: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), db.write() as tx:
        tx.conn.execute(garbage.insert().values(prefix="a/", due_at=0.0))
        tx.ring("video")
        raise ZeroDivisionError
    with db.read() as tx:
        assert tx.conn.scalar(sa.select(sa.func.count()).select_from(garbage)) == 0
    assert rings == []


def test_doorbells_ring_after_the_commit(database_url: str) -> None:
    seen: list[int | None] = []

    def look(_pool: str) -> None:
        with other.read() as tx:
            seen.append(tx.conn.scalar(sa.select(sa.func.count()).select_from(garbage)))

    db, other = open_database(database_url, look), open_database(database_url)
    migrate(db)
    with db.write() as tx:
        tx.ring("video")
        tx.conn.execute(garbage.insert().values(prefix="a/", due_at=0.0))
        assert seen == []
    assert seen == [1]
    db.close()
    other.close()


def test_slow_doorbells_do_not_hold_the_caller(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.jobs.database.MAX_RING_S", 0.05)
    rung: list[str] = []

    def ring(pool: str) -> None:
        time.sleep(0.06)
        rung.append(pool)

    db = open_database(database_url, ring)
    migrate(db)
    with db.write() as tx:
        for _ in range(10):
            tx.ring("video")
    assert rung == ["video"]
    db.close()


def test_sqlite_is_opened_for_many_writers_and_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "jobs.db"
    db = open_database(f"sqlite:///{path}")
    migrate(db)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def pragma(name: str, is_durable: bool = True) -> object:
        with db.write(is_durable=is_durable) as tx:
            return tx.conn.exec_driver_sql(f"PRAGMA {name}").scalar()

    assert pragma("journal_mode") == "wal"
    assert pragma("foreign_keys") == 1
    assert pragma("secure_delete") == 1
    assert pragma("busy_timeout") == 30_000
    # 2 is FULL, 1 is NORMAL
    assert [pragma("synchronous"), pragma("synchronous", is_durable=False), pragma("synchronous")] == [2, 1, 2]
    db.close()


def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    db = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    migrate(db)
    order: list[str] = []
    inside = threading.Event()

    def write_second() -> None:
        inside.wait()
        with db.write():
            order.append("second")

    thread = threading.Thread(target=write_second)
    thread.start()
    with db.write():
        inside.set()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    db.close()


def test_memory_and_other_databases_are_refused() -> None:
    for url, rule in (("sqlite://", "name a file"), ("mysql://host/db", "sqlite or postgresql")):
        with pytest.raises(ConfigurationError, match=rule):
            open_database(url)


def test_an_unmigrated_or_newer_database_is_refused(database_url: str) -> None:
    db = open_database(database_url)
    with pytest.raises(SchemaVersionError, match="revision None"), db.read():
        pass
    migrate(db)
    migrate(db)
    with db.write() as tx:
        tx.conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    db.close()
    newer = open_database(database_url)
    with pytest.raises(SchemaVersionError, match="9999"), newer.read():
        pass
    with pytest.raises(SchemaVersionError, match="does not know"):
        migrate(newer)
    newer.close()


def test_processes_that_start_together_migrate_once(database_url: str) -> None:
    def run() -> None:
        db = open_database(database_url)
        migrate(db)
        db.close()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    db = open_database(database_url)
    with db.read() as tx:
        assert tx.conn.scalars(sa.text("SELECT version_num FROM alembic_version")).all() == [HEAD]
    db.close()


def test_migrations_make_the_tables(db: Database) -> None:
    """What the revisions make is what the tables say, with every column, type, default, key and index."""
    found = sa.inspect(db.engine)
    assert set(found.get_table_names()) - {"alembic_version"} == set(metadata.tables)
    for name, table in metadata.tables.items():
        columns = {column["name"]: column for column in found.get_columns(name)}
        assert set(columns) == {column.name for column in table.columns}, name
        for column in table.columns:
            compiled = column.type.compile(db.engine.dialect)
            actual = columns[column.name]["type"].compile(db.engine.dialect)
            assert actual.replace("DOUBLE PRECISION", "DOUBLE") == compiled.replace("DOUBLE PRECISION", "DOUBLE")
            assert columns[column.name]["nullable"] == column.nullable, f"{name}.{column.name}"
        assert found.get_pk_constraint(name)["constrained_columns"] == [key.name for key in table.primary_key]
        keys = {(key["constrained_columns"][0], key["referred_table"]) for key in found.get_foreign_keys(name)}
        assert keys == {(key.parent.name, key.column.table.name) for key in table.foreign_keys}, name
    # SQLite alone keeps the text of each index; PostgreSQL's are compared by name
    with db.read() as tx:
        if tx.conn.dialect.name == "sqlite":
            made = set(tx.conn.scalars(sa.text("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql NOT NULL")))
            wanted = {
                str(sa.schema.CreateIndex(index).compile(dialect=tx.conn.dialect))
                for table in metadata.tables.values()
                for index in table.indexes
            }
        else:
            query = "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema() AND indexname LIKE 'ix_%'"
            made = set(tx.conn.scalars(sa.text(query)))
            wanted = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    assert made == wanted


def test_the_claim_reads_an_index_and_sorts_nothing(tmp_path: Path) -> None:
    db = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    migrate(db)
    with db.read() as tx:
        query = _CANDIDATE.params(pool="video", now=0.0).compile(tx.conn, compile_kwargs={"literal_binds": True})
        plan = [row[3] for row in tx.conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")]
    assert not [step for step in plan if step.startswith("SCAN")], plan
    assert any("ix_jobs_queue (pool=? AND status=? AND queue_key=?)" in step for step in plan), plan
    assert sum("TEMP B-TREE" in step for step in plan) == 0, plan
    db.close()


def test_the_data_folder_has_one_owner(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from media_server.jobs.database import lock_data_dir\n"
            "with lock_data_dir(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)",
            str(tmp_path / "data"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataDirLocked, match=str(holder.pid)), lock_data_dir(tmp_path / "data"):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    # the kernel frees a dead owner's lock
    with lock_data_dir(tmp_path / "data") as file:
        assert Path(file.name).read_text() == f"{os.getpid()}\n"
