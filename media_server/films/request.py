"""A film as it is asked for: its fields, and the transaction that writes it with its first child, the storyboard."""

import secrets
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from media_server.admission import Limits, admit_film, admit_text
from media_server.errors import InvalidRequest
from media_server.films.children import TEXT_POOL, child_spec
from media_server.ids import new_id
from media_server.jobs.database import Database
from media_server.jobs.idempotency import Hold
from media_server.jobs.rows import FILMS_POOL, insert
from media_server.jobs.spec import Job, JobSpec
from media_server.models.card import VideoCard
from media_server.models.clip import MAX_SEED, ClipRequest, check_characters, validate_clip
from media_server.models.pricing import predictions
from media_server.validation import RequestModel, parse_request, refuse

MAX_FILM_SECONDS = 600
MAX_SHOTS = 100
MAX_IDEA_CHARS = 4000


class FilmRequest(RequestModel):
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
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    label: Annotated[str | None, Field(max_length=128, description="Project label of the usage ledger.")] = None


def parse_film_request(values: dict[str, Any]) -> FilmRequest:
    """Read a request's fields. Raises InvalidRequest that names the field, the rule and the value."""
    return parse_request(FilmRequest, values)


def submit_film(
    db: Database,
    request: FilmRequest,
    card: VideoCard,
    *,
    limits: Limits | None = None,
    shot_retries: int = 2,
    max_attempts: int = 3,
    owner_key_id: str | None = None,
    traceparent: str | None = None,
    retention_s: float | None = None,
    answer_s: float | None = None,
    id: str | None = None,
    idempotency_key: Hold | None = None,
) -> Job:
    """Write a film and its first child, the storyboard, in one transaction.

    Raises InvalidRequest if the film, or a clip of its size, steps and rate, breaks a rule of the card or a limit of
    the service; RateLimited if the queue is full, RateLimited or Forbidden if it is more than its key may have.
    """
    if not request.idea.strip():
        refuse("idea", "must not be empty", request.idea)
    check_characters("idea", request.idea)
    check_characters("style", request.style or "")
    if "text" not in card.conditions:
        refuse("model", "must make clips from text alone, as a film's shots are made", card.name)
    # a clip of one frame stands for all shots: what it may not have, none of them may
    clip = validate_clip(card, _clip_request(request, card, prompt="x", num_frames=1))
    num_frames = round(request.seconds * clip.fps)
    if num_frames < (request.shots or 1):
        rule = f"at least one frame a shot at {clip.fps} fps"
        raise InvalidRequest(f"seconds: {rule}, got {request.seconds:g}.", param="seconds", rule=rule)
    if num_frames > (request.shots or MAX_SHOTS) * card.limits.max_frames(clip.fps):
        refuse("seconds", f"at most {card.limits.max_seconds:g} s a shot", request.seconds)
    # without a number of shots they are taken to be as long as the model's clips usually are
    usual = max(1, round(card.defaults.seconds * clip.fps))
    num_shots = request.shots or min(MAX_SHOTS, -(-num_frames // usual))
    shot = validate_clip(card, _clip_request(request, card, prompt="x", num_frames=-(-num_frames // num_shots)))
    film_id = id or new_id("film")
    seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
    params = {
        "seconds": num_frames / clip.fps,
        "num_frames": num_frames,
        "shots": request.shots,
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
    # what the storyboard's writer is told, in the caller's words
    asked = {"idea": request.idea} | ({"style": request.style} if request.style else {})
    prompts = dict(asked)
    if request.negative_prompt is not None:
        prompts["negative_prompt"] = request.negative_prompt
    with db.write("accept") as tx:
        tx.lock(f"admission:{card.pool}")
        limits = limits or Limits()
        admit_text(tx, limits, TEXT_POOL, owner_key_id=owner_key_id, priority=request.priority)
        cost = admit_film(tx, limits, card, shot, num_shots, owner_key_id=owner_key_id, priority=request.priority)
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
                answer_s=answer_s,
                idempotency_key=idempotency_key,
                label=request.label,
                work=clip.work * num_frames,
                **predictions(cost),
            ),
        )
        insert(
            tx,
            child_spec(
                film,
                kind="storyboard",
                pool=TEXT_POOL,
                model=request.text_model,
                params=params,
                prompts=asked,
            ),
        )
        return film


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
