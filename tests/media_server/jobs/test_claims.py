"""Claims, leases, attempts and their ends, one worker at a time."""

import dataclasses

import pytest
import sqlalchemy as sa

from media_server.errors import JobError
from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.events import read_after
from media_server.jobs.spec import ArtifactRecord, Beat, Claim, Job, JobSpec, Result, SweepReport, UsageRecord
from media_server.jobs.states import Status
from media_server.jobs.tables import attempts, garbage, jobs, usage

LEASE_S = 20.0


def _submit(db: Database, owner: str | None = None, priority: int = 0, **members: object) -> Job:
    spec = JobSpec(kind="video", pool="video", owner_key_id=owner, priority=priority, prompts={"prompt": "a cube"})
    return store.submit(db, dataclasses.replace(spec, **members))  # type: ignore[arg-type]


def _claim(db: Database, worker: str = "w1", pool: str = "video") -> Claim:
    claim = claims.claim_next(db, pool, worker, LEASE_S)
    assert claim is not None
    return claim


def _outcomes(db: Database, job_id: str) -> list[str]:
    query = sa.select(attempts.c.outcome).where(attempts.c.job_id == job_id).order_by(attempts.c.attempt)
    with db.read() as tx:
        return list(tx.conn.scalars(query))


def _types(db: Database, job_id: str) -> list[str]:
    return [event.type for event in read_after(db, job_id=job_id)]


def test_a_claim_takes_the_job_with_its_prompts(db: Database) -> None:
    assert claims.claim_next(db, "video", "w1", LEASE_S) is None
    submitted = _submit(db)
    assert claims.claim_next(db, "text", "w1", LEASE_S) is None
    claim = _claim(db)
    assert claim.job.id == submitted.id
    assert claim.job.prompts == {"prompt": "a cube"}
    assert (claim.job.status, claim.attempt, claim.job.lease_owner) == (Status.IN_PROGRESS, 1, "w1")
    assert claim.job.lease_until == pytest.approx(claim.job.started_at + LEASE_S)  # type: ignore[operator]
    assert claims.claim_next(db, "video", "w2", LEASE_S) is None
    assert _types(db, submitted.id) == ["job.queued", "job.started"]


def test_owners_take_turns_and_priority_counts_within_one(db: Database) -> None:
    a = [_submit(db, "a", priority) for priority in (0, 0, 5, 0)]
    b = [_submit(db, "b") for _ in range(2)]
    c = [_submit(db, None)]
    taken = [_claim(db).job.id for _ in range(7)]
    # nobody was served yet: by name, the job without a key first; a's urgent one before its older ones
    assert taken == [c[0].id, a[2].id, b[0].id, a[0].id, b[1].id, a[1].id, a[3].id]


def test_a_full_queue_delays_another_owner_by_one_job(db: Database) -> None:
    for _ in range(20):
        _submit(db, "busy")
    for _ in range(5):
        _claim(db)
    newcomer = _submit(db, "new")
    assert newcomer.id in [_claim(db).job.id for _ in range(2)]
    again = _submit(db, "new")
    assert again.id in [_claim(db).job.id for _ in range(2)]


def test_a_lapsed_lease_goes_to_the_next_worker_and_the_first_one_loses(db: Database) -> None:
    job = _submit(db)
    first = _claim(db, "w1")
    assert claims.end_leases(db, "w1") == 1
    assert claims.end_leases(db, "nobody") == 0
    second = _claim(db, "w2")
    assert (second.job.id, second.attempt) == (job.id, 2)
    assert claims.beat(db, first, lease_s=LEASE_S, progress=50) == Beat(False, False)
    assert not claims.complete(db, first, Result())
    assert not claims.fail(db, first, JobError("model_error", "late"))
    assert not claims.release(db, first)
    assert not claims.confirm_cancel(db, first)
    assert not claims.save_checkpoint(db, first, 0, "k", {})
    assert claims.complete(db, second, Result())
    assert not claims.complete(db, second, Result())
    assert store.get(db, job.id).winning_attempt == 2
    assert _outcomes(db, job.id) == ["lost", "completed"]
    assert _types(db, job.id) == ["job.queued", "job.started", "job.attempt", "video.completed"]
    # the loser's files have nobody who owns them
    with db.write() as tx:
        tx.conn.execute(sa.text("UPDATE garbage SET due_at = 0"))
    assert store.due_garbage(db) == [f"{job.id}/1/"]
    store.forget_garbage(db, f"{job.id}/1/")
    assert store.due_garbage(db) == []


def test_a_lapsed_worker_that_nobody_replaced_may_still_finish(db: Database) -> None:
    job = _submit(db)
    claim = _claim(db)
    claims.end_leases(db, "w1")
    assert claims.beat(db, claim, lease_s=LEASE_S).is_ours
    assert claims.claim_next(db, "video", "w2", LEASE_S) is None
    assert claims.complete(db, claim, Result())
    assert store.get(db, job.id).status is Status.COMPLETED


def test_progress_never_goes_backwards_within_an_attempt(db: Database) -> None:
    job = _submit(db)
    claim = _claim(db)
    for progress in (10.0, 40.0, 30.0, 250.0, 99.0):
        claims.beat(db, claim, lease_s=LEASE_S, stage="denoise", step=1, total_steps=8, progress=progress)
    reported = [event.data["progress"] for event in read_after(db, job_id=job.id) if event.type == "job.progress"]
    assert reported == [10.0, 40.0, 40.0, 100.0, 100.0]
    claims.end_leases(db, "w1")
    assert _claim(db).job.progress == 0.0


def test_a_bare_heartbeat_is_no_event(db: Database) -> None:
    job = _submit(db)
    claim = _claim(db)
    before = store.get(db, job.id).lease_until
    assert claims.beat(db, claim, lease_s=2 * LEASE_S) == Beat(True, False)
    after = store.get(db, job.id).lease_until
    assert before is not None
    assert after is not None
    assert after > before + LEASE_S - 1
    claims.beat(db, claim, lease_s=LEASE_S, data={"text": "so far"})
    assert [event.data for event in read_after(db, job_id=job.id)][2:] == [{"progress": 0.0, "text": "so far"}]


def test_completion_publishes_files_usage_and_result(db: Database) -> None:
    job = _submit(db, "owner", label="spot", model="tiny-wan", retention_s=60.0)
    claim = _claim(db)
    claims.beat(db, claim, lease_s=LEASE_S, stage="denoise", step=7, total_steps=8, progress=87.5)
    video = ArtifactRecord("video", f"{job.id}/1/video.mp4", "video/mp4", 7, "ab")
    result = Result([video], {"fps": 16}, 2.5, 1 << 40, [UsageRecord("frames", 33)])
    assert claims.complete(db, claim, result)
    done = store.get(db, job.id)
    assert (done.status, done.progress, done.result, done.gpu_seconds) == (Status.COMPLETED, 100.0, {"fps": 16}, 2.5)
    assert (done.stage, done.step, done.total_steps) == (None, None, None)
    assert done.peak_memory_bytes == 1 << 40
    assert done.completed_at is not None
    assert done.expires_at == pytest.approx(done.completed_at + 60.0)
    assert store.artifacts_of(db, job.id) == [video]
    with db.read() as tx:
        rows = tx.conn.execute(sa.select(usage.c.owner_key_id, usage.c.label, usage.c.kind, usage.c.amount)).all()
    assert sorted(tuple(row) for row in rows) == [
        ("owner", "spot", "frames", 33),
        ("owner", "spot", "gpu_seconds", 2.5),
        ("owner", "spot", "storage_bytes", 7),
    ]


def test_a_retryable_failure_is_tried_again_until_the_attempts_are_used(db: Database, rings: list[str]) -> None:
    job = _submit(db, max_attempts=2)
    error = JobError("worker_crashed", "The GPU program ended.")
    assert claims.fail(db, _claim(db), error, retryable=True)
    assert store.get(db, job.id).status is Status.QUEUED
    assert rings == ["video", "video"]
    assert claims.fail(db, _claim(db), error, retryable=True)
    failed = store.get(db, job.id)
    assert (failed.status, failed.error_code, failed.error_message) == (Status.FAILED, error.code, error.message)
    assert _outcomes(db, job.id) == ["failed", "failed"]
    assert _types(db, job.id)[-1] == "video.failed"


def test_a_retry_that_waits_is_out_of_reach_until_then(db: Database, rings: list[str]) -> None:
    waiting, other = _submit(db), _submit(db)
    engine = JobError("engine_unavailable", "It starts again.")
    claim = _claim(db)
    assert claim.job.id == waiting.id
    rings.clear()
    # by its code it waits some seconds
    assert claims.fail(db, claim, engine, retryable=True)
    assert rings == []
    assert _claim(db).job.id == other.id
    assert claims.claim_next(db, "video", "w1", LEASE_S) is None
    assert claims.sweep(db, doorbell_s=0).rung == []
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == waiting.id).values(not_before=tx.now() - 1))
    assert claims.sweep(db, doorbell_s=60).rung == ["video"]
    again = _claim(db)
    assert (again.job.id, again.job.not_before) == (waiting.id, None)
    assert claims.fail(db, again, engine, retryable=True, retry_in_s=0.0)
    assert _claim(db).job.id == waiting.id


def test_every_attempts_gpu_seconds_are_counted(db: Database) -> None:
    job = _submit(db)
    crash = JobError("worker_crashed", "The GPU program ended.")
    assert claims.fail(db, _claim(db), crash, retryable=True, gpu_seconds=2.0)
    assert claims.release(db, _claim(db), gpu_seconds=0.5)
    assert store.get(db, job.id).gpu_seconds == 2.5
    assert claims.complete(db, _claim(db), Result(gpu_seconds=4.0))
    assert store.get(db, job.id).gpu_seconds == 6.5
    cancelled = _submit(db)
    claim = _claim(db)
    store.request_cancel(db, cancelled.id)
    assert claims.confirm_cancel(db, claim, gpu_seconds=1.0)
    assert store.get(db, cancelled.id).gpu_seconds == 1.0
    with db.read() as tx:
        ledger = tx.conn.execute(sa.select(usage.c.kind, sa.func.sum(usage.c.amount)).group_by(usage.c.kind)).all()
        spent = tx.conn.scalars(sa.select(attempts.c.gpu_seconds).where(attempts.c.job_id == job.id)).all()
    assert [tuple(row) for row in ledger] == [("gpu_seconds", 7.5)]
    assert sorted(spent) == [0.5, 2.0, 4.0]


def test_a_released_attempt_is_not_counted_and_its_number_is_not_given_again(db: Database) -> None:
    job = _submit(db, max_attempts=1)
    for attempt in (1, 2, 3):
        claim = _claim(db)
        assert claim.attempt == attempt
        assert claims.release(db, claim)
    last = _claim(db)
    assert last.attempt == 4
    assert claims.complete(db, last, Result())
    assert _outcomes(db, job.id) == ["released", "released", "released", "completed"]


def test_the_sweep_fails_what_nobody_may_take_again(db: Database, rings: list[str]) -> None:
    job = _submit(db, max_attempts=2)
    for _ in range(2):
        _claim(db)
        assert claims.sweep(db, doorbell_s=100).lost == []
        claims.end_leases(db, "w1")
    assert claims.claim_next(db, "video", "w2", LEASE_S) is None
    assert claims.sweep(db, doorbell_s=100) == SweepReport(lost=[job.id], cancelled=[], rung=[])
    lost = store.get(db, job.id)
    assert (lost.status, lost.error_code) == (Status.FAILED, "worker_lost")
    assert claims.sweep(db, doorbell_s=0).rung == []
    assert _outcomes(db, job.id) == ["lost", "lost"]


def test_the_sweep_rings_for_what_waits_too_long(db: Database, rings: list[str]) -> None:
    _submit(db)
    rings.clear()
    assert claims.sweep(db, doorbell_s=60).rung == []
    with db.write() as tx:
        tx.conn.execute(jobs.update().values(doorbell_at=jobs.c.doorbell_at - 61))
    assert claims.sweep(db, doorbell_s=60).rung == ["video"]
    assert claims.sweep(db, doorbell_s=60).rung == []
    assert rings == ["video"]
    # the lapsed lease of a dead worker rings as well
    _claim(db)
    with db.write() as tx:
        tx.conn.execute(jobs.update().values(doorbell_at=0.0, lease_until=0.0))
    assert claims.sweep(db, doorbell_s=60).rung == ["video"]


def test_a_waiting_job_is_cancelled_at_once(db: Database) -> None:
    job = _submit(db)
    assert store.request_cancel(db, job.id).status is Status.CANCELLED
    assert claims.claim_next(db, "video", "w1", LEASE_S) is None
    assert store.request_cancel(db, job.id).status is Status.CANCELLED
    assert _types(db, job.id) == ["job.queued", "video.cancelled"]


@pytest.mark.parametrize("end", ["confirm", "fail", "retry", "release", "lapse"])
def test_a_running_job_is_cancelled_when_it_has_stopped(db: Database, end: str) -> None:
    job = _submit(db)
    claim = _claim(db)
    assert not claims.confirm_cancel(db, claim), "nobody has asked"
    asked = store.request_cancel(db, job.id)
    assert asked.status is Status.IN_PROGRESS
    store.request_cancel(db, job.id)
    assert claims.beat(db, claim, lease_s=LEASE_S).cancel_requested
    error = JobError("worker_crashed", "killed")
    match end:
        case "confirm":
            assert claims.confirm_cancel(db, claim)
        case "fail":
            assert claims.fail(db, claim, error)
        case "retry":
            assert claims.fail(db, claim, error, retryable=True)
        case "release":
            assert claims.release(db, claim)
        case "lapse":
            claims.end_leases(db, "w1")
            assert claims.claim_next(db, "video", "w2", LEASE_S) is None
            assert claims.sweep(db, doorbell_s=60).cancelled == [job.id]
    assert store.get(db, job.id).status is Status.CANCELLED
    expected = ["job.queued", "job.started", "job.cancel_requested", "video.cancelled"]
    assert _types(db, job.id) == expected


def test_work_that_is_done_before_it_hears_of_the_cancel_is_kept(db: Database) -> None:
    job = _submit(db)
    claim = _claim(db)
    store.request_cancel(db, job.id)
    assert claims.complete(db, claim, Result())
    assert store.get(db, job.id).status is Status.COMPLETED


def test_checkpoints_outlive_their_attempt(db: Database) -> None:
    job = _submit(db)
    first = _claim(db)
    assert claims.save_checkpoint(db, first, 0, f"{job.id}/1/segment_0.npz", {"frames": 57})
    assert claims.save_checkpoint(db, first, 1, f"{job.id}/1/segment_1.npz", {"frames": 57})
    claims.end_leases(db, "w1")
    second = _claim(db)
    assert claims.save_checkpoint(db, second, 1, f"{job.id}/2/segment_1.npz", {"frames": 56})
    kept = [(point.sequence, point.attempt, point.key, point.data) for point in claims.checkpoints(db, job.id)]
    assert kept == [
        (0, 1, f"{job.id}/1/segment_0.npz", {"frames": 57}),
        (1, 2, f"{job.id}/2/segment_1.npz", {"frames": 56}),
    ]
    # while it runs, an earlier attempt's files are needed
    assert _garbage(db) == set()
    # whoever ends it, its parts go; by the sweeper too, where no worker is left to remove them
    store.request_cancel(db, job.id)
    claims.end_leases(db, "w1")
    assert claims.sweep(db, doorbell_s=60).cancelled == [job.id]
    assert f"{job.id}/segments/" in _garbage(db)


def _garbage(db: Database) -> set[str]:
    with db.read() as tx:
        return set(tx.conn.scalars(sa.select(garbage.c.prefix)))
