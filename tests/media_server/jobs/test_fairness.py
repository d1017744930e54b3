"""Turns between keys: a thousand jobs of one do not delay another's first, at the speed of an index."""

import sqlalchemy as sa

from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.queue import _CANDIDATE
from media_server.jobs.spec import Claim, JobSpec
from media_server.jobs.tables import jobs

BUSY, MANY = "key_busy", 1000


def _submit(db: Database, owner: str | None, priority: int = 0) -> str:
    return store.submit(db, JobSpec(kind="video", pool="video", owner_key_id=owner, priority=priority)).id


def _fill(db: Database) -> None:
    """Queue a thousand jobs of one key: one by the store, the others as copies of its row."""
    id = _submit(db, BUSY)
    with db.write() as tx:
        row = dict(tx.conn.execute(sa.select(jobs).where(jobs.c.id == id)).mappings().one())
        copies = [
            {**row, "id": f"{id}{number}", "root_id": f"{id}{number}", "created_at": row["created_at"] + number}
            for number in range(1, MANY)
        ]
        tx.conn.execute(jobs.insert(), copies)


def _claim(db: Database) -> Claim:
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    return claim


def _until(db: Database, job_id: str) -> int:
    """Count the jobs that are taken before this one."""
    count = 0
    while _claim(db).job.id != job_id:
        count += 1
        assert count < MANY
    return count


def test_a_thousand_jobs_delay_another_key_by_one_at_most(db: Database) -> None:
    _fill(db)
    for _ in range(3):
        assert _claim(db).job.owner_key_id == BUSY
    assert _until(db, _submit(db, "key_new")) <= 1
    # not only its first, not only a new one, not only one, and the caller without a key too
    for owner in ("key_new", "key_other", None, "key_new"):
        assert _until(db, _submit(db, owner)) <= 1
    both = [_submit(db, owner) for owner in ("key_x", "key_y")]
    taken = [_claim(db).job.id for _ in range(3)]
    assert set(both) <= set(taken)


def test_priority_counts_within_a_key_alone(db: Database) -> None:
    _fill(db)
    _claim(db)
    # the busy one's urgent job is its own next, and takes no turn of another's
    urgent = _submit(db, BUSY, priority=100)
    modest = [_submit(db, "key_new", priority=priority) for priority in (-100, 0)]
    taken = [_claim(db).job.id for _ in range(4)]
    assert taken[0:2] == [modest[1], urgent] or taken[0:2] == [urgent, modest[1]]
    assert modest[0] in taken[2:4]


def test_keys_are_served_alike_while_all_have_work(db: Database) -> None:
    owners = ["key_a", "key_b", "key_c"]
    for owner in owners:
        for _ in range(10):
            _submit(db, owner)
    taken = [_claim(db).job.owner_key_id for _ in range(24)]
    for start in range(0, 24, 3):
        assert sorted(str(owner) for owner in taken[start : start + 3]) == owners


def test_the_claim_reads_its_index_among_a_thousand(db: Database) -> None:
    _fill(db)
    _submit(db, "key_new")
    with db.write() as tx:
        # PostgreSQL chooses by what it knows of the table
        tx.conn.exec_driver_sql("ANALYZE jobs")
        tx.conn.exec_driver_sql("ANALYZE turns")
    with db.read() as tx:
        query = _CANDIDATE.params(pool="video", now=1e10).compile(tx.conn, compile_kwargs={"literal_binds": True})
        is_sqlite = tx.conn.dialect.name == "sqlite"
        explain = "EXPLAIN QUERY PLAN" if is_sqlite else "EXPLAIN"
        plan = [row[3 if is_sqlite else 0] for row in tx.conn.exec_driver_sql(f"{explain} {query}")]
    assert any("ix_jobs_queue" in step for step in plan), plan
    scans = [step for step in plan if step.lstrip(" ->").startswith(("SCAN jobs", "SCAN waiting", "Seq Scan on jobs"))]
    assert not scans, plan
