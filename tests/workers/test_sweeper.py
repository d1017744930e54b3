"""Files without an owner are removed, whatever becomes of one of them; erased words leave the log."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from media_server.artifacts.store import open_artifacts
from media_server.jobs import store
from media_server.jobs.database import migrate, open_database
from media_server.jobs.spec import JobSpec
from media_server.jobs.transitions import discard
from media_server.settings import Settings, child_environment
from workers.sweeper import collect_garbage


def test_a_prefix_that_cannot_be_removed_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path)
    artifacts = open_artifacts(settings)
    db = open_database(settings.database)
    migrate(db)
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


def test_what_was_erased_leaves_the_log(tmp_path: Path) -> None:
    """The sweeper itself, over a database that another process has open."""
    settings = Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0")
    db = open_database(settings.database)
    migrate(db)
    job = store.submit(db, JobSpec(kind="storyboard", pool="text", prompts={"idea": "canary-21ce"}))
    store.delete(db, job.id)
    log = tmp_path / "media-server.db-wal"
    assert b"canary-21ce" in log.read_bytes()
    command = [sys.executable, "-c", "from workers.sweeper import main; main([])"]
    with subprocess.Popen(command, env=child_environment(settings), stderr=subprocess.DEVNULL) as sweeper:
        deadline = time.monotonic() + 60
        while b"canary-21ce" in log.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        sweeper.terminate()
        assert sweeper.wait(30) == 0
    assert b"canary-21ce" not in log.read_bytes() + (tmp_path / "media-server.db").read_bytes()
    db.close()
