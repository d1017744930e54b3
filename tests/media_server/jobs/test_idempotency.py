"""Idempotency keys in the store: held by one, bound with what they make, kept for a day, spent after a delete."""

import threading
from collections import Counter
from dataclasses import replace

import pytest
import sqlalchemy as sa

from media_server.errors import Conflict, Unprocessable
from media_server.jobs import idempotency, store
from media_server.jobs.database import Database
from media_server.jobs.idempotency import HeldKey, KeptAnswer, KeyedRequest, StillAccepting, hold
from media_server.jobs.spec import Job, JobSpec
from media_server.jobs.tables import idempotency_keys, jobs

ASKED = KeyedRequest(owner_key_id=None, key="k1", request_sha256="a" * 64)


def _held(db: Database, request: KeyedRequest = ASKED) -> HeldKey:
    held = hold(db, request, 200)
    assert isinstance(held, HeldKey)
    return held


def _submit(db: Database, held: HeldKey) -> Job:
    return store.submit(db, JobSpec(kind="video", pool="video", idempotency_key=held))


def _count(db: Database, table: sa.Table) -> int:
    with db.read() as tx:
        return tx.conn.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def _let_lapse(db: Database) -> None:
    with db.write() as tx:
        tx.conn.execute(idempotency_keys.update().values(expires_at=tx.now()))


def test_the_same_request_gets_the_same_answer_and_another_is_refused(db: Database) -> None:
    held = _held(db)
    with pytest.raises(StillAccepting) as early:
        hold(db, ASKED, 200)
    assert (early.value.status, early.value.headers()) == (409, {"retry-after": "1", "x-should-retry": "true"})
    job = _submit(db, held)
    # between the commit and the answer: the job is found, its answer is not
    assert hold(db, ASKED, 200) == KeptAnswer(job.id, 200, None)
    idempotency.keep_answer(db, held, '{"id": 1}')
    assert hold(db, ASKED, 200) == KeptAnswer(job.id, 200, '{"id": 1}')
    with pytest.raises(Unprocessable, match="another request"):
        hold(db, replace(ASKED, request_sha256="b" * 64), 200)
    assert _count(db, jobs) == 1


def test_keys_are_their_callers(db: Database) -> None:
    mine = _submit(db, _held(db))
    theirs = replace(ASKED, owner_key_id="key_b", request_sha256="b" * 64)
    _submit(db, _held(db, theirs))
    kept = hold(db, ASKED, 200)
    assert isinstance(kept, KeptAnswer) and kept.made_id == mine.id


def test_a_refused_request_leaves_its_key_free(db: Database) -> None:
    idempotency.let_go(db, _held(db))
    better = replace(ASKED, request_sha256="b" * 64)
    held = _held(db, better)
    _submit(db, held)
    # what is bound is not let go
    idempotency.let_go(db, held)
    assert isinstance(hold(db, better, 200), KeptAnswer)


def test_a_holder_that_died_lets_go_and_one_that_was_slow_makes_nothing(db: Database) -> None:
    slow = _held(db)
    idempotency.renew(db, slow)
    with pytest.raises(StillAccepting):
        hold(db, ASKED, 200)
    _let_lapse(db)
    second = _held(db)
    with pytest.raises(StillAccepting, match="took too long"):
        _submit(db, slow)
    assert _count(db, jobs) == 0
    idempotency.let_go(db, slow)
    idempotency.keep_answer(db, slow, "{}")
    job = _submit(db, second)
    assert hold(db, ASKED, 200) == KeptAnswer(job.id, 200, None)


def test_a_lapsed_key_that_nobody_took_may_still_be_bound(db: Database) -> None:
    held = _held(db)
    _let_lapse(db)
    job = _submit(db, held)
    assert hold(db, ASKED, 200) == KeptAnswer(job.id, 200, None)


def test_a_key_is_kept_for_a_day_and_then_forgotten(db: Database) -> None:
    _submit(db, _held(db))
    with db.read() as tx:
        row = tx.conn.execute(sa.select(idempotency_keys)).one()
        assert 86390 < row.expires_at - tx.now() <= 86400
    assert idempotency.forget_expired(db) == 0
    _let_lapse(db)
    assert idempotency.forget_expired(db) == 1
    assert isinstance(hold(db, ASKED, 200), HeldKey)


def test_what_a_key_made_is_not_made_again_after_it_was_deleted(db: Database) -> None:
    held = _held(db)
    job = _submit(db, held)
    idempotency.keep_answer(db, held, '{"prompt": "canary"}')
    store.delete(db, job.id)
    with pytest.raises(Conflict, match="deleted") as spent:
        hold(db, ASKED, 200)
    assert spent.value.code == "idempotency_key_spent"
    # an answer that comes late is not written down any more
    idempotency.keep_answer(db, held, '{"prompt": "canary"}')
    with db.read() as tx:
        row = tx.conn.execute(sa.select(idempotency_keys)).one()
    assert (row.request_sha256, row.response) == ("", None)


def test_of_many_at_once_one_makes_a_job(db: Database) -> None:
    outcomes: Counter[str] = Counter()
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        try:
            found = hold(db, ASKED, 200)
            if isinstance(found, HeldKey):
                _submit(db, found)
            outcomes[type(found).__name__] += 1
        except StillAccepting:
            outcomes["StillAccepting"] += 1

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes["HeldKey"] == 1
    assert sum(outcomes.values()) == 8
    assert _count(db, jobs) == 1
