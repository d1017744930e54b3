"""Submitting, reading, listing, deleting, and where a job stands in its queue."""

import random
from pathlib import Path

import pytest
import sqlalchemy as sa

from media_server.errors import InvalidRequest, NotFound
from media_server.ids import new_id
from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.events import read_after
from media_server.jobs.spec import Job, JobSpec, Result
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs, prompts
from tests.fresh_database import open_migrated


def _submit(db: Database, **members: object) -> Job:
    return store.submit(db, JobSpec(**{"kind": "video", "pool": "video", **members}))  # type: ignore[arg-type]


def test_a_job_is_read_as_it_was_submitted(db: Database, rings: list[str]) -> None:
    id = new_id("video")
    spec = JobSpec(
        kind="video",
        pool="video",
        id=id,
        params={"size": "160x96", "seed": 2**53 - 1, "nested": {"a": [1, None, "ü"]}},
        prompts={"prompt": "ein Würfel 🎲", "negative_prompt": ""},
        model="tiny-wan",
        priority=3,
        metadata={"scene": "1"},
        webhook_url="https://example.org/hook",
        remixed_from_id="video_x",
        traceparent="00-0-0-00",
    )
    job = store.submit(db, spec)
    assert store.get(db, id) == job
    for name in ("params", "prompts", "model", "priority", "metadata", "webhook_url", "remixed_from_id", "traceparent"):
        assert getattr(job, name) == getattr(spec, name), name
    assert (job.id, job.root_id, job.status, job.progress, job.attempt) == (id, id, Status.QUEUED, 0.0, 0)
    assert rings == ["video"]
    (event,) = read_after(db, job_id=id)
    assert (event.v, event.type, event.root_id, event.data) == (1, "job.queued", id, {"status": "queued"})


def test_prompts_stand_in_their_own_table_alone(db: Database) -> None:
    job = _submit(db, prompts={"prompt": "canary"}, params={"size": "160x96"})
    with db.read() as tx:
        row = tx.conn.execute(sa.select(jobs).where(jobs.c.id == job.id)).one()
        assert "canary" not in str(row)
        assert tx.conn.scalars(sa.select(prompts.c.text)).all() == ["canary"]


def test_an_unknown_job_is_named(db: Database) -> None:
    for read in (store.get, store.request_cancel, store.delete, store.find_place, store.artifacts_of):
        with pytest.raises(NotFound, match="video_none"):
            read(db, "video_none")


def test_events_are_read_from_where_the_reader_is(db: Database) -> None:
    job, other = _submit(db), _submit(db)
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    for step in range(5):
        claims.beat(db, claim, lease_s=20.0, step=step)
    whole = read_after(db, job_id=claim.job.id)
    assert [event.seq for event in whole] == sorted({event.seq for event in whole})
    assert read_after(db, root_id=claim.job.id) == whole
    assert read_after(db, job_id=claim.job.id, after=whole[2].seq, limit=2) == whole[3:5]
    assert {event.job_id for event in read_after(db)} == {job.id, other.id}


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_join_to_the_whole_list(db: Database, order: str) -> None:
    """Against a plain sort in Python, with several jobs created in one instant."""
    made = []
    with db.write() as tx:
        for number in range(23):
            kind, pool = random.Random(number).choice([("video", "video"), ("film", "films")])
            made.append(store.submit_in(tx, JobSpec(kind=kind, pool=pool)))  # type: ignore[arg-type]
        tx.conn.execute(jobs.update().values(created_at=1000.0))
        for number, job in enumerate(made):
            tx.conn.execute(jobs.update().where(jobs.c.id == job.id).values(created_at=1000.0 + number // 3))
    reference = sorted((1000.0 + number // 3, job.id) for number, job in enumerate(made) if job.kind == "video")
    ids = [id for _, id in reference][:: 1 if order == "asc" else -1]

    def page(**cursor: str) -> tuple[list[str], bool]:
        found = store.list_jobs(db, kinds=["video"], limit=4, order=order, **cursor)  # type: ignore[arg-type]
        return [job.id for job in found.data], found.has_more

    forwards: list[str] = []
    last, more = page()
    while True:
        forwards += last
        if not more:
            break
        last, more = page(after=last[-1])
    assert forwards == ids
    backwards: list[str] = []
    last, more = page(before=ids[-1])
    while True:
        backwards = last + backwards
        if not more:
            break
        last, more = page(before=last[0])
    assert backwards == ids[:-1]


def test_lists_are_filtered(db: Database) -> None:
    mine = _submit(db, owner_key_id="key_a")
    _submit(db, owner_key_id="key_b")
    shot = _submit(db, owner_key_id="key_a", parent_id=mine.id)
    store.request_cancel(db, shot.id)

    def ids(**filters: object) -> set[str]:
        return {job.id for job in store.list_jobs(db, **filters).data}  # type: ignore[arg-type]

    assert ids(owner_key_id="key_a") == {mine.id, shot.id}
    assert ids(parent_id=mine.id) == {shot.id}
    assert ids(status=Status.CANCELLED) == {shot.id}
    assert ids(kinds=["film"]) == set()
    assert ids(kinds=[]) == set()
    assert len(ids()) == 3
    with pytest.raises(InvalidRequest, match="no job has the id 'x'") as bad:
        store.list_jobs(db, after="x")
    assert bad.value.param == "after"
    with pytest.raises(InvalidRequest, match="from 1 to 1000, got 0"):
        store.list_jobs(db, limit=0)


def test_deleting_erases_words_and_gives_the_files_up(db: Database) -> None:
    job = _submit(db, prompts={"prompt": "canary"}, params={"style": "canary"}, metadata={"a": "canary"})
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    claims.beat(db, claim, lease_s=20.0, data={"text": "canary"})
    claims.complete(db, claim, Result(result={"storyboard": "canary"}))
    assert store.delete(db, job.id) == [f"{job.id}/"]
    with pytest.raises(NotFound):
        store.get(db, job.id)
    with pytest.raises(NotFound):
        store.delete(db, job.id)
    assert store.list_jobs(db).data == []
    assert store.due_garbage(db) == [f"{job.id}/"]
    with db.read() as tx:
        rest = [tx.conn.execute(sa.select(table)).all() for table in jobs.metadata.tables.values()]
    assert "canary" not in str(rest)


def test_deleting_a_running_job_stops_it_first(db: Database) -> None:
    job = _submit(db, prompts={"prompt": "canary"})
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    assert store.delete(db, job.id) == []
    assert claims.beat(db, claim, lease_s=20.0).cancel_requested
    assert store.due_garbage(db) == []
    assert claims.confirm_cancel(db, claim)
    with db.read() as tx:
        assert tx.conn.scalar(sa.select(jobs.c.status).where(jobs.c.id == job.id)) == "cancelled"
        assert tx.conn.execute(sa.select(prompts)).all() == []
        assert tx.conn.execute(sa.text("SELECT prefix FROM garbage")).scalars().all() == [f"{job.id}/"]


def test_erased_words_leave_the_file(tmp_path: Path) -> None:
    """secure_delete overwrites what was erased; a checkpoint brings that from the log into the file."""
    path = tmp_path / "jobs.db"
    db = open_migrated(f"sqlite:///{path}")
    job = _submit(db, prompts={"prompt": "a canary of some length"})
    store.request_cancel(db, job.id)
    assert b"canary" in path.read_bytes() + path.with_name("jobs.db-wal").read_bytes()
    store.delete(db, job.id)
    with db.engine.connect() as conn:
        conn.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"canary" not in path.read_bytes() + path.with_name("jobs.db-wal").read_bytes()
    db.close()


@pytest.mark.parametrize("seed", range(4))
def test_queue_position_is_the_number_of_claims_before_it(db: Database, seed: int) -> None:
    """Against the claims themselves: each waiting job is taken exactly when its position said."""
    rng = random.Random(seed)
    for _ in range(14):
        _submit(db, owner_key_id=rng.choice(["a", "b", "c", None]), priority=rng.choice([0, 0, 1]))
    for _ in range(rng.randrange(4)):
        claims.claim_next(db, "video", "w", 20.0)
    waiting = [job.id for job in store.list_jobs(db, status=Status.QUEUED, limit=100).data]
    promised = {id: place.ahead for id in waiting if (place := store.find_place(db, id)) is not None}
    # a page is looked for in one go, in whatever order it is
    page = [store.get(db, id) for id in sorted(waiting, key=hash)]
    assert {id: place.ahead for id, place in store.find_places(db, page).items()} == promised
    for job in page:
        assert store.find_places(db, page)[job.id] == store.find_place(db, job.id)
    taken = []
    while (claim := claims.claim_next(db, "video", "w", 20.0)) is not None:
        taken.append(claim.job.id)
    assert promised == {id: position for position, id in enumerate(taken)}
    assert store.find_place(db, taken[0]) is None
