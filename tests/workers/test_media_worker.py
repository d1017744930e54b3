"""The join job from claim to files, and each way in which it ends early."""

import errno
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import opentimelineio as otio
import pytest
from PIL import Image

from media_server.artifacts.store import open_artifacts
from media_server.errors import InsufficientStorage
from media_server.jobs import store
from media_server.jobs.claims import claim_next
from media_server.jobs.doorbell import make_celery
from media_server.jobs.spec import Claim, JobSpec
from media_server.jobs.states import Status
from media_server.settings import Settings
from tests.fresh_database import open_migrated
from workers import media_worker
from workers.contact_sheet import draw_contact_sheet
from workers.joining import inspect_film
from workers.media_worker import join_film
from workers.pool_worker import PoolContext

FPS = 8
LENGTHS = (9, 12)
STORYBOARD: dict[str, Any] = {
    "v": 1,
    "title": "Zwei Bälle",
    "idea": "a red ball meets a blue one",
    "fps": FPS,
    "seconds": 21 / FPS,
    "shots": [
        {"index": 0, "prompt": "a red ball", "num_frames": 9},
        {"index": 1, "prompt": "a blue ball", "num_frames": 12},
    ],
}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[PoolContext]:
    # every report beats, so that what a beat learns is seen in the small films of these tests
    settings = Settings(data_dir=tmp_path, beat_s=1e-9)
    db = open_migrated(settings.database)
    yield PoolContext(
        settings=settings,
        db=db,
        artifacts=open_artifacts(settings),
        celery=make_celery(settings),
        stopping=threading.Event(),
        pool="media",
        worker="media@test:1",
    )
    db.close()


def clip_bytes(color: tuple[int, int, int], num_frames: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=FPS, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = context.color_range = 1
        for _ in range(num_frames):
            pixels = np.full((32, 64, 3), color, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            file.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=1)))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def submit_join(context: PoolContext, lengths: tuple[int, ...] = LENGTHS) -> Claim:
    clips = []
    for shot, (color, num_frames) in enumerate(zip(((150, 20, 20), (20, 20, 150)), lengths, strict=True)):
        key = f"video_{shot}/1/video.mp4"
        context.artifacts.put_bytes(key, clip_bytes(color, num_frames), "video/mp4")
        clips.append({"job_id": f"video_{shot}", "attempt": 1, "key": key, "num_frames": LENGTHS[shot], "shot": shot})
    params = {"clips": clips, "fps": FPS, "size": "64x32", "film_id": "film_1", "storyboard": STORYBOARD}
    store.submit(context.db, JobSpec(kind="join", pool="media", params=params))
    claim = claim_next(context.db, "media", context.worker, 60.0)
    assert claim is not None
    return claim


def files_of(context: PoolContext, claim: Claim) -> list[str]:
    return sorted(key.rpartition("/")[2] for key in context.artifacts.list_keys(f"{claim.job.id}/"))


def read(context: PoolContext, claim: Claim, name: str) -> bytes:
    (record,) = (record for record in store.artifacts_of(context.db, claim.job.id) if record.name == name)
    return b"".join(context.artifacts.read(record.key))


def test_a_film_is_joined_checked_and_published(context: PoolContext) -> None:
    claim = submit_join(context)
    join_film(context, claim)
    job = store.get(context.db, claim.job.id)
    assert (job.status, job.progress) == (Status.COMPLETED, 100.0)
    assert job.result == {"num_frames": 21, "fps": FPS, "cuts": [0, 9], "is_copy": True}
    with av.open(io.BytesIO(read(context, claim, "video"))) as film:
        assert isinstance(film, av.container.InputContainer)
        assert len(list(film.decode(video=0))) == 21
    assert json.loads(read(context, claim, "storyboard")) == STORYBOARD
    timeline = otio.adapters.read_from_string(read(context, claim, "timeline").decode(), "otio_json")
    assert [clip.duration().value for clip in timeline.find_clips()] == list(LENGTHS)
    assert [clip.metadata["media_server"]["video_id"] for clip in timeline.find_clips()] == ["video_0", "video_1"]
    sheet = Image.open(io.BytesIO(read(context, claim, "contact_sheet")))
    assert sheet.format == "PNG" and sheet.width > 1000
    thumbnail = Image.open(io.BytesIO(read(context, claim, "thumbnail")))
    red, _, blue = np.asarray(thumbnail).mean(axis=(0, 1))
    assert thumbnail.format == "JPEG" and thumbnail.size == (64, 32) and red > 120 > blue
    # nothing is left where the film was made
    assert list(context.settings.runtime_dir.glob("join-*")) == []


def test_a_clip_that_is_too_short_fails_the_job_with_its_reason(context: PoolContext) -> None:
    claim = submit_join(context, (9, 11))
    join_film(context, claim)
    job = store.get(context.db, claim.job.id)
    assert (job.status, job.error_code) == (Status.FAILED, "join_failed")
    assert job.error_message is not None and "clip 2 has 11 frames, its share is 12" in job.error_message
    assert files_of(context, claim) == []


def test_a_clip_that_is_gone_fails_the_job(context: PoolContext) -> None:
    claim = submit_join(context)
    context.artifacts.delete_prefix("video_1")
    join_film(context, claim)
    assert store.get(context.db, claim.job.id).error_code == "join_failed"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory"), MemoryError),
        (av.error.OSError(errno.EIO, "Input/output error"), OSError),
        (av.error.OSError(errno.ENOSPC, "No space left on device"), InsufficientStorage),
    ],
)
def test_the_machines_faults_are_not_the_films(
    context: PoolContext, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise error

    monkeypatch.setattr(media_worker, "join_clips", fail)
    claim = submit_join(context)
    # what is raised the pool worker takes for a reason to try again, or names
    with pytest.raises(raised):
        join_film(context, claim)
    assert store.get(context.db, claim.job.id).status is Status.IN_PROGRESS


def test_cancel_is_confirmed_and_leaves_no_files(context: PoolContext) -> None:
    claim = submit_join(context)
    store.request_cancel(context.db, claim.job.id)
    join_film(context, claim)
    assert store.get(context.db, claim.job.id).status is Status.CANCELLED
    assert files_of(context, claim) == []


@pytest.mark.parametrize("slow", ["upload", "sheet"])
def test_the_lease_is_renewed_while_nothing_is_reported(
    context: PoolContext, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    claim = submit_join(context)
    renewed: list[bool] = []

    def lease_until() -> float:
        with context.db.read() as tx:
            return float(tx.conn.exec_driver_sql("SELECT lease_until FROM jobs").scalar_one())

    def take_long(work: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **named: Any) -> Any:
            with context.db.write() as tx:
                tx.conn.exec_driver_sql("UPDATE jobs SET lease_until = 0")
            deadline = time.monotonic() + 10.0
            while lease_until() == 0 and time.monotonic() < deadline:
                time.sleep(0.02)
            renewed.append(lease_until() > 0)
            return work(*arguments, **named)

        return wait

    if slow == "upload":
        monkeypatch.setattr(context.artifacts, "put_file", take_long(context.artifacts.put_file))
    else:
        monkeypatch.setattr("workers.media_worker.draw_contact_sheet", take_long(draw_contact_sheet))
    join_film(context, claim)
    assert renewed == [True]
    assert store.get(context.db, claim.job.id).status is Status.COMPLETED


def test_a_worker_that_stops_gives_the_job_back(context: PoolContext) -> None:
    claim = submit_join(context)
    context.stopping.set()
    join_film(context, claim)
    job = store.get(context.db, claim.job.id)
    assert (job.status, job.uncounted) == (Status.QUEUED, 1)


def test_an_attempt_that_lost_its_lease_removes_its_own_files_only(
    context: PoolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    loser = submit_join(context)
    winners: list[Claim] = []

    def lose_the_lease(*arguments: Any, **named: Any) -> Any:
        # another worker takes the job over while this one checks its film, and finishes first
        if not winners:
            monkeypatch.setattr("workers.media_worker.inspect_film", inspect_film)
            pictures = inspect_film(*arguments, **{**named, "report": lambda _: None})
            with context.db.write() as tx:
                tx.conn.exec_driver_sql("UPDATE jobs SET lease_until = 0")
            claim = claim_next(context.db, "media", "media@test:2", 60.0)
            assert claim is not None
            winners.append(claim)
            join_film(context, claim)
            return pictures
        return inspect_film(*arguments, **named)

    monkeypatch.setattr("workers.media_worker.inspect_film", lose_the_lease)
    join_film(context, loser)
    job = store.get(context.db, loser.job.id)
    assert (job.status, job.winning_attempt) == (Status.COMPLETED, 2)
    keys = list(context.artifacts.list_keys(f"{job.id}/"))
    assert len(keys) == 5 and all(key.startswith(f"{job.id}/2/") for key in keys)
