"""Random interleavings of two workers, a caller and the sweeper, against a model of the life cycle in plain Python.

The model knows what each call must answer, also to a worker that was replaced long ago. After each step the rows
must say what the model says, and each job has one terminal event and one message a receiver, or none.
"""

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from media_server.errors import JobError, NotFound
from media_server.jobs import claims, store
from media_server.jobs.database import open_database
from media_server.jobs.spec import Beat, Claim, JobSpec, Result
from media_server.jobs.states import LEGAL_MOVES, TERMINAL, Status
from media_server.jobs.tables import attempts, events, garbage, jobs, outbox, prompts, webhook_endpoints

LEASE_S = 1000.0
WORKERS = ("w1", "w2")
ERROR = JobError("model_error", "NaN")
# a folder in memory, where there is one: hundreds of databases are made and synced
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class _Model:
    """What one job should be."""

    max_attempts: int
    status: Status = Status.QUEUED
    attempt: int = 0
    counted: int = 0
    worker: str | None = None
    is_lapsed: bool = False
    is_cancelling: bool = False
    is_deleted: bool = False
    winner: int | None = None
    history: list[Status] = field(default_factory=lambda: [Status.QUEUED])

    def move(self, status: Status) -> None:
        assert status in LEGAL_MOVES[self.status]
        self.status = status
        self.history.append(status)
        if status is not Status.IN_PROGRESS:
            self.worker = None
            self.is_lapsed = False

    def holds(self, claim: Claim) -> bool:
        return (self.status, self.attempt, self.worker) == (Status.IN_PROGRESS, claim.attempt, claim.worker)

    @property
    def can_be_claimed(self) -> bool:
        if self.status is Status.QUEUED:
            return True
        return self.is_lapsed and not self.is_cancelling and self.counted < self.max_attempts


class JobsMachine(RuleBasedStateMachine):
    """The store and its workers, one call at a time in any order."""

    migrated_file: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        shutil.copyfile(self.migrated_file, self.folder / "jobs.db")
        self.db = open_database(f"sqlite:///{self.folder / 'jobs.db'}")
        self.model: dict[str, _Model] = {}
        self.claims: list[Claim] = []

    @initialize()
    def add_an_endpoint(self) -> None:
        with self.db.write() as tx:
            tx.conn.execute(
                webhook_endpoints.insert().values(
                    id="whe_1",
                    name="all",
                    url="https://all.example.org",
                    event_types=["*"],
                    secret="whsec_x",
                    is_enabled=True,
                    created_at=0.0,
                    updated_at=0.0,
                )
            )

    def teardown(self) -> None:
        self.db.close()
        shutil.rmtree(self.folder)

    @rule(max_attempts=st.integers(1, 3), priority=st.integers(0, 1))
    def submit(self, max_attempts: int, priority: int) -> None:
        job = store.submit(
            self.db,
            JobSpec(
                kind="video",
                pool="video",
                prompts={"prompt": "canary"},
                priority=priority,
                max_attempts=max_attempts,
                webhook_url="https://one.example.org",
            ),
        )
        self.model[job.id] = _Model(max_attempts)

    @rule(worker=st.sampled_from(WORKERS))
    def claim(self, worker: str) -> None:
        claim = claims.claim_next(self.db, "video", worker, LEASE_S)
        able = {id for id, model in self.model.items() if model.can_be_claimed}
        lapsed = {id for id in able if self.model[id].status is Status.IN_PROGRESS}
        if claim is None:
            assert not able
            return
        assert claim.job.id in (lapsed or able)
        model = self.model[claim.job.id]
        model.move(Status.IN_PROGRESS)
        model.attempt += 1
        model.counted += 1
        model.worker = worker
        model.is_lapsed = False
        assert claim.attempt == model.attempt
        assert claim.job.progress == 0.0
        self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), progress=st.floats(0, 100))
    def beat(self, data: st.DataObject, progress: float) -> None:
        claim, model = self._draw(data)
        expected = Beat(model.holds(claim), model.holds(claim) and model.is_cancelling)
        assert claims.beat(self.db, claim, lease_s=LEASE_S, progress=progress) == expected
        if expected.is_ours:
            model.is_lapsed = False

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        claim, model = self._draw(data)
        is_ours = model.holds(claim)
        assert claims.complete(self.db, claim, Result()) is is_ours
        if is_ours:
            model.winner = claim.attempt
            model.move(Status.COMPLETED)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), retryable=st.booleans())
    def fail(self, data: st.DataObject, retryable: bool) -> None:
        claim, model = self._draw(data)
        is_ours = model.holds(claim)
        assert claims.fail(self.db, claim, ERROR, retryable=retryable) is is_ours
        if is_ours and model.is_cancelling:
            model.move(Status.CANCELLED)
        elif is_ours:
            has_more = retryable and model.counted < model.max_attempts
            model.move(Status.QUEUED if has_more else Status.FAILED)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim, model = self._draw(data)
        is_ours = model.holds(claim)
        assert claims.release(self.db, claim) is is_ours
        if is_ours and model.is_cancelling:
            model.move(Status.CANCELLED)
        elif is_ours:
            model.counted -= 1
            model.move(Status.QUEUED)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def confirm_cancel(self, data: st.DataObject) -> None:
        claim, model = self._draw(data)
        is_ours = model.holds(claim) and model.is_cancelling
        assert claims.confirm_cancel(self.db, claim) is is_ours
        if is_ours:
            model.move(Status.CANCELLED)

    @rule(worker=st.sampled_from(WORKERS))
    def kill(self, worker: str) -> None:
        held = [model for model in self.model.values() if model.worker == worker]
        assert claims.end_leases(self.db, worker) == len(held)
        for model in held:
            model.is_lapsed = True

    @precondition(lambda self: self.model)
    @rule(data=st.data(), is_delete=st.booleans())
    def cancel(self, data: st.DataObject, is_delete: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))
        model = self.model[id]
        call: Any = store.delete if is_delete else store.request_cancel
        if model.is_deleted:
            with pytest.raises(NotFound):
                call(self.db, id)
            return
        call(self.db, id)
        model.is_deleted = is_delete
        if model.status is Status.QUEUED:
            model.move(Status.CANCELLED)
        elif model.status is Status.IN_PROGRESS:
            model.is_cancelling = True

    @rule()
    def sweep(self) -> None:
        report = claims.sweep(self.db, doorbell_s=1e9)
        lapsed = {id: model for id, model in self.model.items() if model.is_lapsed}
        cancelled = {id for id, model in lapsed.items() if model.is_cancelling}
        lost = {id for id, model in lapsed.items() if model.counted >= model.max_attempts} - cancelled
        assert (set(report.cancelled), set(report.lost)) == (cancelled, lost)
        for id in cancelled:
            self.model[id].move(Status.CANCELLED)
        for id in lost:
            self.model[id].move(Status.FAILED)

    @invariant()
    def the_rows_say_what_the_model_says(self) -> None:
        with self.db.read() as tx:
            rows = {row.id: row for row in tx.conn.execute(sa.select(jobs))}
            log = tx.conn.execute(sa.select(events).order_by(events.c.seq)).all()
            sent = tx.conn.execute(sa.select(outbox.c.job_id, outbox.c.endpoint_id, outbox.c.type)).all()
            running = Counter(tx.conn.scalars(sa.select(attempts.c.job_id).where(attempts.c.outcome == "running")))
            words = set(tx.conn.scalars(sa.select(prompts.c.job_id)))
            prefixes = set(tx.conn.scalars(sa.select(garbage.c.prefix)))
        assert set(rows) == set(self.model)
        for id, model in self.model.items():
            row = rows[id]
            assert (row.status, row.attempt, row.winning_attempt) == (model.status, model.attempt, model.winner)
            assert row.attempt - row.uncounted == model.counted
            assert (row.lease_owner, row.lease_until is None) == (model.worker, model.worker is None)
            assert running[id] == (1 if model.status is Status.IN_PROGRESS else 0)
            is_ended = model.status in TERMINAL
            ends = [event.type for event in log if event.job_id == id and event.type.startswith("video.")]
            assert ends == ([f"video.{model.status}"] if is_ended else [])
            receivers = [(message.endpoint_id, message.type) for message in sent if message.job_id == id]
            wanted = [(None, f"video.{model.status}"), ("whe_1", f"video.{model.status}")] if is_ended else []
            assert sorted(receivers, key=str) == sorted(wanted, key=str)
            # files: a deleted job's all, an ended job's but the winner's, while it runs none
            gone = {prefix for prefix in prefixes if prefix.startswith(f"{id}/")}
            losers = {f"{id}/{attempt}/" for attempt in range(1, model.attempt + 1)} - {f"{id}/{model.winner}/"}
            assert gone - {f"{id}/"} <= losers
            if is_ended:
                assert (id in words) is not model.is_deleted
                assert f"{id}/" in gone if model.is_deleted else gone == losers
            else:
                assert not gone
        seen: dict[tuple[str, int], float] = {}
        for event in log:
            if event.type == "job.progress" and event.data:
                key = (event.job_id, event.attempt)
                assert event.data["progress"] >= seen.get(key, 0.0)
                seen[key] = event.data["progress"]

    def _draw(self, data: st.DataObject) -> tuple[Claim, _Model]:
        """Choose the last claim, or any that was ever given."""
        is_last = data.draw(st.sampled_from([True, True, False]))
        claim = self.claims[-1] if is_last else data.draw(st.sampled_from(self.claims))
        return claim, self.model[claim.job.id]


@pytest.mark.timeout(300)
def test_any_interleaving_keeps_the_invariants(migrated_file: Path) -> None:
    JobsMachine.migrated_file = migrated_file
    run_state_machine_as_test(
        JobsMachine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
