"""A pool worker as a real process with a real Valkey: doorbells, lost doorbells, faults of a handler, drain."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from media_server.artifacts.store import open_artifacts
from media_server.jobs import store
from media_server.jobs.claims import release
from media_server.jobs.database import Database
from media_server.jobs.doorbell import make_celery, ring
from media_server.jobs.spec import Claim, Job, JobSpec
from media_server.jobs.states import Status
from media_server.settings import Settings, child_environment
from tests.fresh_database import open_migrated
from workers.pool_worker import PoolContext, drain_pool
from workers.valkey import is_answering, valkey_command, wait_until_answering

# much less than a poll, which comes after ten minutes, and much more than a busy machine takes
LIMIT_S = 120.0
PROGRAM = Path(__file__).with_name("pool_program.py")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    # no poll within a test: what happens happens by a doorbell
    return Settings(data_dir=tmp_path, doorbell_s=600.0)


@pytest.fixture
def db(settings: Settings) -> Iterator[Database]:
    db = open_migrated(settings.database, ring=partial(ring, make_celery(settings)))
    yield db
    db.close()


@contextmanager
def valkey(settings: Settings) -> Iterator["subprocess.Popen[bytes]"]:
    settings.valkey_socket.unlink(missing_ok=True)
    process = subprocess.Popen(valkey_command(settings))
    try:
        assert wait_until_answering(settings.redis_url, LIMIT_S)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def worker(settings: Settings) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, str(PROGRAM)], env=child_environment(settings))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def submit(db: Database, **params: Any) -> str:
    return store.submit(db, JobSpec(kind="video", pool="test", params=params, max_attempts=2)).id


def wait_for(db: Database, job_id: str, is_there: Callable[[Job], bool], limit_s: float = LIMIT_S) -> Job:
    deadline = time.monotonic() + limit_s
    while not is_there(job := store.get(db, job_id)):
        assert time.monotonic() < deadline, f"still {job.status} after {limit_s} s"
        time.sleep(0.02)
    return job


def ended(job: Job) -> bool:
    return job.status.is_terminal


def test_doorbells_faults_a_restarted_broker_and_the_drain(settings: Settings, db: Database) -> None:
    with valkey(settings) as broker, worker(settings) as process:
        waiting_at_start = submit(db, do="finish")
        assert wait_for(db, waiting_at_start, ended).status is Status.COMPLETED
        # a doorbell wakes: no poll is due for ten minutes
        job = wait_for(db, submit(db, do="finish"), ended)
        assert job.status is Status.COMPLETED
        assert job.result == {"worker": job.result and job.result["worker"]}
        assert job.result and str(job.result["worker"]).endswith(f":{process.pid}")

        # a fault of the handler costs the attempt, then the job, never the worker
        raised = wait_for(db, submit(db, do="raise"), ended)
        assert (raised.status, raised.error_code, raised.attempt) == (Status.FAILED, "internal_error", 2)
        assert wait_for(db, submit(db, do="fail"), ended).error_code == "model_error"

        # the broker dies and comes back empty: the worker hears doorbells again
        broker.kill()
        broker.wait()
        assert not is_answering(settings.redis_url)
        lost = submit(db, do="finish")
        with valkey(settings):
            deadline = time.monotonic() + LIMIT_S
            while store.get(db, lost).status is Status.QUEUED and time.monotonic() < deadline:
                ring(make_celery(settings), "test")
                time.sleep(0.25)
            assert wait_for(db, lost, ended).status is Status.COMPLETED

            # SIGTERM: the job is given back, the attempt does not count, the process ends by itself
            held = submit(db, do="wait")
            wait_for(db, held, lambda job: job.status is Status.IN_PROGRESS)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
            job = store.get(db, held)
            assert (job.status, job.attempt, job.uncounted) == (Status.QUEUED, 1, 1)


def test_without_a_broker_jobs_are_found_by_looking(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, doorbell_s=0.3)
    db = open_migrated(settings.database)
    with worker(settings):
        for _ in range(2):
            assert wait_for(db, submit(db, do="finish"), ended).status is Status.COMPLETED
    db.close()


class WatchedSlots(threading.Semaphore):
    """Slots that say when somebody waits for one."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.is_waited_for = threading.Event()

    def __enter__(self, blocking: bool = True, timeout: float | None = None, /) -> bool:
        if self.acquire(blocking=False):
            return True
        self.is_waited_for.set()
        return self.acquire(blocking, timeout)


def test_who_waited_for_a_slot_claims_nothing_once_the_worker_stops(settings: Settings, db: Database) -> None:
    context = PoolContext(
        settings=settings,
        db=db,
        artifacts=open_artifacts(settings),
        celery=make_celery(settings),
        stopping=threading.Event(),
        pool="test",
        worker="tester@test:1",
    )
    has_begun = threading.Event()

    def give_back(context: PoolContext, claim: Claim) -> None:
        has_begun.set()
        assert context.stopping.wait(LIMIT_S)
        release(context.db, claim)

    job_id = store.submit(db, JobSpec(kind="video", pool="test")).id
    slots = WatchedSlots(1)
    threads = [threading.Thread(target=drain_pool, args=(context, slots, give_back)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(LIMIT_S) and slots.is_waited_for.wait(LIMIT_S)
    context.stopping.set()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    job = store.get(db, job_id)
    assert (job.status, job.attempt) == (Status.QUEUED, 1)
