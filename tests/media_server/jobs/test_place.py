"""The wait of a job: what runs, what is taken before it, and who shares the work."""

import random
from typing import Any

import pytest

from media_server.jobs import claims, place, store
from media_server.jobs.database import Database
from media_server.jobs.place import live_workers, place_of_next
from media_server.jobs.spec import JobSpec
from media_server.models.card import VideoCard
from media_server.models.registry import publish


def _submit(db: Database, seconds: float | None, **members: Any) -> str:
    return store.submit(db, JobSpec(kind="video", pool="video", predicted_gpu_seconds=seconds, **members)).id


def _wait(db: Database, id: str) -> float | None:
    found = store.find_place(db, id)
    assert found is not None
    return found.wait_s


def test_an_owners_jobs_wait_for_those_before_them(db: Database) -> None:
    first, second = _submit(db, 10.0), _submit(db, 20.0)
    urgent = _submit(db, 5.0, priority=1)
    assert [_wait(db, id) for id in (urgent, first, second)] == [0.0, 5.0, 15.0]
    with db.read() as tx:
        mine = place_of_next(tx, "video", None, 0)
        assert (mine.ahead, mine.waiting, mine.wait_s) == (3, 3, 35.0)
        assert place_of_next(tx, "video", None, 1).wait_s == 5.0
        assert place_of_next(tx, "other", None, 0).wait_s == 0.0


def test_a_place_is_the_same_by_either_way_of_counting(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    ids = [
        _submit(db, rng.choice((None, 0.25, 1.5, 8.0)), priority=rng.choice((0, 0, 3)), owner_key_id=rng.choice("ab"))
        for _ in range(60)
    ]
    for _ in range(9):
        claim = claims.claim_next(db, "video", "w", 60.0)
        assert claim is not None
        # what is left does not pass with the time of this test
        claims.beat(db, claim, lease_s=60.0, stage="denoise", eta_s=3.0)
    monkeypatch.setattr(place, "_SHORT", 1000)
    by_counting = [store.find_place(db, id) for id in ids]
    monkeypatch.setattr(place, "_SHORT", -1)
    for id, expected in zip(ids, by_counting, strict=True):
        found = store.find_place(db, id)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert (found.ahead, found.waiting) == (expected.ahead, expected.waiting)
            assert found.wait_s == pytest.approx(expected.wait_s)


def test_running_jobs_say_what_is_left(db: Database) -> None:
    _submit(db, 100.0)
    waiting = _submit(db, 1.0)
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    # nothing said yet: what was predicted, less the moment since
    assert _wait(db, waiting) == pytest.approx(100.0, abs=5.0)
    claims.beat(db, claim, lease_s=20.0, stage="denoise", eta_s=30.0)
    assert _wait(db, waiting) == 30.0


def test_living_workers_share_the_wait(db: Database, card: VideoCard) -> None:
    with db.read() as tx:
        assert live_workers(tx, "video") == 1
    for worker in ("w1", "w2", "w3"):
        publish(db, card, worker)
    _submit(db, 60.0)
    assert _wait(db, _submit(db, 1.0)) == 20.0
    with db.write() as tx:
        tx.conn.exec_driver_sql("UPDATE models SET seen_at = seen_at - 60 WHERE worker = 'w3'")
    with db.read() as tx:
        assert live_workers(tx, "video") == 2


def test_owners_take_turns(db: Database) -> None:
    """A greedy owner's queue delays another one by a job, not by the queue."""
    for _ in range(20):
        _submit(db, 10.0, owner_key_id="greedy")
    assert _wait(db, _submit(db, 1.0, owner_key_id="other")) == 10.0
    with db.read() as tx:
        assert place_of_next(tx, "video", "greedy", 0).wait_s == pytest.approx(201.0)


def test_jobs_of_which_nothing_is_known_count_as_the_mean(db: Database) -> None:
    first = _submit(db, None)
    second = _submit(db, None)
    assert (_wait(db, first), _wait(db, second)) == (0.0, None)
    _submit(db, 8.0)
    assert _wait(db, second) == 8.0
