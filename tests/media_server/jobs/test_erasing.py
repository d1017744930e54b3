"""What DELETE leaves on disk: no word of a caller's or a model's stays in the database file or its log."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from media_server.errors import JobError
from media_server.films import FilmRequest, submit_film
from media_server.jobs import claims, outbox, store
from media_server.jobs.database import Database
from media_server.jobs.spec import ArtifactRecord, Claim, JobSpec, Result
from media_server.jobs.tables import metadata, prompts
from media_server.models.card import VideoCard
from media_server.models.registry import publish
from tests.fresh_database import open_migrated

CANARY = "canary-7f3a91"
HOOK = f"https://hooks.example.org/{CANARY}"
BOARD: dict[str, Any] = {
    "v": 1,
    "title": f"The {CANARY}",
    "shots": [{"index": 0, "prompt": f"a red {CANARY}", "num_frames": 16}],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The database's file."""
    return tmp_path / "jobs.db"


@pytest.fixture
def db(path: Path) -> Iterator[Database]:
    """A SQLite database whose file can be read."""
    opened = open_migrated(f"sqlite:///{path}")
    yield opened
    opened.close()


def _on_disk(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir() if file.is_file())


def _claim(db: Database, pool: str) -> Claim:
    claim = claims.claim_next(db, pool, "w", 20.0)
    assert claim is not None
    return claim


def _deliver(db: Database) -> None:
    for message in outbox.claim_due(db, "d", lease_s=20.0):
        assert outbox.settle(db, message, "d", started_at=0.0, duration_s=0.1, status_code=200)


def _clip(db: Database, card: VideoCard) -> str:
    spec = JobSpec(
        kind="video",
        pool="video",
        params={"seed": 1, "negative": CANARY},
        prompts={"prompt": CANARY, "negative_prompt": f"no {CANARY}", "segment.0": f"{CANARY} first"},
        metadata={CANARY: CANARY},
        webhook_url=HOOK,
    )
    job = store.submit(db, spec)
    claim = _claim(db, "video")
    claims.save_checkpoint(db, claim, 0, f"{job.id}/segments/1_000.mkv", {"prompt": CANARY})
    claims.fail(db, claim, JobError("model_error", f"cannot make {CANARY}"), retryable=True)
    claims.fail(db, _claim(db, "video"), JobError("model_error", f"cannot make {CANARY}"))
    _deliver(db)
    return job.id


def _storyboard(db: Database, card: VideoCard) -> str:
    spec = JobSpec(kind="storyboard", pool="text", prompts={"idea": CANARY, "style": f"{CANARY} noir"})
    job = store.submit(db, spec)
    claim = _claim(db, "text")
    claims.beat(db, claim, lease_s=20.0, data={"text": f'{{"title": "{CANARY}'})
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    return job.id


def _film(db: Database, card: VideoCard) -> str:
    publish(db, card, "w")
    request = FilmRequest(
        idea=f"a {CANARY}", style=f"{CANARY} noir", negative_prompt=CANARY, seconds=1, shots=1, webhook_url=HOOK
    )
    film = submit_film(db, request, card)
    claim = _claim(db, "text")
    claims.beat(db, claim, lease_s=20.0, data={"text": CANARY})
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    claims.complete(db, _claim(db, "video"), Result([_video()]))
    claims.complete(db, _claim(db, "media"), Result())
    assert store.get(db, film.id).status == "completed"
    _deliver(db)
    return film.id


def _failed_film(db: Database, card: VideoCard) -> str:
    publish(db, card, "w")
    film = submit_film(db, FilmRequest(idea=CANARY, seconds=1, shots=1, style=CANARY), card)
    claims.fail(db, _claim(db, "text"), JobError("storyboard_failed", f"not complete: {CANARY}"))
    assert CANARY in str(store.get(db, film.id).error_message)
    return film.id


def _video() -> ArtifactRecord:
    return ArtifactRecord("video", "video_x/1/video.mp4", "video/mp4", 1, "00")


@pytest.mark.parametrize("make", [_clip, _storyboard, _film, _failed_film])
def test_no_word_stays_on_disk(
    db: Database, path: Path, card: VideoCard, make: Callable[[Database, VideoCard], str]
) -> None:
    job_id = make(db, card)
    assert CANARY.encode() in _on_disk(path)
    store.delete(db, job_id)
    assert db.empty_log()
    assert CANARY.encode() not in _on_disk(path)


@pytest.mark.parametrize("kind", ["clip", "film"])
def test_what_was_running_is_erased_when_it_has_stopped(db: Database, path: Path, card: VideoCard, kind: str) -> None:
    publish(db, card, "w")
    if kind == "clip":
        job_id = store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": CANARY}, webhook_url=HOOK)).id
        running = _claim(db, "video")
    else:
        job_id = submit_film(db, FilmRequest(idea=CANARY, style=CANARY, seconds=1, webhook_url=HOOK), card).id
        running = _claim(db, "text")
    store.delete(db, job_id)
    claims.beat(db, running, lease_s=20.0, progress=1.0, data={"text": CANARY})
    assert claims.confirm_cancel(db, running)
    # the receiver is still told; its URL goes with that
    db.empty_log()
    assert HOOK.encode() in _on_disk(path)
    _deliver(db)
    db.empty_log()
    assert CANARY.encode() not in _on_disk(path)


def test_a_films_words_stand_in_the_prompts_table(db: Database, card: VideoCard) -> None:
    """Before its storyboard is written, no other row has any: they can be erased alone."""
    publish(db, card, "w")
    film = submit_film(db, FilmRequest(idea=f"a {CANARY}", style=f"{CANARY} noir", negative_prompt=CANARY), card)
    assert film.prompts == {"idea": f"a {CANARY}", "style": f"{CANARY} noir", "negative_prompt": CANARY}
    with db.read() as tx:
        others = [tx.conn.execute(sa.select(table)).all() for table in metadata.sorted_tables if table is not prompts]
    assert CANARY not in str(others)


def test_deleting_among_many_leaves_none(db: Database, path: Path) -> None:
    """Rows move between pages as the tables grow and shrink; no page keeps a copy."""
    mine = []
    for number in range(240):
        text = f"{CANARY} {number} " if number % 3 == 0 else "harmless words "
        # from a few bytes to several overflow pages
        spec = JobSpec(kind="video", pool="video", prompts={"prompt": text * (1, 4, 30, 400)[number % 4]})
        job = store.submit(db, spec)
        if number % 3 == 0:
            mine.append(job.id)
    for job_id in mine[::2] + mine[1::2]:
        store.delete(db, job_id)
    assert db.empty_log()
    assert CANARY.encode() not in _on_disk(path)


def test_a_log_that_is_read_is_emptied_later(db: Database, path: Path) -> None:
    store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": CANARY}))
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with db.read() as tx:
            tx.conn.execute(sa.select(prompts)).all()
            reading.set()
            done.wait(10)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(10)
    store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": "more"}))
    assert not db.empty_log()
    done.set()
    reader.join()
    assert db.empty_log()
    assert path.with_name("jobs.db-wal").stat().st_size == 0
