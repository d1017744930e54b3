"""A copy of the data folder that is consistent while the service runs, and the way back from it.

Source: sqlite.org/lang_vacuum.html (VACUUM INTO is one read transaction, and takes no erased page along).

A backup is a folder, or a tar file, of `media-server.db`, `artifacts/<key>` and `backup.json`, which is written last
and names each file with its size and SHA-256. Only what the database's copy points to is taken: a clip that is being
made is made again. What was deleted while the files were copied is deleted in the copy too.
Invariants: a target is complete or not there; nothing is restored over anything; every byte that is restored was
hashed. With PostgreSQL the database is `pg_dump`'s, with S3 the files are the bucket's: `parts` says what is here.
"""

import hashlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.backup_media import Target, open_source, open_target
from media_server.errors import ConfigurationError, Conflict, NotFound, SchemaVersionError
from media_server.jobs import store
from media_server.jobs.database import Database, make_data_dir, open_database
from media_server.jobs.tables import artifacts, checkpoints, files, jobs, models
from media_server.migrations import HEAD, known_revisions
from media_server.settings import Settings
from media_server.webhooks.signing import SECRET_FILE

VERSION = 1
DATABASE_FILE = "media-server.db"
ARTIFACTS = "artifacts"


@dataclass
class Report:
    """What was copied, and which files could not be: a row names them, and they are gone or other than it says."""

    parts: list[str]
    num_files: int = 0
    size_bytes: int = 0
    bad: list[str] = field(default_factory=list)


def back_up(settings: Settings, target: Path) -> Report:
    """Copy what the service keeps to a new folder, or to a new file if its name ends in `.tar`.

    Raises ConfigurationError if the target exists and is no empty folder, or if there is nothing to copy.
    """
    is_sqlite = settings.database.startswith("sqlite")
    db_file = Path(make_url(settings.database).database or "") if is_sqlite else None
    if db_file is not None and not db_file.exists():
        raise ConfigurationError(f"data: there is no database at {db_file}.", param="data", value=str(db_file))
    live = open_database(settings.database)
    report = Report(["database"] if is_sqlite else [])
    with open_target(target) as writer, tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        copy = live
        if db_file is not None:
            copy = open_database(f"sqlite:///{_snapshot(db_file, Path(folder))}")
        with closing(live), closing(copy):
            if settings.artifacts_url is None or "://" not in settings.artifacts_url:
                report.parts.append("artifacts")
                _copy_artifacts(live, copy, open_artifacts(settings), writer, report, Path(folder))
            secret = settings.data_dir / SECRET_FILE
            if secret.exists():
                with secret.open("rb") as file:
                    writer.add(SECRET_FILE, file)
            if db_file is not None:
                copy.close()
                with _finished(Path(folder) / DATABASE_FILE) as file:
                    writer.add(DATABASE_FILE, file)
        report.num_files, report.size_bytes = len(writer.entries), sum(item.size_bytes for item in writer.entries)
        writer.finish(
            {
                "v": VERSION,
                "release": version("media-server"),
                "revision": HEAD,
                "created_at": time.time(),
                "parts": report.parts,
                "bad": report.bad,
            }
        )
    return report


def restore(settings: Settings, source: Path) -> Report:
    """Put a backup into the data folder, which must be empty or not there.

    Raises ConfigurationError if it is not, if the backup is not whole or not what its hashes say, SchemaVersionError
    if it is of a later release.
    """
    folder = settings.data_dir
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"data: {folder} must be empty: nothing is restored over anything.",
            param="data",
            rule="an empty folder, or none",
            value=str(folder),
        )
    with open_source(source) as reader:
        manifest = reader.manifest
        _check(manifest)
        make_data_dir(folder.parent)
        with _staging(folder) as staging:
            for entry in reader.entries:
                reader.copy(entry, staging / entry.path)
            if "database" in manifest["parts"]:
                _release_running(staging / DATABASE_FILE)
            # a name changes at once: a folder that is half restored is never there
            if folder.exists():
                folder.rmdir()
            staging.rename(folder)
    total = sum(entry.size_bytes for entry in reader.entries)
    return Report(list(manifest["parts"]), len(reader.entries), total, list(manifest["bad"]))


def _snapshot(db_file: Path, folder: Path) -> Path:
    """Copy the database as it is at this moment."""
    snapshot = folder / DATABASE_FILE
    snapshot.touch(0o600)
    with closing(sqlite3.connect(db_file, timeout=30.0)) as conn:
        conn.execute("VACUUM INTO ?", (str(snapshot),))
    return snapshot


@contextmanager
def _finished(snapshot: Path) -> Iterator[IO[bytes]]:
    """Open a copy whose changes are all in its one file."""
    with closing(sqlite3.connect(snapshot)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        conn.execute("PRAGMA journal_mode = DELETE")
    with snapshot.open("rb") as file:
        yield file


def _copy_artifacts(
    live: Database, copy: Database, kept: ArtifactStore, writer: Target, report: Report, folder: Path
) -> None:
    for key, sha256 in _keys(copy):
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                found = _read(kept, key, file)
            except NotFound:
                if not _is_forgotten(live, copy, key):
                    report.bad.append(key)
                continue
            if sha256 not in (None, found):
                report.bad.append(key)
                continue
            writer.add(f"{ARTIFACTS}/{key}", file)


def _read(kept: ArtifactStore, key: str, file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in kept.read(key):
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()


def _keys(copy: Database) -> Iterator[tuple[str, str | None]]:
    """Name every file that the copy points to, with its hash if a row has it."""
    is_kept = jobs.c.deleted_at.is_(None)
    of_jobs = artifacts.join(jobs, artifacts.c.job_id == jobs.c.id)
    # a finished job's parts are rubbish; one that goes on continues from them
    goes_on = sa.and_(is_kept, jobs.c.completed_at.is_(None))
    of_parts = checkpoints.join(jobs, checkpoints.c.job_id == jobs.c.id)
    parts = sa.select(checkpoints.c.key).select_from(of_parts).where(goes_on)
    seen: set[str] = set()
    with copy.read() as tx:
        found: list[tuple[str, str | None]] = [
            *tx.conn.execute(sa.select(artifacts.c.key, artifacts.c.sha256).select_from(of_jobs).where(is_kept)),
            *tx.conn.execute(sa.select(files.c.key, files.c.sha256)),
            *((key, None) for key in tx.conn.scalars(parts)),
        ]
        for params in tx.conn.scalars(sa.select(jobs.c.params).where(is_kept)):
            found += [(key, None) for key in (params.get("inputs") or {}).values()]
        for card in tx.conn.scalars(sa.select(models.c.card).where(models.c.kind == "text")):
            found += [(card[name], None) for name in ("tokenizer", "chat_template") if card.get(name)]
    for key, sha256 in found:
        if key not in seen:
            seen.add(key)
            yield key, sha256


def _is_forgotten(live: Database, copy: Database, key: str) -> bool:
    """Say whether a file that is gone was deleted meanwhile; then delete it in the copy too."""
    owner = key.partition("/")[0]
    with live.read() as tx:
        job = tx.conn.execute(sa.select(jobs.c.deleted_at, jobs.c.completed_at).where(jobs.c.id == owner)).first()
        file = tx.conn.execute(sa.select(files.c.id).where(files.c.id == owner)).first()
    if copy is live:
        return job is None or job.deleted_at is not None
    if owner.startswith("file_"):
        with copy.write() as tx:
            tx.conn.execute(files.delete().where(files.c.id == owner))
        return file is None
    if job is not None and job.deleted_at is None:
        # a checkpoint goes with its job's end; the copy makes the job again from the start
        with copy.write() as tx:
            gone = tx.conn.execute(checkpoints.delete().where(checkpoints.c.key == key))
        return bool(gone.rowcount) and job.completed_at is not None
    with copy.read() as tx:
        root = tx.conn.scalar(sa.select(jobs.c.root_id).where(jobs.c.id == owner))
    with suppress(NotFound):
        try:
            store.delete(copy, owner)
        except Conflict:
            # a film goes with its children
            store.delete(copy, root or owner)
    return True


def _check(manifest: dict[str, Any]) -> None:
    if manifest.get("v") != VERSION:
        raise SchemaVersionError(f"The backup is of format {manifest.get('v')}, this release reads {VERSION}.")
    if manifest["revision"] not in known_revisions():
        raise SchemaVersionError(
            f"The backup is of revision {manifest['revision']} (release {manifest['release']}), which this release "
            "does not know: restore it with that release or a later one."
        )


def _release_running(file: Path) -> None:
    """Put back what ran when the copy was made: that attempt was nobody's fault, and counts for nothing."""
    with closing(sqlite3.connect(file)) as conn, conn:
        conn.execute(
            "UPDATE jobs SET uncounted = uncounted + 1, lease_until = 0 "
            "WHERE status = 'in_progress' AND lease_owner IS NOT NULL"
        )
    file.chmod(0o600)


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)

