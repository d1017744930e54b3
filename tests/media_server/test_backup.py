"""Backup and restore on the real store and folder: consistent while others write, complete or not there, checked."""

import json
import sqlite3
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from media_server import backup as backups
from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.backup import back_up, restore
from media_server.cli import run
from media_server.errors import ConfigurationError, SchemaVersionError
from media_server.jobs import claims, store
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.spec import Job, JobSpec, Result
from media_server.jobs.tables import jobs
from media_server.settings import Settings
from tests.fresh_database import open_migrated

WORKER = "worker@test:1"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", broker_url="redis://127.0.0.1:1/0")


@pytest.fixture
def db(settings: Settings) -> Iterator[Database]:
    db = open_migrated(settings.database)
    yield db
    db.close()


@pytest.fixture
def files(settings: Settings) -> ArtifactStore:
    return open_artifacts(settings)


def submit(db: Database, **members: Any) -> Job:
    return store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": "canary words"}, **members))


def make(db: Database, files: ArtifactStore, content: bytes) -> Job:
    """Make a clip, with an input."""
    job = submit(db)
    key = f"{job.id}/inputs/first_frame.png"
    files.put_bytes(key, b"input of " + content, "image/png")
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == job.id).values(params={"inputs": {"first_frame": key}}))
    claim = claims.claim_next(db, "video", WORKER, 60.0)
    assert claim is not None
    stored = files.put_bytes(f"{claim.job.id}/1/video.mp4", content, "video/mp4")
    assert claims.complete(db, claim, Result(artifacts=[stored.record("video")]))
    return claim.job


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_what_is_restored_is_what_was_there(
    settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path, name: str
) -> None:
    done = make(db, files, b"a clip")
    gone = make(db, files, b"deleted before")
    store.delete(db, gone.id)
    running = submit(db)
    claim = claims.claim_next(db, "video", WORKER, 60.0)
    assert claim is not None and claim.job.id == running.id
    files.put_bytes(f"{running.id}/1/half.mp4", b"half a clip", "video/mp4")
    files.put_bytes(f"{running.id}/segments/1_000.mkv", b"a part", "video/x-matroska")
    assert claims.save_checkpoint(db, claim, 0, f"{running.id}/segments/1_000.mkv", {})
    waiting = submit(db)
    (settings.data_dir / "webhook-secret").write_text("whsec_x\n")
    report = back_up(settings, tmp_path / name)
    assert report.parts == ["database", "artifacts"] and report.bad == []
    other = Settings(data_dir=tmp_path / "elsewhere" / "data")
    assert restore(other, tmp_path / name).num_files == report.num_files == 5
    kept = {str(path.relative_to(other.data_dir)) for path in other.data_dir.rglob("*") if path.is_file()}
    assert kept == {
        "media-server.db",
        "webhook-secret",
        f"artifacts/{done.id}/1/video.mp4",
        f"artifacts/{done.id}/inputs/first_frame.png",
        f"artifacts/{running.id}/segments/1_000.mkv",
    }
    private = [other.data_dir, *(path for path in other.data_dir.rglob("*") if path.is_file())]
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    assert b"".join(open_artifacts(other).read(f"{done.id}/1/video.mp4")) == b"a clip"
    with closing(open_database(other.database)) as restored:
        assert store.get(restored, done.id).status == "completed"
        assert store.get(restored, done.id).prompts == {"prompt": "canary words"}
        # what ran goes on at once, and that attempt counts for nothing
        again = claims.claim_next(restored, "video", "worker@test:2", 60.0)
        assert again is not None and (again.job.id, again.attempt, again.job.uncounted) == (running.id, 2, 1)
        assert [part.sequence for part in claims.checkpoints(restored, running.id)] == [0]
        after = claims.claim_next(restored, "video", "worker@test:2", 60.0)
        assert after is not None and after.job.id == waiting.id
    # the service itself goes on
    assert claims.beat(db, claim, lease_s=60.0).is_ours


def test_a_backup_under_load_is_one_moment(
    settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path
) -> None:
    stopping = threading.Event()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            number = 0
            while not stopping.is_set():
                number += 1
                made = make(db, files, f"{seed}/{number}".encode() * 1000)
                if number % 3 == 0:
                    for prefix in store.delete(db, made.id):
                        files.delete_prefix(prefix)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            report = back_up(settings, tmp_path / f"copy{number}")
            assert report.bad == []
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert failures == []
    for number in range(3):
        other = Settings(data_dir=tmp_path / f"restored{number}")
        restore(other, tmp_path / f"copy{number}")
        kept = open_artifacts(other)
        with closing(open_database(other.database)) as restored:
            with restored.read() as tx:
                query = sa.select(jobs.c.id).where(jobs.c.status == "completed", jobs.c.deleted_at.is_(None))
                completed = list(tx.conn.scalars(query))
                assert tx.conn.scalar(sa.text("PRAGMA integrity_check")) == "ok"
            for job_id in completed:
                (record,) = store.artifacts_of(restored, job_id)
                content = b"".join(kept.read(record.key))
                assert len(content) == record.size_bytes


def test_what_is_deleted_while_files_are_copied_is_deleted_in_the_copy(
    settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(db, files, b"one"), make(db, files, b"two")
    taken = backups._snapshot

    def delete_meanwhile(db_file: Path, folder: Path) -> Path:
        snapshot = taken(db_file, folder)
        for prefix in store.delete(db, first.id):
            files.delete_prefix(prefix)
        return snapshot

    monkeypatch.setattr(backups, "_snapshot", delete_meanwhile)
    assert back_up(settings, tmp_path / "copy").bad == []
    monkeypatch.undo()
    other = Settings(data_dir=tmp_path / "restored")
    restore(other, tmp_path / "copy")
    with closing(open_database(other.database)) as restored:
        assert [job.id for job in store.list_jobs(restored).data] == [second.id]
    assert b"canary" in (other.data_dir / "media-server.db").read_bytes()
    store.delete(db, second.id)
    # erased words are in no page that the next copy takes along
    back_up(settings, tmp_path / "later")
    assert b"canary" not in (tmp_path / "later" / "media-server.db").read_bytes()


def test_a_file_that_is_lost_or_damaged_is_named(
    settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, damaged = make(db, files, b"one"), make(db, files, b"two")
    files.delete(f"{lost.id}/1/video.mp4")
    (settings.data_dir / "artifacts" / damaged.id / "1" / "video.mp4").write_bytes(b"tow")
    assert run(["backup", str(tmp_path / "copy"), "--data", str(settings.data_dir), "--json"]) == 1
    said = capsys.readouterr()
    assert set(json.loads(said.out)["bad"]) == {f"{lost.id}/1/video.mp4", f"{damaged.id}/1/video.mp4"}
    assert "2 files are gone or damaged" in said.err


def test_a_target_that_is_there_and_a_folder_that_is_not_empty_are_refused(
    settings: Settings, db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    data = ["--data", str(settings.data_dir)]
    assert run(["backup", str(full), *data]) == 1
    assert "target:" in capsys.readouterr().err
    assert run(["backup", str(tmp_path / "copy.tar"), *data]) == 0
    assert run(["backup", str(tmp_path / "copy.tar"), *data]) == 1
    assert run(["restore", str(tmp_path / "copy.tar"), "--data", str(full)]) == 1
    assert "must be empty" in capsys.readouterr().err
    assert [path.name for path in full.iterdir()] == ["mine.txt"]
    assert run(["backup", str(tmp_path / "new"), "--data", str(tmp_path / "nothing")]) == 1
    assert "no database" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not (tmp_path / "nothing").exists()
    # nothing half-written is left beside the target
    assert {path.name for path in tmp_path.iterdir()} == {"full", "data", "copy.tar"}


def _change(folder: Path, **values: Any) -> None:
    path = folder / "backup.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("fault", ["byte", "missing", "manifest", "revision", "format", "escape", "torn"])
def test_what_is_not_whole_is_not_restored(
    settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path, fault: str
) -> None:
    done = make(db, files, b"a clip")
    copy = tmp_path / "copy"
    back_up(settings, copy)
    clip = copy / "artifacts" / done.id / "1" / "video.mp4"
    expected: type[Exception] = ConfigurationError
    source = copy
    if fault == "byte":
        clip.write_bytes(b"a clop")
    elif fault == "missing":
        clip.unlink()
    elif fault == "manifest":
        (copy / "backup.json").unlink()
    elif fault == "revision":
        _change(copy, revision="9999_later")
        expected = SchemaVersionError
    elif fault == "format":
        _change(copy, v=2)
        expected = SchemaVersionError
    elif fault == "escape":
        _change(copy, files=[{"path": "../outside", "size_bytes": 0, "sha256": ""}])
    else:
        back_up(settings, tmp_path / "whole.tar")
        content = (tmp_path / "whole.tar").read_bytes()
        source = tmp_path / "torn.tar"
        source.write_bytes(content[: len(content) // 2])
    target = Settings(data_dir=tmp_path / "restored")
    with pytest.raises(expected):
        restore(target, source)
    assert not target.data_dir.exists() and not (tmp_path / "outside").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".restored")]


def test_a_tar_holds_plain_files_alone(settings: Settings, db: Database, files: ArtifactStore, tmp_path: Path) -> None:
    make(db, files, b"a clip")
    back_up(settings, tmp_path / "copy.tar")
    with tarfile.open(tmp_path / "copy.tar") as tar:
        assert all(member.isreg() and member.mode == 0o600 for member in tar)
        assert tar.getnames()[-1] == "backup.json"
    assert (tmp_path / "copy.tar").stat().st_mode & 0o077 == 0
    with closing(sqlite3.connect(settings.data_dir / "media-server.db")) as conn:
        assert conn.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("is_postgres", [True])
def test_with_postgresql_the_files_are_copied_and_the_database_is_pg_dump_s(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path / "data", database_url=database_url)
    with closing(open_database(settings.database)) as db:
        migrate(db)
        done = make(db, open_artifacts(settings), b"a clip")
    monkeypatch.setenv("MEDIA_SERVER_DATABASE_URL", database_url)
    assert run(["backup", str(tmp_path / "copy"), "--data", str(settings.data_dir), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parts"] == ["artifacts"] and "run pg_dump first" in said.err
    other = Settings(data_dir=tmp_path / "restored")
    assert restore(other, tmp_path / "copy").parts == ["artifacts"]
    kept = {str(path.relative_to(other.data_dir)) for path in other.data_dir.rglob("*") if path.is_file()}
    assert kept == {f"artifacts/{done.id}/1/video.mp4", f"artifacts/{done.id}/inputs/first_frame.png"}
