"""Batches in the store, on each database: leases, lines, counts, and files that a dead worker left half-written."""

import json
from io import BytesIO
from pathlib import Path

import pytest
import sqlalchemy as sa

from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.batches import files, outputs, running, store
from media_server.batches.lines import failed, read_lines
from media_server.batches.store import BatchRow
from media_server.errors import Conflict, NotFound, RateLimited
from media_server.ids import new_id
from media_server.jobs.database import Database
from media_server.jobs.tables import batches, garbage
from media_server.jobs.tables import files as files_table


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    return open_artifacts(str(tmp_path / "artifacts"))


def content(count: int) -> bytes:
    lines = [{"custom_id": f"n{i}", "method": "POST", "url": "/v1/videos", "body": {}} for i in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def make(db: Database, artifacts: ArtifactStore, count: int = 3) -> BatchRow:
    file = files.upload(
        db, artifacts, new_id("file"), BytesIO(content(count)), owner_key_id=None, filename="a", lifetime_s=None
    )
    return store.create(
        db,
        owner_key_id=None,
        input_file=file,
        endpoint="/v1/videos",
        completion_window="24h",
        window_s=86400.0,
        metadata={"k": "v"},
        output_lifetime_s=None,
        traceparent=None,
    )


def take(db: Database, batch: BatchRow, worker: str, count: int = 3) -> BatchRow:
    (taken,) = running.claim(db, worker, lease_s=60.0, room=9)
    assert taken.id == batch.id
    if taken.status == "validating":
        running.ingest(db, taken, worker, list(read_lines(iter([content(count)]), "/v1/videos", max_body_bytes=99)))
    return store.get(db, batch.id)


def test_a_batch_from_its_claim_to_its_files(db: Database, artifacts: ArtifactStore) -> None:
    batch = make(db, artifacts)
    taken = take(db, batch, "w")
    assert (taken.status, taken.total, taken.completed, taken.failed) == ("in_progress", 3, 0, 0)
    assert running.claim(db, "other", lease_s=60.0, room=9) == []
    first, second = running.begin_lines(db, batch.id, "w", 2)
    assert (first.number, first.custom_id, first.tries) == (1, "n0", 1)
    assert content(3)[second.start : second.start + second.length] == content(3).splitlines()[1]
    running.put_back(db, batch.id, "w", first.number, 3600.0)
    # the one that waits is passed over
    (third,) = running.begin_lines(db, batch.id, "w", 9)
    assert third.number == 3 and running.count_open(db, batch.id) == 3
    assert running.end_line(db, batch.id, "w", 2, '{"a":1}', is_error=False, input_tokens=3, output_tokens=4)
    running.put_back(db, batch.id, "w", third.number, 0.0)
    assert running.end_unsent(db, batch.id, "w", "batch_cancelled", "why") == 2
    ended = outputs.finish(db, artifacts, batch.id, "w", keep_s=100.0)
    assert (ended.status, ended.completed, ended.failed, ended.input_tokens) == ("completed", 1, 2, 3)
    with db.read() as tx:
        rows = [files.load(tx, str(file_id)) for file_id in (ended.output_file_id, ended.error_file_id)]
        assert tx.conn.execute(sa.select(garbage)).all() == []
    assert b"".join(artifacts.read(rows[0].key)) == b'{"a":1}\n'
    errors = [json.loads(line) for line in b"".join(artifacts.read(rows[1].key)).splitlines()]
    assert [(error["line"], error["error"]["code"]) for error in errors] == [
        (1, "batch_cancelled"),
        (3, "batch_cancelled"),
    ]
    assert rows[0].expires_at == pytest.approx(rows[0].created_at + 100.0)
    with pytest.raises(running.BatchLost):
        running.begin_lines(db, batch.id, "w", 9) or running.end_line(db, batch.id, "w", 1, "", is_error=True)
    with pytest.raises(Conflict):
        store.cancel(db, batch.id)


def test_files_that_a_dead_worker_began_are_written_again_once(
    db: Database, artifacts: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(db, artifacts, 2)
    take(db, batch, "w1", 2)
    for line in running.begin_lines(db, batch.id, "w1", 9):
        record = failed(batch.id, line.number, line.custom_id, None, "code", "why")
        running.end_line(db, batch.id, "w1", line.number, record, is_error=line.number == 2)
    insert = files.insert
    calls = []

    def die_at_the_second(*arguments: object, **members: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return insert(*arguments, **members)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "insert", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        outputs.finish(db, artifacts, batch.id, "w1", keep_s=100.0)
    monkeypatch.undo()
    assert store.get(db, batch.id).status == "finalizing"
    with db.write() as tx:
        tx.conn.execute(batches.update().values(lease_until=0.0))
        # one file is kept, the other's beginning is rubbish
        assert len(tx.conn.execute(sa.select(garbage)).all()) == 1
    assert take(db, batch, "w2").status == "finalizing"
    ended = outputs.finish(db, artifacts, batch.id, "w2", keep_s=100.0)
    assert ended.status == "completed" and ended.output_file_id and ended.error_file_id
    with db.read() as tx:
        assert tx.conn.execute(sa.select(garbage)).all() == []
        assert len(tx.conn.execute(sa.select(files_table)).all()) == 3
        rows = [files.load(tx, file_id) for file_id in (ended.output_file_id, ended.error_file_id)]
    for row, number in zip(rows, (1, 2), strict=True):
        text = b"".join(artifacts.read(row.key))
        assert json.loads(text)["line"] == number and len(text) == row.size_bytes


def test_a_lease_that_lapsed_frees_what_was_on_its_way(db: Database, artifacts: ArtifactStore) -> None:
    batch = make(db, artifacts)
    take(db, batch, "w1")
    assert len(running.begin_lines(db, batch.id, "w1", 2)) == 2
    running.beat(db, batch.id, "w1", lease_s=0.0)
    assert take(db, batch, "w2").lease_owner == "w2"
    with pytest.raises(running.BatchLost):
        running.put_back(db, batch.id, "w1", 1, 0.0)
    with pytest.raises(running.BatchLost):
        running.end_unsent(db, batch.id, "w1", "c", "m")
    with pytest.raises(running.BatchLost):
        outputs.finish(db, artifacts, batch.id, "w1", keep_s=1.0)
    assert [line.tries for line in running.begin_lines(db, batch.id, "w2", 9)] == [2, 2, 1]
    running.release(db, batch.id, "w1")
    assert store.get(db, batch.id).lease_owner == "w2"
    running.release(db, batch.id, "w2")
    assert store.get(db, batch.id).lease_owner is None


def test_an_owner_has_so_many_batches_at_a_time(
    db: Database, artifacts: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OPEN", 2)
    for _ in range(2):
        make(db, artifacts)
    with pytest.raises(RateLimited, match="At most 2 batches"):
        make(db, artifacts)


def test_a_batch_of_a_file_that_was_just_deleted_is_refused(db: Database, artifacts: ArtifactStore) -> None:
    file = files.upload(
        db, artifacts, new_id("file"), BytesIO(b"{}"), owner_key_id=None, filename="a", lifetime_s=None
    )
    files.delete(db, file.id)
    with pytest.raises(NotFound):
        store.create(
            db,
            owner_key_id=None,
            input_file=file,
            endpoint="/v1/videos",
            completion_window="24h",
            window_s=1.0,
            metadata={},
            output_lifetime_s=None,
            traceparent=None,
        )


def test_a_file_that_was_not_kept_is_the_sweepers(db: Database, artifacts: ArtifactStore) -> None:
    with pytest.raises(ZeroDivisionError), files.writing(db, artifacts, "file_1", BytesIO(b"{}")):
        raise ZeroDivisionError
    with db.read() as tx:
        due = tx.conn.execute(sa.select(garbage.c.prefix, garbage.c.due_at)).all()
        assert [row.prefix for row in due] == ["file_1/"] and due[0].due_at <= tx.now()


@pytest.mark.parametrize("is_done", [False, True])
def test_only_what_is_undone_expires(db: Database, artifacts: ArtifactStore, is_done: bool) -> None:
    batch = make(db, artifacts, 1)
    take(db, batch, "w", 1)
    if is_done:
        running.end_line(db, batch.id, "w", 1, "{}", is_error=False)
    assert running.beat(db, batch.id, "w", lease_s=60.0).ending == "completed"
    with db.write() as tx:
        tx.conn.execute(batches.update().values(expires_at=tx.now() - 1.0))
    assert running.beat(db, batch.id, "w", lease_s=60.0).ending == ("completed" if is_done else "expired")
