"""The media worker: joins a film's clips, checks the file, draws its sheet, writes its timeline, publishes all.

Needs no GPU and no model; ffmpeg's libraries run here, so that they never delay a clip or a webhook.
"""

import argparse
import errno
import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import av
from PIL import Image

from media_server.artifacts.store import StoredFile
from media_server.errors import InsufficientStorage, JobError, NotFound
from media_server.jobs.claims import beat, complete, confirm_cancel, fail, release
from media_server.jobs.spec import ArtifactRecord, Claim, Result
from media_server.settings import load_settings
from media_server.timeline.otio import TimelineShot, film_timeline
from workers.contact_sheet import SheetShot, draw_contact_sheet, frames_to_show
from workers.joining import ClipFile, JoinError, inspect_film, join_clips
from workers.leases import beat_meanwhile, is_alive
from workers.pool_worker import PoolContext, run_pool_worker
from workers.stages import StageClock

logger = logging.getLogger(__name__)

T = TypeVar("T")

POOL = "media"
_CONCURRENCY = 2
_FOLDER = "join-"
# progress of each stage, in percent of the job
_STAGES = {"fetch": (0.0, 10.0), "join": (10.0, 50.0), "check": (50.0, 90.0), "publish": (90.0, 100.0)}
_JPEG_QUALITY = 88


def main(argv: Sequence[str]) -> int:
    """Join clips into films, with contact sheets and timelines."""
    parser = argparse.ArgumentParser(prog="media-server media", description=main.__doc__)
    parser.add_argument("--name", default="media", help="name of this worker in logs and leases")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    return run_pool_worker(settings, POOL, arguments.name, _CONCURRENCY, join_film, on_start=_remove_leftovers)


@dataclass(frozen=True)
class _Shot:
    """A shot as the join job names it."""

    key: str
    num_frames: int
    job_id: str
    prompt: str
    first_frame: int


class _Stopped(Exception):
    """The job is not ours any more, was cancelled, or the worker ends."""


class _LeaseLost(_Stopped):
    pass


class _Cancelled(_Stopped):
    pass


class _Draining(_Stopped):
    pass


def join_film(context: PoolContext, claim: Claim) -> None:
    """Do one join job to its end."""
    prefix = f"{claim.job.id}/{claim.attempt}/"
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-", dir=context.settings.runtime_dir) as folder:
            result = _make_film(context, claim, Path(folder))
    except _LeaseLost:
        logger.warning("job %s attempt %d: another attempt has it", claim.job.id, claim.attempt)
        context.artifacts.delete_prefix(prefix)
    except _Cancelled:
        confirm_cancel(context.db, claim)
        logger.info("job %s attempt %d: cancelled", claim.job.id, claim.attempt)
    except _Draining:
        release(context.db, claim)
        logger.info("job %s attempt %d: given back, the worker stops", claim.job.id, claim.attempt)
    except (JoinError, av.error.FFmpegError, NotFound) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage("The disk has no room left to join the clips on.") from error
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError):
            # the machine's fault and not the clips': another attempt may do
            raise
        logger.error("job %s attempt %d: %s", claim.job.id, claim.attempt, error)
        fail(context.db, claim, JobError("join_failed", f"The clips could not be joined: {error}"))
    else:
        if complete(context.db, claim, result):
            logger.info("job %s attempt %d: completed", claim.job.id, claim.attempt)
        else:
            context.artifacts.delete_prefix(prefix)


class _Reporter:
    """Beats the lease while frames pass, so that a job that hangs loses it, and during uploads; raises what ends it."""

    def __init__(self, context: PoolContext, claim: Claim) -> None:
        self.context = context
        self.claim = claim
        self.beaten_at = 0.0
        self.clock = StageClock(context, claim)

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a stage of `total` steps; the function returned takes the number of steps done."""
        low, high = _STAGES[name]
        self.clock.enter(name)

        def report(done: int, *, is_first: bool = False) -> None:
            if is_first or self._is_due():
                self._beat(stage=name, step=done, total_steps=total, progress=low + (high - low) * done / max(1, total))

        report(0, is_first=True)
        return report

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Do something long that reports nothing, and beat meanwhile; it has ended when this returns or raises."""

        def keep() -> None:
            if self._is_due():
                self._beat()

        with ThreadPoolExecutor(1, thread_name_prefix="files") as helper:
            return beat_meanwhile(helper, work, keep)

    def _is_due(self) -> bool:
        return time.monotonic() - self.beaten_at >= self.context.settings.beat_s / 4

    def _beat(self, **members: Any) -> None:
        self.beaten_at = time.monotonic()
        answer = beat(self.context.db, self.claim, lease_s=self.context.settings.lease_s, **members)
        if not answer.is_ours:
            raise _LeaseLost
        if answer.cancel_requested:
            raise _Cancelled
        if self.context.stopping.is_set():
            raise _Draining


def _make_film(context: PoolContext, claim: Claim, folder: Path) -> Result:
    params = claim.job.params
    storyboard: dict[str, Any] = params["storyboard"]
    shots = _shots(params["clips"], storyboard)
    fps = float(params["fps"])
    num_frames = sum(shot.num_frames for shot in shots)
    reporter = _Reporter(context, claim)
    clips = _fetch_clips(context, shots, folder, reporter)
    film = folder / "film.mp4"
    is_copy = join_clips(clips, film, fps=fps, report=reporter.stage("join", num_frames))
    # what is kept for good has no words, where none are to be kept
    keeps_words = claim.job.answer_s is None
    rows = [SheetShot(shot.first_frame, shot.num_frames, shot.prompt if keeps_words else "") for shot in shots]
    cover = shots[0].first_frame + shots[0].num_frames // 2
    pictures = inspect_film(
        film,
        [shot.num_frames for shot in shots],
        fps=fps,
        wanted={cover, *(frame for row in rows for frame in frames_to_show(row))},
        report=reporter.stage("check", num_frames),
    )
    title = str((keeps_words and storyboard.get("title")) or "Film")
    idea = str((keeps_words and storyboard.get("idea")) or "")

    def draw() -> tuple[bytes, bytes]:
        sheet = draw_contact_sheet(title, idea, rows, pictures, fps=fps)
        return _encode(sheet, "PNG"), _encode(pictures[cover], "JPEG", quality=_JPEG_QUALITY)

    sheet, thumbnail = reporter.meanwhile(draw)
    timeline = _timeline(title, shots, fps, params["film_id"], keeps_words=keeps_words)
    report = reporter.stage("publish", 5 if keeps_words else 4)
    prefix = f"{claim.job.id}/{claim.attempt}"
    store = context.artifacts
    text = json.dumps(storyboard, ensure_ascii=False, indent=2) + "\n"
    artifacts: list[ArtifactRecord] = []

    def publish(name: str, put: Callable[[], StoredFile]) -> None:
        artifacts.append(reporter.meanwhile(put).record(name))
        report(len(artifacts))

    publish("video", lambda: store.put_file(f"{prefix}/film.mp4", film, "video/mp4"))
    if keeps_words:
        publish("storyboard", lambda: store.put_bytes(f"{prefix}/storyboard.json", text.encode(), "application/json"))
    publish("timeline", lambda: store.put_bytes(f"{prefix}/timeline.otio", timeline.encode(), "application/json"))
    publish("contact_sheet", lambda: store.put_bytes(f"{prefix}/contact_sheet.png", sheet, "image/png"))
    publish("thumbnail", lambda: store.put_bytes(f"{prefix}/thumbnail.jpg", thumbnail, "image/jpeg"))
    reporter.clock.end()
    cuts = [shot.first_frame for shot in shots]
    return Result(artifacts=artifacts, result={"num_frames": num_frames, "fps": fps, "cuts": cuts, "is_copy": is_copy})


def _shots(clips: Sequence[dict[str, Any]], storyboard: dict[str, Any]) -> list[_Shot]:
    shots: list[_Shot] = []
    first_frame = 0
    for clip in sorted(clips, key=lambda clip: int(clip["shot"])):
        prompt = str(storyboard["shots"][clip["shot"]]["prompt"])
        shots.append(_Shot(clip["key"], int(clip["num_frames"]), clip["job_id"], prompt, first_frame))
        first_frame += int(clip["num_frames"])
    return shots


def _fetch_clips(context: PoolContext, shots: Sequence[_Shot], folder: Path, reporter: _Reporter) -> list[ClipFile]:
    """Find the clips on disk, or bring them from the object store."""
    report = reporter.stage("fetch", len(shots))
    clips = []
    for number, shot in enumerate(shots, start=1):
        path = context.artifacts.local_path(shot.key)
        if path is None:
            path = folder / f"clip-{number}.mp4"
            with path.open("wb") as file:
                for chunk in context.artifacts.read(shot.key):
                    file.write(chunk)
                    report(number - 1)
        clips.append(ClipFile(path, shot.num_frames))
        report(number)
    return clips


def _timeline(title: str, shots: Sequence[_Shot], fps: float, film_id: str, *, keeps_words: bool) -> str:
    return film_timeline(
        title,
        [
            TimelineShot(
                f"shot {number}",
                shot.num_frames,
                {"video_id": shot.job_id} | ({"prompt": shot.prompt} if keeps_words else {}),
            )
            for number, shot in enumerate(shots, start=1)
        ],
        fps=fps,
        media_url="film.mp4",
        metadata={"film_id": film_id},
    )


def _encode(picture: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def _remove_leftovers(context: PoolContext) -> None:
    """Remove the folders of media workers that were killed."""
    for path in context.settings.runtime_dir.glob(f"{_FOLDER}*-*"):
        if not is_alive(int(path.name.removeprefix(_FOLDER).partition("-")[0])):
            shutil.rmtree(path, ignore_errors=True)
