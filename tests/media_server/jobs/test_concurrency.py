"""Several threads and processes on one database: nothing is given twice, nothing is missed, nobody deadlocks."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from media_server import films
from media_server.errors import JobError
from media_server.jobs import claims, store
from media_server.jobs.database import Database, open_database
from media_server.jobs.events import read_after
from media_server.jobs.spec import ArtifactRecord, Claim, Event, JobSpec, Result
from media_server.jobs.states import TERMINAL, Status
from media_server.jobs.tables import attempts, events, jobs
from media_server.models.card import VideoCard
from media_server.models.registry import publish

# claims with two threads from the start signal until its input ends and the queue is empty, or it has done 30 jobs
WORKER = """
import sys, threading, time
from media_server.jobs import claims
from media_server.jobs.database import open_database
from media_server.jobs.spec import Result

def work(number):
    worker = f"{sys.argv[2]}-{number}"
    while left.acquire(blocking=False):
        is_last_look = is_over.is_set()
        claim = claims.claim_next(db, "video", worker, 60.0)
        if claim is None:
            left.release()
            if is_last_look:
                return
            time.sleep(0.02)
            continue
        assert claims.beat(db, claim, lease_s=60.0, progress=50.0).is_ours
        assert claims.complete(db, claim, Result())
        done.append(claim.job.id)

db = open_database(sys.argv[1])
left, is_over, done = threading.Semaphore(30), threading.Event(), []
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
print("ready", flush=True)
sys.stdin.readline()
for thread in threads: thread.start()
sys.stdin.read()
is_over.set()
for thread in threads: thread.join()
print(*done)
"""


def _run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; re-raise the first error."""
    raised: list[BaseException] = []

    def guard(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guard, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_processes_share_a_queue_without_giving_a_job_twice(database_url: str, db: Database) -> None:
    command = [sys.executable, "-c", WORKER, database_url]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers: list[Any] = [subprocess.Popen([*command, f"p{number}"], **pipes) for number in range(2)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    submitted = []
    # the queue fills while they take from it; neither may do all
    for number in range(40):
        submitted.append(store.submit(db, JobSpec(kind="video", pool="video", owner_key_id=f"k{number % 3}")).id)
    done = []
    for worker in workers:
        out, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        done += out.split()
    assert sorted(done) == sorted(submitted)
    with db.read() as tx:
        taken = Counter(tx.conn.scalars(sa.select(attempts.c.job_id)))
        ended = Counter(tx.conn.scalars(sa.select(events.c.job_id).where(events.c.type == "video.completed")))
    assert taken == ended == Counter(submitted)


def test_two_workers_that_take_over_one_lapsed_job(db: Database) -> None:
    for _ in range(10):
        store.submit(db, JobSpec(kind="video", pool="video", max_attempts=99))
        assert claims.claim_next(db, "video", "dead", 60.0)
        claims.end_leases(db, "dead")
        barrier = threading.Barrier(4, timeout=30)
        won: list[Claim] = []

        def take(barrier: threading.Barrier = barrier, won: list[Claim] = won) -> None:
            barrier.wait()
            claim = claims.claim_next(db, "video", threading.current_thread().name, 60.0)
            if claim is not None:
                won.append(claim)

        _run_threads(*[take] * 4)
        assert [claim.attempt for claim in won] == [2]
        claims.complete(db, won[0], Result())


def test_shots_that_end_together_are_joined_once(db: Database, card: VideoCard) -> None:
    publish(db, card, "w")
    board = {"shots": [{"prompt": "a", "num_frames": 16} for _ in range(4)]}
    for _ in range(4):
        film = films.submit_film(db, films.FilmRequest(idea="a cube", seconds=4), card)
        storyboard = claims.claim_next(db, "text", "t", 60.0)
        assert storyboard is not None
        claims.complete(db, storyboard, Result(result={"storyboard": board}))
        barrier = threading.Barrier(4, timeout=30)

        def shoot(barrier: threading.Barrier = barrier) -> None:
            claim = claims.claim_next(db, "video", threading.current_thread().name, 60.0)
            assert claim is not None
            barrier.wait()
            video = ArtifactRecord("video", f"{claim.job.id}/1/video.mp4", "video/mp4", 1, "00")
            assert claims.complete(db, claim, Result([video]))

        _run_threads(*[shoot] * 4)
        kinds = Counter(child.kind for child in store.list_jobs(db, parent_id=film.id).data)
        assert kinds == {"storyboard": 1, "video": 4, "join": 1}
        join = claims.claim_next(db, "media", "m", 60.0)
        assert join is not None
        claims.complete(db, join, Result())
        assert store.get(db, film.id).status is Status.COMPLETED


@pytest.mark.parametrize("seed", range(2))
def test_many_hands_at_once_end_every_job_once(database_url: str, db: Database, card: VideoCard, seed: int) -> None:
    """Workers, callers, sweeper and readers in threads of two databases; then all is drained and counted."""
    publish(db, card, "w")
    other = open_database(database_url)
    stop = threading.Event()
    roots: list[str] = []
    heard: dict[str, list[Event]] = {}
    board = {"shots": [{"prompt": "a", "num_frames": 16} for _ in range(4)]}

    def work_once(db: Database, rng: random.Random, worker: str, *, is_kind: bool) -> bool:
        pool = rng.choice(["text", "video", "video", "media"])
        claim = claims.claim_next(db, pool, worker, 60.0)
        if claim is None:
            return False
        claims.beat(db, claim, lease_s=60.0, progress=rng.uniform(0, 100))
        dice = 0 if is_kind else rng.randrange(6)
        if dice == 1:
            claims.fail(db, claim, JobError("model_error", "NaN"), retryable=rng.random() < 0.5)
        elif dice == 2:
            claims.release(db, claim)
        elif dice == 3:
            claims.end_leases(db, worker)
        elif claims.beat(db, claim, lease_s=60.0, progress=rng.uniform(0, 100)).cancel_requested:
            claims.confirm_cancel(db, claim)
        else:
            video = ArtifactRecord("video", f"{claim.job.id}/{claim.attempt}/v.mp4", "video/mp4", 1, "00")
            claims.complete(db, claim, Result([video], {"storyboard": board}))
        return True

    def work(db: Database, number: int) -> None:
        rng = random.Random(100 * seed + number)
        while not stop.is_set():
            work_once(db, rng, f"w{number}", is_kind=False)

    def call() -> None:
        rng = random.Random(seed)
        for _ in range(8):
            if rng.random() < 0.7:
                roots.append(films.submit_film(db, films.FilmRequest(idea="a cube", seconds=4), card).id)
            else:
                roots.append(store.submit(db, JobSpec(kind="video", pool="video")).id)
            time.sleep(0.1)
            if rng.random() < 0.3:
                store.request_cancel(db, rng.choice(roots))
            claims.sweep(other, doorbell_s=10.0)
        stop.set()

    def listen() -> None:
        while not stop.is_set():
            for root in list(roots):
                known = heard.setdefault(root, [])
                known += read_after(other, root_id=root, after=known[-1].seq if known else 0, limit=7)

    _run_threads(call, listen, *[lambda db=base, n=n: work(db, n) for n, base in enumerate([db, other, other])])

    rng = random.Random(seed)
    for number in range(3):
        claims.end_leases(db, f"w{number}")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        claims.sweep(db, doorbell_s=10.0)
        work_once(db, rng, "last", is_kind=True)
        with db.read() as tx:
            if not tx.conn.scalar(sa.select(jobs.c.id).where(jobs.c.status.not_in(TERMINAL)).limit(1)):
                break
    with db.read() as tx:
        rows = tx.conn.execute(sa.select(jobs.c.id, jobs.c.kind, jobs.c.status)).all()
        ends = Counter(
            tx.conn.execute(sa.select(events.c.job_id, events.c.type).where(events.c.type.not_like("job.%"))).all()
        )
        assert tx.conn.scalar(sa.select(sa.func.count()).where(attempts.c.outcome == "running")) == 0
    assert ends == {(row.id, f"{row.kind}.{row.status}"): 1 for row in rows}
    assert {row.status for row in rows} <= set(TERMINAL)
    for root, known in heard.items():
        # what was read while others wrote is the beginning of what is there: no event came in behind the reader
        assert known == read_after(db, root_id=root)[: len(known)]
    other.close()
