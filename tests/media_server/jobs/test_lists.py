"""Filters of lists against a plain search in Python, and their plans among 100,000 jobs."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa

from media_server.errors import InvalidRequest
from media_server.ids import new_id
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.lists import JobFilter, list_jobs, list_query
from media_server.jobs.spec import Job, JobKind, JobSpec
from media_server.jobs.states import Status
from media_server.jobs.tables import job_metadata, jobs
from tests.fresh_database import open_migrated

NUM_JOBS = 100_000
KINDS: tuple[JobKind, ...] = ("video", "film", "storyboard")
ORDERS: tuple[Literal["asc", "desc"], ...] = ("asc", "desc")


def _fill(db: Database, rng: random.Random, count: int) -> list[Job]:
    """Make jobs of several owners, kinds, models and states, some created in one instant, some deleted."""
    made = []
    for number in range(count):
        spec = JobSpec(
            kind=rng.choice(KINDS),
            pool="video",
            model=rng.choice(["a", "b", None]),
            owner_key_id=rng.choice(["key_1", "key_2"]),
            metadata={"scene": str(rng.randrange(3)), "take": str(rng.randrange(2))} if rng.random() < 0.7 else {},
        )
        job = store.submit(db, spec)
        created_at = 1000.0 + number // 3
        status = rng.choice(list(Status))
        deleted_at = 1.0 if rng.random() < 0.1 else None
        with db.write() as tx:
            values = {"created_at": created_at, "status": status, "deleted_at": deleted_at}
            tx.conn.execute(jobs.update().where(jobs.c.id == job.id).values(**values))
            copy = job_metadata.update().where(job_metadata.c.job_id == job.id)
            tx.conn.execute(copy.values(created_at=created_at))
            (row,) = tx.conn.execute(sa.select(jobs).where(jobs.c.id == job.id)).all()
        made.append(row)
    return made  # type: ignore[return-value]


def _matches(job: Job, only: JobFilter, owner: str | None) -> bool:
    return (
        job.deleted_at is None
        and (only.kinds is None or job.kind in only.kinds)
        and only.status in (None, job.status)
        and only.model in (None, job.model)
        and owner in (None, job.owner_key_id)
        and (only.created_from is None or job.created_at >= only.created_from)
        and (only.created_before is None or job.created_at < only.created_before)
        and only.metadata.items() <= job.metadata.items()
    )


def test_every_filter_and_all_its_pages_against_a_search_in_python(db: Database) -> None:
    rng = random.Random(4)
    made = _fill(db, rng, 60)
    for _ in range(60):
        only = JobFilter(
            kinds=rng.choice([None, ["video"], ["film", "storyboard"]]),
            status=rng.choice([None, None, *Status]),
            model=rng.choice([None, None, "a"]),
            created_from=rng.choice([None, 1005.0]),
            created_before=rng.choice([None, 1015.0]),
            metadata=rng.choice([{}, {"scene": "1"}, {"scene": "2", "take": "0"}, {"scene": "none"}]),
        )
        owner, order = rng.choice([None, "key_1"]), rng.choice(ORDERS)
        wanted = sorted((job.created_at, job.id) for job in made if _matches(job, only, owner))
        wanted = wanted[:: 1 if order == "asc" else -1]
        found: list[str] = []
        has_more = True
        while has_more:
            page = list_jobs(
                db, only=only, order=order, limit=4, owner_key_id=owner, after=found[-1] if found else None
            )
            found += [job.id for job in page.data]
            has_more = page.has_more
        assert found == [id for _, id in wanted], only
        if len(found) > 2:
            page = list_jobs(db, only=only, order=order, limit=2, owner_key_id=owner, before=found[-1])
            assert [job.id for job in page.data] == found[-3:-1]
            between = list_jobs(db, only=only, order=order, owner_key_id=owner, after=found[0], before=found[-1])
            assert [job.id for job in between.data] == found[1:-1][:20]


def test_a_cursor_of_another_owner_does_not_exist(db: Database) -> None:
    theirs = store.submit(db, JobSpec(kind="video", pool="video", owner_key_id="key_2"))
    with pytest.raises(InvalidRequest, match="after: no job has the id"):
        list_jobs(db, after=theirs.id, owner_key_id="key_1")
    assert list_jobs(db, after=theirs.id).data == []


def test_metadata_goes_with_the_job(db: Database) -> None:
    job = store.submit(db, JobSpec(kind="video", pool="video", metadata={"scene": "1"}))
    only = JobFilter(metadata={"scene": "1"})
    assert [found.id for found in list_jobs(db, only=only).data] == [job.id]
    store.delete(db, job.id)
    assert list_jobs(db, only=only).data == []
    with db.read() as tx:
        assert tx.conn.execute(sa.select(job_metadata)).all() == []


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A SQLite database with 100,000 jobs, a tenth of them deleted, a few of them rare."""
    path: Path = tmp_path_factory.mktemp("crowded") / "jobs.db"
    db = open_migrated(f"sqlite:///{path}")
    rng = random.Random(5)
    kinds, states = ["video"] * 97 + ["film", "storyboard", "join"], [*["completed"] * 95, *map(str, Status)]
    rows, pairs = [], []
    for number in range(NUM_JOBS):
        id, created_at = new_id("video"), 1_700_000_000.0 + number
        rows.append(
            {
                "id": id, "kind": rng.choice(kinds), "pool": "video", "priority": 0, "status": rng.choice(states),
                "owner_key_id": f"key_{number % 7}", "queue_key": f"key_{number % 7}", "root_id": id,
                "model": "rare" if number % 5000 == 0 else "tiny-wan", "params": {"prompt": "x" * 200},
                "metadata": {"scene": str(number % 1000)}, "progress": 0.0, "attempt": 0, "uncounted": 0,
                "max_attempts": 3, "created_at": created_at, "deleted_at": 1.0 if rng.random() < 0.1 else None,
            }
        )  # fmt: skip
        pairs.append({"job_id": id, "key": "scene", "value": str(number % 1000), "created_at": created_at})
    with db.write() as tx:
        tx.conn.execute(jobs.insert(), rows)
        tx.conn.execute(job_metadata.insert(), pairs)
    yield db
    db.close()


def _plan(db: Database, query: sa.Select[Any]) -> list[str]:
    with db.read() as tx:
        text = query.limit(21).compile(tx.conn, compile_kwargs={"literal_binds": True})
        return [row[3] for row in tx.conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]


@pytest.mark.slow
def test_lists_of_100_000_jobs_are_read_from_an_index_in_its_order(crowded: Database) -> None:
    """Whatever is asked for together: no table is read from end to end but in its order, and nothing is sorted."""
    place = (1_700_050_000.0, "video_5")
    for kind, status, model, owner, pairs, span, page in product(
        (None, "film"), (None, Status.FAILED), (None, "rare"), (None, "key_1"),
        ({}, {"scene": "7"}), (None, 1_700_010_000.0), ((), ((True, place),)),
    ):  # fmt: skip
        only = JobFilter(status=status, model=model, metadata=pairs, created_from=span)
        for is_falling in (True, False):
            query = list_query(only, kind=kind, bounds=page, is_falling=is_falling, owner_key_id=owner)
            plan = _plan(crowded, query)
            asked = (kind, status, model, owner, pairs, span, page, plan)
            assert not [step for step in plan if "TEMP B-TREE" in step], asked
            scans = [step for step in plan if step.startswith("SCAN")]
            # with nothing to be equal, the newest are read off the end of the index
            is_plain = not (kind or status or model or owner or pairs or span or page)
            assert scans == (["SCAN jobs USING INDEX ix_jobs_created"] if is_plain else []), asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "kind", "owner", "index"),
    [
        (JobFilter(), "film", None, "ix_jobs_kind (kind=?"),
        (JobFilter(status=Status.FAILED), None, None, "ix_jobs_status (status=?"),
        (JobFilter(status=Status.FAILED), "film", None, "ix_jobs_kind_status (kind=? AND status=?"),
        (JobFilter(model="rare"), None, None, "ix_jobs_model (model=?"),
        (JobFilter(), None, "key_1", "ix_jobs_owner (owner_key_id=?"),
        (JobFilter(), "film", "key_1", "ix_jobs_owner_kind (owner_key_id=? AND kind=?"),
        (JobFilter(status=Status.FAILED), None, "key_1", "ix_jobs_owner_status (owner_key_id=? AND status=?"),
        (JobFilter(metadata={"scene": "7"}), None, None, "ix_job_metadata_pair (key=? AND value=?"),
    ],
)
def test_what_is_rare_has_an_index_of_its_own(
    crowded: Database, only: JobFilter, kind: str | None, owner: str | None, index: str
) -> None:
    plan = _plan(crowded, list_query(only, kind=kind, owner_key_id=owner))
    assert any(index in step for step in plan), plan
    found = list_jobs(crowded, only=only, kinds=None, owner_key_id=owner, limit=100)
    assert len(found.data) == 100 or only.model == "rare" or only.metadata
