"""What a key may have: quotas and budgets, held in the transaction that queues a job, on every database."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from media_server import quotas
from media_server.errors import Forbidden, RateLimited
from media_server.films import FilmRequest, submit_film
from media_server.jobs import claims, ledger, store
from media_server.jobs.database import Database
from media_server.jobs.spec import ArtifactRecord, Claim, JobSpec, Result, UsageRecord
from media_server.jobs.tables import jobs, tallies, usage
from media_server.keys import change_limits, create_key
from media_server.limits import KeyLimits, parse_budget
from media_server.models.card import VideoCard
from media_server.models.registry import publish


def _key(db: Database, name: str = "studio", **limits: Any) -> str:
    return create_key(db, name, limits=KeyLimits(**limits))[0].id


def _submit(db: Database, owner: str | None, **members: Any) -> str:
    return store.submit(db, JobSpec(kind="video", pool="video", owner_key_id=owner, **members)).id


def _claim(db: Database, pool: str = "video") -> Claim:
    claim = claims.claim_next(db, pool, "w", 20.0)
    assert claim is not None
    return claim


def _finish(db: Database, *, size_bytes: int = 0, gpu_seconds: float = 0.0, tokens: int = 0) -> str:
    claim = _claim(db)
    key = f"{claim.job.id}/1/video.mp4"
    files = [ArtifactRecord("video", key, "video/mp4", size_bytes, "00")] if size_bytes else []
    spent = [UsageRecord("completion_tokens", tokens)] if tokens else []
    assert claims.complete(db, claim, Result(files, {}, gpu_seconds, None, spent))
    return claim.job.id


def _count(db: Database, table: sa.Table) -> int:
    with db.read() as tx:
        return int(tx.conn.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


def test_a_key_may_have_so_many_jobs_waiting(db: Database) -> None:
    mine, other = _key(db, queued_jobs=2), _key(db, "other", queued_jobs=2)
    _submit(db, mine)
    _submit(db, mine)
    with pytest.raises(RateLimited, match="2 jobs waiting, and has 2") as refused:
        _submit(db, mine)
    assert (refused.value.code, refused.value.status, refused.value.headers()) == (
        "queue_quota",
        429,
        {"retry-after": "10"},
    )
    # the refused one left nothing, others are not concerned, and what runs waits no more
    assert _count(db, jobs) == 2
    _submit(db, other)
    _submit(db, None)
    while _claim(db).job.owner_key_id != mine:
        pass
    _submit(db, mine)


def test_requests_at_the_same_time_do_not_pass_together(db: Database) -> None:
    mine = _key(db, queued_jobs=5)
    refused: list[RateLimited] = []

    def submit() -> None:
        for _ in range(4):
            try:
                _submit(db, mine)
            except RateLimited as error:
                refused.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (_count(db, jobs), len(refused)) == (5, 11)


def test_a_day_s_work_is_counted(db: Database) -> None:
    mine = _key(db, work_per_day=100.0)
    _submit(db, mine, work=60.0)
    with pytest.raises(RateLimited, match="100 of steps x pixels x frames a day and has submitted 60") as refused:
        _submit(db, mine, work=60.0)
    assert refused.value.code == "work_quota"
    now = datetime.now(UTC)
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert refused.value.retry_after_s == pytest.approx((midnight - now).total_seconds(), abs=5)
    # nobody waits a day for a request of a program's
    assert "x-should-retry" in refused.value.headers() or (refused.value.retry_after_s or 0) <= 60
    _submit(db, mine, work=40.0)
    # waiting will not help: it is more than a day's
    with pytest.raises(Forbidden, match="101"):
        _submit(db, mine, work=101.0)
    with db.write() as tx:
        yesterday = ledger.day_of(tx.now() - 86400)
        tx.conn.execute(tallies.update().where(tallies.c.kind == "work").values(period=yesterday))
    _submit(db, mine, work=100.0)


def test_files_are_counted_until_they_are_given_up(db: Database) -> None:
    mine = _key(db, storage_bytes=1000)
    first = _submit(db, mine, input_bytes=300)
    assert _finish(db, size_bytes=600) == first
    with pytest.raises(RateLimited, match="1000 bytes of files, and keeps 900") as refused:
        _submit(db, mine, input_bytes=101)
    assert refused.value.code == "storage_quota"
    _submit(db, mine, input_bytes=100)
    with pytest.raises(RateLimited, match="keeps 1000"):
        _submit(db, mine)
    store.delete(db, first)
    with pytest.raises(Exception, match="No job"):
        store.delete(db, first)
    _submit(db, mine, input_bytes=900)
    with db.read() as tx:
        assert ledger.read_tally(tx, mine, "storage_bytes", ledger.TOTAL) == 1000


def test_it_says_when_the_first_files_go(db: Database) -> None:
    mine = _key(db, storage_bytes=10)
    _submit(db, mine, retention_s=500.0)
    _finish(db, size_bytes=10)
    with pytest.raises(RateLimited) as refused:
        _submit(db, mine)
    assert refused.value.retry_after_s == pytest.approx(500, abs=5)


def test_files_of_a_job_that_was_deleted_while_it_ran_do_not_stay(db: Database) -> None:
    mine = _key(db, storage_bytes=1000)
    job_id = _submit(db, mine, input_bytes=300)
    claim = _claim(db)
    store.delete(db, job_id)
    assert claims.confirm_cancel(db, claim)
    with db.read() as tx:
        assert ledger.read_tally(tx, mine, "storage_bytes", ledger.TOTAL) == 0
        assert tx.conn.scalar(sa.select(sa.func.sum(usage.c.amount)).where(usage.c.kind == "storage_bytes")) == 0


def test_a_budget_refuses_with_its_figure(db: Database) -> None:
    limits = ("gpu_seconds=10/month", "spot:gpu_seconds=4", "tokens=100")
    mine = _key(db, budgets=tuple(parse_budget(text) for text in limits))
    other = _key(db, "other")
    _submit(db, mine, label="spot")
    _finish(db, gpu_seconds=4.5, tokens=50)
    with pytest.raises(RateLimited, match=r"label 'spot' is 4 GPU seconds, and 4\.5 are spent") as refused:
        _submit(db, mine, label="spot")
    # it comes back when somebody raises it, not by waiting
    assert refused.value.headers() == {"x-should-retry": "false"}
    assert (refused.value.code, refused.value.param, refused.value.value) == ("budget_exhausted", "label", 4.5)
    _submit(db, mine, label="other")
    _finish(db, gpu_seconds=5.5, tokens=49)
    with pytest.raises(RateLimited, match="this key is 10 GPU seconds a month, and 10 are spent") as refused:
        _submit(db, mine)
    assert 0 < (refused.value.retry_after_s or 0) <= 31 * 86400
    _submit(db, other, label="spot")
    change_limits(db, mine, KeyLimits(budgets=(parse_budget("tokens=99"),)))
    with pytest.raises(RateLimited, match="99 tokens, and 99 are spent"):
        _submit(db, mine)
    change_limits(db, mine, KeyLimits())
    _submit(db, mine)


def test_a_month_ends_where_the_next_begins() -> None:
    for date in ("2026-01-31T23:59:30", "2026-12-01T00:00:00", "2028-02-29T12:00:00"):
        now = datetime.fromisoformat(date).replace(tzinfo=UTC)
        then = datetime.fromtimestamp(now.timestamp() + ledger.month_left_s(now.timestamp()), UTC)
        assert (then.day, then.hour, then.minute) == (1, 0, 0)
        assert (then.year * 12 + then.month) - (now.year * 12 + now.month) == 1
        assert ledger.month_of(then.timestamp() - 1) == ledger.month_of(now.timestamp())
    assert ledger.day_of(datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC).timestamp()) == "2026-11-30"
    assert ledger.day_left_s(datetime(2026, 11, 30, 23, 59, 30, tzinfo=UTC).timestamp()) == pytest.approx(30)


def test_a_film_is_let_in_whole(db: Database, card: VideoCard) -> None:
    """Its work counts once, with the film; its shots are never refused, and wait like other jobs."""
    publish(db, card, "w")
    # 8 steps, 160x96, 32 frames
    work = 8 * 160 * 96 * 32
    mine = _key(db, queued_jobs=2, work_per_day=float(work))
    film = submit_film(db, FilmRequest(idea="a ball", seconds=2, label="spot"), card, owner_key_id=mine)
    claim = _claim(db, "text")
    shots = [{"index": index, "prompt": "a red ball", "num_frames": 8} for index in range(4)]
    assert claims.complete(db, claim, Result(result={"storyboard": {"v": 1, "title": "A", "shots": shots}}))
    with db.read() as tx:
        assert quotas.count_waiting(tx, mine) == 4
        assert ledger.read_tally(tx, mine, "work", ledger.day_of(tx.now())) == work
    with pytest.raises(RateLimited):
        submit_film(db, FilmRequest(idea="another", seconds=2), card, owner_key_id=mine)
    assert _count(db, jobs) == 6
    first = _claim(db)
    assert (first.job.root_id, first.job.label) == (film.id, "spot")
    assert claims.complete(db, first, Result(gpu_seconds=3.0))
    with db.read() as tx:
        rows = tx.conn.execute(
            sa.select(usage.c.root_id, usage.c.shot, usage.c.label, usage.c.kind, usage.c.amount)
        ).all()
    assert [tuple(row) for row in rows] == [(film.id, first.job.params["film"]["shot"], "spot", "gpu_seconds", 3.0)]


def test_standing_says_what_is_left(db: Database) -> None:
    limits = KeyLimits(queued_jobs=5, work_per_day=1000, storage_bytes=100)
    mine = create_key(db, "studio", limits=limits)[0].id
    _submit(db, mine, work=400.0, input_bytes=30)
    headers: dict[str, str] = {}
    for allowance in quotas.standing(db, mine, limits):
        headers |= allowance.headers()
    reset = headers.pop("x-ratelimit-reset-work")
    assert reset.endswith("s") and 0 < int(reset[:-1]) <= 86400
    assert headers == {
        "x-ratelimit-limit-jobs": "5",
        "x-ratelimit-remaining-jobs": "4",
        "x-ratelimit-limit-work": "1000",
        "x-ratelimit-remaining-work": "600",
        "x-ratelimit-limit-storage": "100",
        "x-ratelimit-remaining-storage": "70",
    }
    assert quotas.standing(db, mine, KeyLimits()) == []


def test_counting_what_waits_reads_an_index(db: Database) -> None:
    query = quotas.WAITING.params(owner="k")
    with db.read() as tx:
        text = query.compile(tx.conn, compile_kwargs={"literal_binds": True})
        if tx.conn.dialect.name == "sqlite":
            plan = [row[3] for row in tx.conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
        else:
            tx.conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
            plan = [row[0] for row in tx.conn.exec_driver_sql(f"EXPLAIN {text}")]
    assert "ix_jobs_owner_queue" in " ".join(plan), plan
