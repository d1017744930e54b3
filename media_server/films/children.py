"""A film's jobs, as its machine reads and makes them: storyboard, the clips of its shots, joining.

Invariant: what a film does next follows from the rows of its children alone.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from media_server.errors import MediaServerError
from media_server.jobs.database import Transaction
from media_server.jobs.rows import insert, select
from media_server.jobs.spec import Job, JobSpec
from media_server.jobs.tables import artifacts, jobs
from media_server.models.clip import ClipRequest, validate_clip
from media_server.models.pricing import predict_cost, predictions
from media_server.models.registry import find_card

TEXT_POOL = "text"
MEDIA_POOL = "media"


class StoryboardUnusable(Exception):
    """The storyboard cannot be filmed; the message says why, and is stored: it quotes no prompt."""


@dataclass(frozen=True)
class Shot:
    """A shot of the storyboard, with the latest of its clips."""

    index: int
    num_frames: int
    clip: Job | None
    retry: int


def list_children(tx: Transaction, film: Job) -> list[Job]:
    """Read a film's jobs in the order in which they were made."""
    return select(tx, sa.select(jobs).where(jobs.c.parent_id == film.id).order_by(jobs.c.created_at, jobs.c.id))


def list_shots(storyboard: dict[str, Any], children: list[Job]) -> list[Shot]:
    """Give the storyboard's shots, each with its latest clip.

    Raises StoryboardUnusable if one does not say its length.
    """
    latest: dict[int, Job] = {}
    for child in children:
        if child.kind == "video":
            index = child.params["film"]["shot"]
            if index not in latest or child.params["film"]["retry"] > latest[index].params["film"]["retry"]:
                latest[index] = child
    try:
        return [
            Shot(
                index=index,
                num_frames=int(shot["num_frames"]),
                clip=latest.get(index),
                retry=latest[index].params["film"]["retry"] if index in latest else 0,
            )
            for index, shot in enumerate(storyboard["shots"])
        ]
    except (KeyError, TypeError, ValueError):
        raise StoryboardUnusable("The storyboard lacks a shot's num_frames.") from None


def derive_seed(film_seed: int, shot: int, retry: int) -> int:
    """Give the seed of a shot's clip: the first 53 bits of SHA-256 over the three numbers."""
    digest = hashlib.sha256(f"{film_seed}:{shot}:{retry}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def insert_shot(tx: Transaction, film: Job, storyboard: dict[str, Any], index: int, retry: int) -> None:
    """Queue a clip of a shot. Raises StoryboardUnusable if the model cannot make it."""
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
        raise StoryboardUnusable(f"Shot {index + 1} cannot be made: {_rule_of(error)}.") from None
    insert(
        tx,
        child_spec(
            film,
            kind="video",
            pool=card.pool,
            model=card.name,
            params={**clip.params(), "film": {"shot": index, "retry": retry}},
            prompts=clip.prompts(),
            **predictions(predict_cost(tx, card, clip)),
        ),
    )


def _rule_of(error: MediaServerError | ValueError) -> str:
    """Say what a shot breaks, without the words that break it: the message is stored."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    if isinstance(error, MediaServerError):
        return f"{error.param}: {error.rule}" if error.param and error.rule else error.code
    return type(error).__name__


def insert_join(tx: Transaction, film: Job, storyboard: dict[str, Any], shots: list[Shot]) -> None:
    """Queue the joining of the shots' clips. Raises StoryboardUnusable if one has no video."""
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
            raise StoryboardUnusable(f"Shot {shot.index + 1} completed without a video.")
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
        child_spec(
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


def child_spec(film: Job, **members: Any) -> JobSpec:
    """Say what each of a film's jobs has of the film."""
    return JobSpec(
        priority=film.priority,
        owner_key_id=film.owner_key_id,
        parent_id=film.id,
        root_id=film.root_id,
        label=film.label,
        traceparent=film.traceparent,
        max_attempts=film.params["max_attempts"],
        retention_s=film.retention_s,
        answer_s=film.answer_s,
        **members,
    )
