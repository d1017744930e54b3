"""The invariants themselves: each kind of damage is found in a folder that has it, and none in one that has not."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from media_server.jobs import claims, store
from media_server.jobs.spec import ArtifactRecord, JobSpec, Result
from tests.faults.customer import Customer, Entry
from tests.faults.invariants import findings
from tests.faults.receiver import Arrival, Receiver
from tests.fresh_database import open_migrated


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One completed clip with a file, and one that was cancelled."""
    db = open_migrated(f"sqlite:///{tmp_path / 'media-server.db'}")
    made = store.submit(db, JobSpec(kind="video", pool="video", webhook_url="https://one.example.org"))
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    claims.beat(db, claim, lease_s=20.0, progress=50.0)
    key = f"{made.id}/1/video.mp4"
    (tmp_path / "artifacts" / key).parent.mkdir(parents=True)
    (tmp_path / "artifacts" / key).write_bytes(b"x")
    claims.complete(db, claim, Result(artifacts=[ArtifactRecord("video", key, "video/mp4", 1, "00")]))
    store.request_cancel(db, store.submit(db, JobSpec(kind="video", pool="video")).id)
    with db.write() as tx:
        tx.conn.exec_driver_sql("UPDATE outbox SET state = 'delivered'")
    db.close()
    return tmp_path


def sql(statement: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with sqlite3.connect(folder / "media-server.db") as conn:
            conn.execute("PRAGMA foreign_keys = OFF")
            conn.execute(statement)

    return damage


def stray(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    return damage


def lose(folder: Path) -> None:
    for path in (folder / "artifacts").rglob("*.mp4"):
        path.unlink()


AGAIN = "INSERT INTO events (v, job_id, root_id, attempt, type, data, created_at) SELECT v, job_id, root_id, attempt, "


BACK = f"{AGAIN} 'job.progress', '{{\"progress\": 4.0}}', 0 FROM events WHERE type = 'video.completed'"
COLUMNS = "event_seq, job_id, url, receiver, type, payload, state, attempts, uncounted, created_at"
TWICE = f"INSERT INTO outbox (id, {COLUMNS}) SELECT 'evt_2', {COLUMNS} FROM outbox"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (sql("UPDATE jobs SET status = 'in_progress' WHERE status = 'completed'"), "has not ended"),
        (sql(f"{AGAIN} type, data, 0 FROM events WHERE type = 'video.completed'"), "2 terminal events"),
        (sql("UPDATE artifacts SET attempt = 7"), "shows files of attempts [7]"),
        (sql("UPDATE attempts SET outcome = 'running'"), "an attempt of it runs"),
        (sql(BACK), "went back"),
        (sql("UPDATE outbox SET state = 'pending'"), "is pending"),
        (sql(TWICE), "2 messages for its own URL"),
        (stray("artifacts/video_x/1/video.mp4"), "has no owner"),
        (stray("artifacts/models/m/0/tokenizer.json#1"), "has no owner"),
        (stray("work/video-0/tmp"), "is left of a killed worker"),
        (sql("INSERT INTO garbage (prefix, due_at) VALUES ('video_x/', 0)"), "was not collected"),
        (lose, "is gone"),
    ],
)
def test_damage_is_found(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    assert findings(folder) == []
    damage(folder)
    assert any(said in finding for finding in findings(folder)), findings(folder)


def test_a_receiver_finds_what_came_twice_or_not_at_all() -> None:
    receiver = Receiver(1)
    body = json.dumps({}).encode()
    for path in ("/own", "/endpoint"):
        receiver.log.append(Arrival(path, f"evt{path}", "video.completed", "video_1", body, 500))
        receiver.log.append(Arrival(path, f"evt{path}", "video.completed", "video_1", body, 204))
    assert receiver.findings({"video_1": "video.completed"}) == []
    assert len(receiver.findings({"video_1": "video.failed"})) == 4
    assert receiver.findings({"video_1": "video.completed", "video_2": "video.completed"}) == [
        "video_2 was not taken by /own",
        "video_2 was not taken by /endpoint",
    ]
    receiver.log.append(Arrival("/own", "evt_other", "video.completed", "video_1", body, 204))
    assert receiver.findings({"video_1": "video.completed"}) == ["video_1 was announced to /own 2 times"]
    receiver.log.append(Arrival("/own", "evt_other", "video.completed", "video_1", b"{ }", 204))
    assert "evt_other came with 2 bodies" in receiver.findings({"video_1": "video.completed"})
    receiver.close()


def test_a_customer_notices_what_goes_backwards() -> None:
    customer = Customer("http://127.0.0.1:1", 1, with_films=False)
    entry = Entry(key="1-0", kind="clip", id="video_1")
    for attempt, progress, status, said in (
        (1, 40, "in_progress", None),
        (2, 10, "in_progress", None),
        (2, 5, "in_progress", "5 %"),
        (1, 90, "in_progress", "from attempt 2 to 1"),
        (2, 100, "completed", None),
        (2, 100, "failed", "had ended as completed"),
    ):
        before = len(customer.findings)
        customer.note(entry, {"attempt": attempt, "progress": progress, "status": status, "error": None})
        new = customer.findings[before:]
        assert (new == []) if said is None else (len(new) == 1 and said in new[0])
    assert customer.judge(Entry("k", "clip", "video_1", status="cancelled")) is not None
    assert customer.judge(Entry("k", "clip", "video_1", status="failed", error="out_of_memory")) is not None
    assert customer.judge(Entry("k", "memory", "video_1", status="failed", error="out_of_memory")) is None
