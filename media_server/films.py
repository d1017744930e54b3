"""Films: a state machine in SQL that the transaction which ends a child takes one step further.

    storyboard ──► shots, all at once ──► joining ──► completed
                     └─ a failed shot is made again with another seed, a few times ──► failed

No task waits for another, so a restart between any two steps loses nothing: what comes next follows from the rows
of the children alone. A film's job is never claimed; its children are ordinary jobs. A film that fails keeps what was
made. The seeds of the shots derive from (film seed, shot, retry).
Invariant: whoever calls holds the lock of the film's family.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field

from media_server.errors import InvalidRequest, JobError, MediaServerError
from media_server.ids import new_id
from media_server.jobs import events, transitions
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import FILMS_POOL, insert, load, select
from media_server.jobs.spec import Job, JobSpec
from media_server.jobs.states import Status
from media_server.jobs.tables import artifacts, jobs
from media_server.models.card import VideoCard
from media_server.models.clip import MAX_SEED, ClipRequest, check_characters, validate_clip
from media_server.models.registry import find_card
from media_server.validation import parse_request

TEXT_POOL = "text"
MEDIA_POOL = "media"
MAX_FILM_SECONDS = 600
MAX_SHOTS = 100
MAX_IDEA_CHARS = 4000

# where each stage's share of the film's progress begins
_STORYBOARD_UNTIL, _SHOTS_UNTIL = 10.0, 90.0


class FilmRequest(BaseModel):
    """What a caller may say about a film; what is None the storyboard or the model's card decides."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    idea: Annotated[str, Field(max_length=MAX_IDEA_CHARS)]
    seconds: Annotated[float, Field(gt=0, le=MAX_FILM_SECONDS)] = 8.0
    shots: Annotated[int, Field(ge=1, le=MAX_SHOTS)] | None = None
    style: Annotated[str, Field(max_length=MAX_IDEA_CHARS)] | None = None
    size: str | None = None
    fps: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] | None = None
    # the video model, and the language model that writes the storyboard
    model: str | None = None
    text_model: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    webhook_url: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] = {}
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


@dataclass(frozen=True)
class _Shot:
    """A shot of the storyboard, with the latest of its clips."""

    index: int
    num_frames: int
    clip: Job | None
    retry: int


def parse_film_request(values: dict[str, Any]) -> FilmRequest:
    """Read a request's fields. Raises InvalidRequest that names the field, the rule and the value."""
    return parse_request(FilmRequest, values)


def submit_film(
    db: Database,
    request: FilmRequest,
    card: VideoCard,
    *,
    shot_retries: int = 2,
    max_attempts: int = 3,
    owner_key_id: str | None = None,
    traceparent: str | None = None,
    retention_s: float | None = None,
    id: str | None = None,
) -> Job:
    """Write a film and its first child, the storyboard, in one transaction.

    Raises InvalidRequest if the film, or a clip of its size, steps and rate, breaks a rule of the card.
    """
    if not request.idea.strip():
        raise InvalidRequest("idea: must not be empty.", param="idea", rule="must not be empty", value=request.idea)
    check_characters("idea", request.idea)
    check_characters("style", request.style or "")
    # a clip of one frame stands for all shots: what it may not have, none of them may
    clip = validate_clip(card, _clip_request(request, card, prompt="x", num_frames=1))
    num_frames = round(request.seconds * clip.fps)
    if num_frames < (request.shots or 1):
        rule = f"at least one frame a shot at {clip.fps} fps"
        raise InvalidRequest(f"seconds: {rule}, got {request.seconds:g}.", param="seconds", rule=rule)
    film_id = id or new_id("film")
    seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
    params = {
        "seconds": num_frames / clip.fps,
        "num_frames": num_frames,
        "shots": request.shots,
        "style": request.style,
        "size": clip.size,
        "fps": clip.fps,
        "seed": seed,
        "video_model": card.name,
    }
    clip_params = {
        name: value
        for name in ("num_inference_steps", "guidance_scale")
        if (value := getattr(request, name)) is not None
    }
    prompts = {"idea": request.idea}
    if request.negative_prompt is not None:
        prompts["negative_prompt"] = request.negative_prompt
    with db.write() as tx:
        film = insert(
            tx,
            JobSpec(
                kind="film",
                pool=FILMS_POOL,
                id=film_id,
                model=card.name,
                params={
                    **params,
                    "clip": clip_params,
                    "shot_retries": shot_retries,
                    "max_attempts": max_attempts,
                },
                prompts=prompts,
                priority=request.priority,
                owner_key_id=owner_key_id,
                metadata=request.metadata,
                traceparent=traceparent,
                webhook_url=request.webhook_url,
                max_attempts=1,
                retention_s=retention_s,
            ),
        )
        insert(
            tx,
            _child(
                film,
                kind="storyboard",
                pool=TEXT_POOL,
                model=request.text_model,
                params=params,
                prompts={"idea": request.idea},
            ),
        )
        return film


def derive_seed(film_seed: int, shot: int, retry: int) -> int:
    """Give the seed of a shot's clip: the first 53 bits of SHA-256 over the three numbers."""
    digest = hashlib.sha256(f"{film_seed}:{shot}:{retry}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def end_job(
    tx: Transaction,
    job: Job,
    status: Status,
    *,
    error: JobError | None = None,
    winning_attempt: int | None = None,
    values: Mapping[str, Any] | None = None,
    outcome: str | None = None,
) -> bool:
    """End a job and, if it is a film's child, take the film further; returns whether it was as the caller saw it."""
    ended = transitions.end(
        tx, job, status, error=error, winning_attempt=winning_attempt, values=values, outcome=outcome
    )
    if ended and job.parent_id is not None:
        advance(tx, job.parent_id)
    return ended


def cancel_job(tx: Transaction, job: Job) -> None:
    """Cancel a job: at once if it waits, by asking if it runs; a film with all of its children."""
    if job.status.is_terminal:
        return
    if job.kind == "film":
        transitions.request_cancel(tx, job)
        _cancel_children(tx, job)
        advance(tx, job.id)
    elif job.status is Status.QUEUED:
        end_job(tx, job, Status.CANCELLED)
    else:
        transitions.request_cancel(tx, job)


def child_started(tx: Transaction, child: Job) -> None:
    """Note that a worker has claimed a child: with the first, the film is in progress."""
    assert child.parent_id is not None
    film = load(tx, child.parent_id, with_deleted=True)
    if film.kind != "film" or film.status is not Status.QUEUED:
        return
    tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == film.id, jobs.c.status == Status.QUEUED)
        .values(status=Status.IN_PROGRESS, stage="storyboard", attempt=1, started_at=tx.now())
    )
    started = load(tx, film.id, with_deleted=True)
    events.append(tx, started, "job.started", {"status": started.status, "stage": started.stage})


def child_progressed(tx: Transaction, film_id: str) -> None:
    """Carry a child's progress over to its film."""
    film = load(tx, film_id, with_deleted=True)
    if film.kind == "film" and film.status is Status.IN_PROGRESS:
        _show_progress(tx, film, _children(tx, film))


def advance(tx: Transaction, film_id: str) -> None:
    """Do what comes next in a film, as its children's rows say; doing it twice does nothing more."""
    film = load(tx, film_id, with_deleted=True)
    if film.kind != "film" or film.status.is_terminal:
        return
    children = _children(tx, film)
    if film.cancel_requested_at is not None:
        if all(child.status.is_terminal for child in children):
            transitions.end(tx, film, Status.CANCELLED, values=_totals(children))
        return
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status in (Status.FAILED, Status.CANCELLED):
        _fail(tx, film, children, JobError("storyboard_failed", _why(storyboard, "The storyboard")))
    elif storyboard.status is Status.COMPLETED:
        try:
            _advance_shots(tx, film, children, (storyboard.result or {})["storyboard"])
        except _StoryboardUnusable as unusable:
            _fail(tx, film, children, JobError("storyboard_failed", str(unusable)))


class _StoryboardUnusable(Exception):
    """The storyboard cannot be filmed; the message says why."""


def _advance_shots(tx: Transaction, film: Job, children: list[Job], storyboard: dict[str, Any]) -> None:
    shots = _shots(storyboard, children)
    if sum(shot.num_frames for shot in shots) != film.params["num_frames"]:
        raise _StoryboardUnusable(
            f"The shots sum to {sum(shot.num_frames for shot in shots)} frames, "
            f"the film has {film.params['num_frames']}."
        )
    for shot in shots:
        clip = shot.clip
        if clip is None:
            _make_shot(tx, film, storyboard, shot.index, retry=0)
        elif clip.status is Status.FAILED and _may_retry(film, shot, clip):
            _make_shot(tx, film, storyboard, shot.index, retry=shot.retry + 1)
        elif clip.status in (Status.FAILED, Status.CANCELLED):
            _fail(tx, film, children, JobError("shot_failed", _why(clip, f"Shot {shot.index + 1}")))
            return
    join = next((child for child in children if child.kind == "join"), None)
    if join is None and all(shot.clip and shot.clip.status is Status.COMPLETED for shot in shots):
        _join(tx, film, storyboard, shots)
    elif join is not None and join.status is Status.COMPLETED:
        values = {**_totals(children), "result": _result(children)}
        transitions.end(tx, film, Status.COMPLETED, values=values)
        return
    elif join is not None and join.status.is_terminal:
        _fail(tx, film, children, JobError("join_failed", _why(join, "Joining")))
        return
    _show_progress(tx, film, _children(tx, film))


def _may_retry(film: Job, shot: _Shot, clip: Job) -> bool:
    # another seed does not make a bad request a good one
    return shot.retry < film.params["shot_retries"] and clip.error_code != "invalid_request"


def _make_shot(tx: Transaction, film: Job, storyboard: dict[str, Any], index: int, retry: int) -> None:
    shot = storyboard["shots"][index]
    try:
        card = find_card(tx, film.model, "video")
        request = ClipRequest(
            prompt=shot["prompt"],
            negative_prompt=film.prompts.get("negative_prompt"),
            size=film.params["size"],
            fps=film.params["fps"],
            num_frames=shot["num_frames"],
            seed=derive_seed(film.params["seed"], index, retry),
            **film.params["clip"],
        )
        clip = validate_clip(card, request)
    except (MediaServerError, ValueError) as error:
        raise _StoryboardUnusable(f"Shot {index + 1} cannot be made: {error}") from error
    insert(
        tx,
        _child(
            film,
            kind="video",
            pool=card.pool,
            model=card.name,
            params={**clip.params(), "film": {"shot": index, "retry": retry}},
            prompts=clip.prompts(),
        ),
    )


def _join(tx: Transaction, film: Job, storyboard: dict[str, Any], shots: list[_Shot]) -> None:
    clips = []
    for shot in shots:
        assert shot.clip is not None
        key = tx.conn.scalar(
            sa.select(artifacts.c.key).where(
                artifacts.c.job_id == shot.clip.id,
                artifacts.c.attempt == shot.clip.winning_attempt,
                artifacts.c.name == "video",
                artifacts.c.state == "final",
            )
        )
        if key is None:
            raise _StoryboardUnusable(f"Shot {shot.index + 1} completed without a video.")
        clips.append(
            {
                "job_id": shot.clip.id,
                "attempt": shot.clip.winning_attempt,
                "key": key,
                "num_frames": shot.num_frames,
                "shot": shot.index,
            }
        )
    insert(
        tx,
        _child(
            film,
            kind="join",
            pool=MEDIA_POOL,
            params={
                "clips": clips,
                "fps": film.params["fps"],
                "size": film.params["size"],
                "film_id": film.id,
                "storyboard": storyboard,
            },
        ),
    )


def _fail(tx: Transaction, film: Job, children: list[Job], error: JobError) -> None:
    """End a film as failed; what was made stays, what waits or runs is cancelled."""
    transitions.end(tx, film, Status.FAILED, error=error, values={**_totals(children), "result": _result(children)})
    _cancel_children(tx, film)


def _cancel_children(tx: Transaction, film: Job) -> None:
    for child in _children(tx, film):
        if child.status is Status.QUEUED:
            transitions.end(tx, child, Status.CANCELLED)
        elif child.status is Status.IN_PROGRESS:
            transitions.request_cancel(tx, child)


def _show_progress(tx: Transaction, film: Job, children: list[Job]) -> None:
    stage, step, total_steps, progress = _stage(children)
    progress = max(progress, film.progress)
    tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == film.id, jobs.c.status == Status.IN_PROGRESS)
        .values(stage=stage, step=step, total_steps=total_steps, progress=progress)
    )
    # a step of a shot is a fraction of the film: say what a reader can see
    if (stage, step, int(progress)) != (film.stage, film.step, int(film.progress)):
        data = {"stage": stage, "step": step, "total_steps": total_steps, "progress": progress}
        events.append(tx, film, "job.progress", data)


def _stage(children: list[Job]) -> tuple[str, int | None, int | None, float]:
    """Give stage, shots done, shots in all, and progress in percent."""
    join = next((child for child in children if child.kind == "join"), None)
    if join is not None:
        return "joining", None, None, _SHOTS_UNTIL + (100.0 - _SHOTS_UNTIL) * join.progress / 100.0
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status is not Status.COMPLETED:
        return "storyboard", None, None, _STORYBOARD_UNTIL * storyboard.progress / 100.0
    shots = _shots((storyboard.result or {})["storyboard"], children)
    mean = sum(shot.clip.progress for shot in shots if shot.clip) / len(shots)
    done = sum(1 for shot in shots if shot.clip and shot.clip.status is Status.COMPLETED)
    return "shots", done, len(shots), _STORYBOARD_UNTIL + (_SHOTS_UNTIL - _STORYBOARD_UNTIL) * mean / 100.0


def _shots(storyboard: dict[str, Any], children: list[Job]) -> list[_Shot]:
    latest: dict[int, Job] = {}
    for child in children:
        if child.kind == "video":
            index = child.params["film"]["shot"]
            if index not in latest or child.params["film"]["retry"] > latest[index].params["film"]["retry"]:
                latest[index] = child
    try:
        return [
            _Shot(
                index=index,
                num_frames=int(shot["num_frames"]),
                clip=latest.get(index),
                retry=latest[index].params["film"]["retry"] if index in latest else 0,
            )
            for index, shot in enumerate(storyboard["shots"])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _StoryboardUnusable(f"The storyboard lacks a shot's num_frames: {error}") from error


def _result(children: list[Job]) -> dict[str, Any] | None:
    """Say what a film is made of, as far as it was made."""
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status is not Status.COMPLETED:
        return None
    board = (storyboard.result or {}).get("storyboard")
    clips = sorted(
        (child for child in children if child.kind == "video"),
        key=lambda clip: (clip.params["film"]["shot"], clip.params["film"]["retry"]),
    )
    latest = {clip.params["film"]["shot"]: clip for clip in clips}
    join = next((child for child in children if child.kind == "join"), None)
    return {
        "storyboard": board,
        "shots": [
            {
                "shot": index,
                "job_id": clip.id,
                "status": clip.status,
                "seed": clip.params["seed"],
                "retries": clip.params["film"]["retry"],
                "num_frames": clip.params["num_frames"],
            }
            for index, clip in sorted(latest.items())
        ],
        "storyboard_job_id": storyboard.id,
        "join_job_id": join.id if join else None,
    }


def _totals(children: list[Job]) -> dict[str, Any]:
    peaks = [child.peak_memory_bytes for child in children if child.peak_memory_bytes is not None]
    return {
        "gpu_seconds": sum(child.gpu_seconds or 0.0 for child in children),
        "peak_memory_bytes": max(peaks, default=None),
    }


def _why(child: Job, what: str) -> str:
    if child.status is Status.CANCELLED:
        return f"{what} was cancelled."
    return f"{what} failed with {child.error_code}: {child.error_message}"


def _children(tx: Transaction, film: Job) -> list[Job]:
    return select(tx, sa.select(jobs).where(jobs.c.parent_id == film.id).order_by(jobs.c.created_at, jobs.c.id))


def _child(film: Job, **members: Any) -> JobSpec:
    return JobSpec(
        priority=film.priority,
        owner_key_id=film.owner_key_id,
        parent_id=film.id,
        root_id=film.root_id,
        label=film.label,
        traceparent=film.traceparent,
        max_attempts=film.params["max_attempts"],
        retention_s=film.retention_s,
        **members,
    )


def _clip_request(request: FilmRequest, card: VideoCard, *, prompt: str, num_frames: int) -> ClipRequest:
    return ClipRequest(
        prompt=prompt,
        model=card.name,
        size=request.size,
        fps=request.fps,
        num_frames=num_frames,
        negative_prompt=request.negative_prompt,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        metadata=request.metadata,
        priority=request.priority,
    )
