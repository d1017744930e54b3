"""Connections and transactions on SQLite (WAL) and PostgreSQL, and the lock on the data folder.

Source: sqlite.org/wal.html, sqlite.org/lang_transaction.html; PostgreSQL's explicit locks.

A write on SQLite is BEGIN IMMEDIATE, so it never fails half-way for another writer, and waits its turn for at most
BUSY_TIMEOUT_S. synchronous is FULL: with NORMAL a WAL database keeps its shape through a power cut but loses the last
commits, and a job that was answered 202 or a clip that was announced must not vanish. That is one fsync a commit
(about 11 ms on a virtual disk, 2026-11). Heartbeats are the exception: what the last one said may be lost.

Invariants: all times are the database's clock; doorbells ring only after the commit; whoever changes a job holds the
lock of its family first (`Transaction.lock`), so a family's events are numbered in the order of their commits.
"""

import errno
import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import OperationalError

from media_server import crash_points
from media_server.errors import ConfigurationError, DataDirLocked
from media_server.figures import Counts, Key
from media_server.migrations import check_revision, upgrade

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 30
# one commit may queue many jobs (a film's shots); more doorbells than this wake nobody new
MAX_RINGS = 16
# a dead broker may not hold the caller for longer
MAX_RING_S = 3.0

_EMPTY_LOG_MS = 250
# PostgreSQL's name of it
_DISK_FULL = "53100"
_WRITE = "media_server_write"
_DURABLE = "media_server_durable"
_CLOCKS = {
    "sqlite": sa.literal_column("(julianday('now') - 2440587.5) * 86400.0", sa.Double),
    "postgresql": sa.literal_column("extract(epoch from clock_timestamp())::float8", sa.Double),
}

_ADD_COUNT = sa.text(
    "INSERT INTO counters (name, labels, part, value) VALUES (:name, :labels, :part, :value) "
    "ON CONFLICT (name, labels, part) DO UPDATE SET value = counters.value + excluded.value"
)

Ring = Callable[[str], None]


class Transaction:
    """An open transaction: its connection, the database's clock, what it counts, and the pools to wake afterwards."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.rings: list[str] = []
        # written as the last thing before the commit
        self.counts = Counts()

    @cached_property
    def _now(self) -> float:
        return float(self.conn.scalar(sa.select(_CLOCKS[self.conn.dialect.name])) or 0.0)

    def now(self) -> float:
        """Read the database's clock in unix seconds; within one transaction it stands still."""
        return self._now

    def lock(self, name: str) -> None:
        """Wait until no other transaction holds this name; released by the end of the transaction.

        On SQLite the write transaction itself is that lock.
        """
        if self.conn.dialect.name == "postgresql":
            self.conn.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name})

    def ring(self, pool: str) -> None:
        """Ring a pool's doorbell once this transaction is committed."""
        self.rings.append(pool)


class Database:
    """An engine with our rules for transactions; made by `open_database`, shared between threads."""

    def __init__(self, engine: Engine, ring: Ring | None) -> None:
        self.engine = engine
        self._ring = ring
        self._is_checked = False
        # threads of one process hand the turn on at once; SQLite has them sleep and look again, up to 0.1 s at a time
        self._turn = threading.Lock() if engine.dialect.name == "sqlite" else None

    @contextmanager
    def write(self, name: str = "", *, is_durable: bool = True) -> Iterator[Transaction]:
        """Open a transaction that writes; commits at the end, rolls back on an exception.

        One that need not be durable may be lost in a power cut, never in a crash of ours. `name` is its crash points'.
        Raises SchemaVersionError if the database is not of this release's revision.
        """
        with self._own_turn(), self._connect({_WRITE: True, _DURABLE: is_durable}) as conn:
            tx = Transaction(conn)
            yield tx
            _write_counts(conn, tx.counts.amounts)
            if crash_points.is_armed:
                crash_points.reach(f"{name}.written")
        if crash_points.is_armed:
            crash_points.reach(f"{name}.committed")
        self._ring_all(tx.rings)
        if crash_points.is_armed:
            crash_points.reach(f"{name}.rung")

    def add_counts(self, amounts: Mapping[Key, float]) -> None:
        """Add to the counters and histograms of all processes."""
        with self.write(is_durable=False) as tx:
            tx.counts.add(amounts.items())

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a transaction that only reads, on one consistent state (on SQLite)."""
        with self._connect({_WRITE: False}) as conn:
            yield Transaction(conn)

    @property
    def has_log(self) -> bool:
        """Whether there is a log that `empty_log` can empty: SQLite's."""
        return self.engine.dialect.name == "sqlite"

    def empty_log(self) -> bool:
        """Bring SQLite's write-ahead log into the file and empty it; False if it is in use, or on PostgreSQL.

        What was erased stays readable in the log until then: SQLite reuses its pages only when it comes to them.
        """
        if not self.has_log:
            return False
        raw = self.engine.raw_connection()
        try:
            cursor = raw.cursor()
            # a checkpoint is no transaction; and no writer should wait long for it
            cursor.execute(f"PRAGMA busy_timeout = {_EMPTY_LOG_MS}")
            try:
                is_busy = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError as error:
                # on a full disk the file cannot grow by what the log holds
                logger.warning("the log cannot be emptied now: %s", error.sqlite_errorname)
                return False
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")
        finally:
            raw.close()
        return bool(is_busy == 0)

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Wait until no other thread of this process writes; past the limit SQLite says what is wrong."""
        if self._turn is None:
            yield
            return
        is_held = self._turn.acquire(timeout=BUSY_TIMEOUT_S)
        try:
            yield
        finally:
            if is_held:
                self._turn.release()

    @contextmanager
    def _connect(self, options: dict[str, bool]) -> Iterator[Connection]:
        with self.engine.connect() as plain:
            conn = plain.execution_options(**options)
            with conn.begin():
                if not self._is_checked:
                    check_revision(conn)
                    self._is_checked = True
                yield conn

    def _ring_all(self, pools: list[str]) -> None:
        if self._ring is None:
            return
        deadline = time.monotonic() + MAX_RING_S
        for pool in pools[:MAX_RINGS]:
            if time.monotonic() > deadline:
                # the sweeper rings again
                logger.warning("doorbells are slow; %d left to the sweeper", len(pools))
                return
            self._ring(pool)


def _write_counts(conn: Connection, amounts: Mapping[Key, float]) -> None:
    """Add counts to their rows: last and in one order, so that two transactions never wait for each other."""
    if amounts:
        rows = [
            {"name": name, "labels": json.dumps(labels), "part": part, "value": amounts[name, labels, part]}
            for name, labels, part in sorted(amounts)
        ]
        conn.execute(_ADD_COUNT, rows)


def open_database(url: str, ring: Ring | None = None) -> Database:
    """Open the database at a URL (`sqlite:///…` or `postgresql://…`); `ring` is called with a pool after a commit."""
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return Database(_open_sqlite(parsed), ring)
    if backend in ("postgresql", "postgres"):
        return Database(_open_postgresql(parsed), ring)
    raise ConfigurationError(f"database_url must be sqlite or postgresql, got {backend}.", param="database_url")


def is_disk_full(error: OperationalError) -> bool:
    """Say whether the database refused because there is no room left on its disk."""
    return (
        getattr(error.orig, "sqlite_errorname", None) == "SQLITE_FULL"
        or getattr(error.orig, "sqlstate", None) == _DISK_FULL
    )


def migrate(db: Database) -> None:
    """Bring the database to this release's revision; does nothing if it is there.

    Raises SchemaVersionError if the database is of a revision that this release does not know.
    """
    with db.engine.connect() as plain:
        conn = plain.execution_options(**{_WRITE: True})
        with conn.begin():
            Transaction(conn).lock("migrate")
            upgrade(conn)


def make_data_dir(path: Path) -> None:
    """Make the data folder, for this user alone, if it is missing.

    Raises ConfigurationError if it cannot be made, is no folder or cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _bad_data_dir(path, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise _bad_data_dir(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


@contextmanager
def lock_data_dir(path: Path) -> Iterator[TextIO]:
    """Hold the data folder for one service at a time; the kernel frees it when the process ends.

    Raises DataDirLocked if another running service holds it, ConfigurationError if the folder cannot be used.
    """
    make_data_dir(path)
    try:
        file = (path / "media-server.lock").open("a+")
    except OSError as error:
        raise _bad_data_dir(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise DataDirLocked(f"The data folder is in use by process {holder}.", param="data_dir") from None
        # on a full disk the holder has no name, and the lock is held all the same
        with suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield file


def _bad_data_dir(path: Path, error: OSError) -> ConfigurationError:
    reason = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
    return ConfigurationError(
        f"data: {path} cannot be the data folder: {reason}.",
        param="data",
        rule="a folder that can be made and written to",
        value=str(path),
    )


def _open_sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ConfigurationError("database_url must name a file: several processes share it.", param="database_url")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        # prompts stand in it: for this user alone, from its first byte
        os.close(os.open(url.database, os.O_CREAT | os.O_EXCL, 0o600))
    engine = sa.create_engine(
        url,
        pool_size=16,
        max_overflow=32,
        # prompts are among them, and errors go into the log
        hide_parameters=True,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _prepare(dbapi_connection: Any, _record: Any) -> None:
        # we say BEGIN ourselves
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
            "journal_mode = WAL",
            "foreign_keys = ON",
            "secure_delete = ON",
            # what a query sorts may hold prompts: never in a file of its own
            "temp_store = MEMORY",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(conn: Connection) -> None:
        options = conn.get_execution_options()
        if options.get(_WRITE, False):
            conn.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if options.get(_DURABLE, True) else 'NORMAL'}")
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            conn.exec_driver_sql("BEGIN")

    return engine


def _open_postgresql(url: URL) -> Engine:
    return sa.create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=16,
        max_overflow=32,
        hide_parameters=True,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 10},
    )
