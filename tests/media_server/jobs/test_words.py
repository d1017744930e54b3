"""Jobs that keep no words: what goes with their end, what goes once the answer was had, and no page that keeps it."""

from pathlib import Path
from typing import Any

import pytest

from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.errors import JobError
from media_server.films import FilmRequest, submit_film
from media_server.jobs import claims, store, words
from media_server.jobs.database import Database
from media_server.jobs.spec import ArtifactRecord, Claim, JobSpec, Result
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs
from media_server.models.card import VideoCard
from media_server.models.registry import publish
from media_server.settings import Settings
from workers.sweeper import sweep_once

CANARY = "canary-7f3a91"
BOARD: dict[str, Any] = {
    "v": 1,
    "title": f"The {CANARY}",
    "shots": [{"index": index, "prompt": f"a red {CANARY}", "num_frames": 16} for index in range(2)],
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0")


@pytest.fixture
def artifacts(settings: Settings) -> ArtifactStore:
    return open_artifacts(settings)


def claim(db: Database, pool: str) -> Claim:
    found = claims.claim_next(db, pool, "w", 20.0)
    assert found is not None
    return found


def has_canary(settings: Settings) -> list[str]:
    """Name the files that hold the canary: the database's, where it is SQLite's, and artifacts."""
    files = (path for path in settings.data_dir.rglob("*") if path.is_file())
    return [path.name for path in files if CANARY.encode() in path.read_bytes()]


def pass_time(db: Database) -> None:
    """Let the time of every answer be over."""
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.words_until.is_not(None)).values(words_until=tx.now() - 1))


def forget(settings: Settings, db: Database, artifacts: ArtifactStore) -> None:
    """Do as a round of the sweeper."""
    forgotten = words.forget_due(db)
    sweep_once(settings, db, artifacts)
    assert db.empty_log() or not db.has_log
    words.settle(db, forgotten)


def write_storyboard(db: Database, artifacts: ArtifactStore, held: Claim) -> None:
    claims.beat(db, held, lease_s=20.0, progress=5.0, data={"text": f'{{"title": "The {CANARY}'})
    stored = artifacts.put_bytes(f"{held.job.id}/1/storyboard.json", CANARY.encode(), "application/json")
    assert claims.complete(db, held, Result([stored.record("storyboard")], {"storyboard": BOARD, "seconds": 1.0}))


def test_a_clip_s_prompts_go_with_its_end(settings: Settings, db: Database) -> None:
    prompts = {"prompt": CANARY, "negative_prompt": f"no {CANARY}"}
    for end in ("completed", "failed", "cancelled"):
        spec = JobSpec(kind="video", pool="video", prompts=prompts, answer_s=60.0, metadata={"scene": "7"})
        job = store.submit(db, spec)
        held = claim(db, "video")
        assert held.job.prompts == prompts
        if end == "completed":
            assert claims.complete(db, held, Result([ArtifactRecord("video", "k", "video/mp4", 1, "0")], {"seed": 1}))
        elif end == "failed":
            assert claims.fail(db, held, JobError("out_of_memory", "too large"))
        else:
            store.request_cancel(db, job.id)
            assert claims.confirm_cancel(db, held)
        ended = store.get(db, job.id)
        assert (ended.status, ended.prompts, ended.metadata) == (end, {}, {"scene": "7"})
        assert words.has_any(db)
    assert db.empty_log() or not db.has_log
    assert has_canary(settings) == []


def test_an_attempt_that_is_tried_again_keeps_its_prompts(db: Database) -> None:
    job = store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": CANARY}, answer_s=0.0))
    assert claims.fail(db, claim(db, "video"), JobError("worker_crashed", "x"), retryable=True)
    assert store.get(db, job.id).prompts == {"prompt": CANARY}
    assert not words.has_any(db)


def test_a_storyboard_is_had_for_a_while(settings: Settings, db: Database, artifacts: ArtifactStore) -> None:
    spec = JobSpec(kind="storyboard", pool="text", prompts={"idea": CANARY}, params={"fps": 16}, answer_s=60.0)
    job = store.submit(db, spec)
    write_storyboard(db, artifacts, claim(db, "text"))
    # not before its time
    forget(settings, db, artifacts)
    had = store.get(db, job.id)
    assert (had.prompts, had.result) == ({}, {"storyboard": BOARD, "seconds": 1.0})
    pass_time(db)
    forget(settings, db, artifacts)
    gone = store.get(db, job.id)
    assert (gone.status, gone.result, gone.params) == (Status.COMPLETED, {"seconds": 1.0}, {"fps": 16})
    assert store.artifacts_of(db, job.id) == [] and not words.has_any(db)
    assert has_canary(settings) == []


def test_a_log_in_use_is_emptied_before_a_job_counts_as_forgotten(db: Database, artifacts: ArtifactStore) -> None:
    job = store.submit(db, JobSpec(kind="storyboard", pool="text", prompts={"idea": CANARY}, answer_s=0.0))
    write_storyboard(db, artifacts, claim(db, "text"))
    pass_time(db)
    assert words.forget_due(db) == [job.id] == words.forget_due(db)
    words.settle(db, [job.id])
    assert words.forget_due(db) == []


def film(db: Database, card: VideoCard) -> str:
    publish(db, card, "video-0@test:1")
    request = FilmRequest(idea=f"a {CANARY}", style=f"{CANARY} style", negative_prompt=CANARY, seconds=2, shots=2)
    return submit_film(db, request, card, answer_s=60.0).id


def test_a_film_forgets_once_all_of_it_has_ended(
    settings: Settings, db: Database, artifacts: ArtifactStore, card: VideoCard
) -> None:
    film_id = film(db, card)
    write_storyboard(db, artifacts, claim(db, "text"))
    for _ in range(2):
        held = claim(db, "video")
        # a shot that fails is tried again, in the words of the storyboard
        assert held.job.prompts["prompt"] == f"a red {CANARY}" and held.job.answer_s == 60.0
        record = ArtifactRecord("video", f"{held.job.id}/1/video.mp4", "video/mp4", 1, "0")
        assert claims.complete(db, held, Result([record], {"seed": 1}))
    held = claim(db, "media")
    assert held.job.params["storyboard"] == BOARD
    assert claims.complete(db, held, Result())
    assert store.get(db, film_id).result is not None and has_canary(settings)
    pass_time(db)
    forget(settings, db, artifacts)
    found = store.get(db, film_id)
    assert found.result is not None and "storyboard" not in found.result and len(found.result["shots"]) == 2
    assert has_canary(settings) == []


def test_a_shot_that_stops_after_its_film_is_forgotten_too(
    settings: Settings, db: Database, artifacts: ArtifactStore, card: VideoCard
) -> None:
    film_id = film(db, card)
    write_storyboard(db, artifacts, claim(db, "text"))
    late = claim(db, "video")
    params = {**store.get(db, film_id).params, "shot_retries": 0}
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == film_id).values(params=params))
    failed = claim(db, "video")
    assert claims.fail(db, failed, JobError("out_of_memory", "too large"))
    assert store.get(db, film_id).status is Status.FAILED
    pass_time(db)
    forget(settings, db, artifacts)
    # it still runs, and needs its words
    assert store.get(db, late.job.id).prompts
    assert claims.confirm_cancel(db, late)
    assert words.has_any(db)
    pass_time(db)
    forget(settings, db, artifacts)
    assert has_canary(settings) == [] and not words.has_any(db)


def test_who_keeps_words_keeps_them(settings: Settings, db: Database, artifacts: ArtifactStore) -> None:
    job = store.submit(db, JobSpec(kind="storyboard", pool="text", prompts={"idea": CANARY}))
    write_storyboard(db, artifacts, claim(db, "text"))
    pass_time(db)
    forget(settings, db, artifacts)
    assert store.get(db, job.id).result == {"storyboard": BOARD, "seconds": 1.0}
    assert store.get(db, job.id).prompts == {"idea": CANARY}
