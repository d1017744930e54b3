"""Files without an owner are removed, whatever becomes of one of them; erased words leave the log."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from media_server.artifacts.store import open_artifacts
from media_server.ids import new_id
from media_server.jobs import claims, store
from media_server.jobs.spec import JobSpec, Result
from media_server.jobs.tables import jobs
from media_server.jobs.transitions import discard
from media_server.settings import Settings, child_environment
from tests.fresh_database import open_migrated
from workers.sweeper import collect_garbage, sweep_once


def test_a_prefix_that_cannot_be_removed_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path)
    artifacts = open_artifacts(settings)
    db = open_migrated(settings.database)
    # more than one round takes, and one that can be removed behind them
    stuck = [f"video_{number}/1/" for number in range(100)]
    for prefix in (*stuck, "video_last/1/"):
        artifacts.put_bytes(f"{prefix}video.mp4", b"x", "video/mp4")
        with db.write() as tx:
            discard(tx, prefix, delay_s=-1.0 if prefix in stuck else 0.0)
    remove = artifacts.delete_prefix

    def refuse(prefix: str) -> None:
        if prefix in stuck:
            raise PermissionError(prefix)
        remove(prefix)

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "delete_prefix", refuse)
        collect_garbage(db, artifacts)
        collect_garbage(db, artifacts)
    assert list(artifacts.list_keys("video_last/")) == []
    assert len(list(artifacts.list_keys("video_0/"))) == 1
    # not forgotten: they come again
    with db.write() as tx:
        tx.conn.exec_driver_sql("UPDATE garbage SET due_at = 0")
    assert sorted(store.due_garbage(db)) == sorted(stuck)
    db.close()


def test_what_has_expired_goes_with_its_files_and_then_with_its_rows(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, keep_deleted_s=3600.0)
    artifacts = open_artifacts(settings)
    db = open_migrated(settings.database)
    spec = JobSpec(kind="video", pool="video", prompts={"prompt": "x"}, retention_s=60.0)
    kept, expiring = (store.submit(db, spec).id for _ in range(2))
    for job_id in (kept, expiring):
        claim = claims.claim_next(db, "video", "w", 20.0)
        assert claim is not None
        stored = artifacts.put_bytes(f"{job_id}/1/video.mp4", b"x" * 9, "video/mp4")
        assert claims.complete(db, claim, Result([stored.record("video")]))
    sweep_once(settings, db, artifacts)
    assert len(store.artifacts_of(db, expiring)) == 1
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == expiring).values(expires_at=tx.now() - 1))
    sweep_once(settings, db, artifacts)
    assert [list(artifacts.list_keys(job_id)) for job_id in (kept, expiring)] == [[f"{kept}/1/video.mp4"], []]
    with db.read() as tx:
        rows = sa.select(jobs.c.id).order_by(jobs.c.id)
        assert list(tx.conn.scalars(rows)) == [kept, expiring]
    sweep_once(settings.model_copy(update={"keep_deleted_s": 0.0}), db, artifacts)
    with db.read() as tx:
        assert list(tx.conn.scalars(rows)) == [kept]
    db.close()


def test_what_was_erased_leaves_the_log_and_what_nothing_owns_the_store(tmp_path: Path) -> None:
    """The sweeper itself, over a database that another process has open."""
    settings = Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0", stray_s=0.2, sweep_s=0.1)
    stray = tmp_path / "artifacts" / new_id("video") / "1" / "video.mp4"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"x")
    db = open_migrated(settings.database)
    job = store.submit(db, JobSpec(kind="storyboard", pool="text", prompts={"idea": "canary-21ce"}))
    store.delete(db, job.id)
    log = tmp_path / "media-server.db-wal"
    assert b"canary-21ce" in log.read_bytes()
    command = [sys.executable, "-c", "from workers.sweeper import main; main([])"]
    with subprocess.Popen(command, env=child_environment(settings), stderr=subprocess.DEVNULL) as sweeper:
        deadline = time.monotonic() + 60
        while (b"canary-21ce" in log.read_bytes() or stray.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        sweeper.terminate()
        assert sweeper.wait(30) == 0
    assert b"canary-21ce" not in log.read_bytes() + (tmp_path / "media-server.db").read_bytes()
    assert not stray.parent.parent.exists()
    db.close()
