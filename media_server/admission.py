"""Which requests are taken: what the model or the service can never do is refused for good, a full queue for a while.

Invariants: the check and the row it admits share one transaction; a film's own shots are never refused, since the
film was admitted with them; where nothing is known of what a clip takes, only the number of jobs counts.
"""

import logging
from dataclasses import dataclass
from typing import Self

import sqlalchemy as sa

from media_server.errors import InvalidRequest, RateLimited
from media_server.jobs.database import Transaction
from media_server.jobs.place import Place, live_workers, place_of_next
from media_server.jobs.states import ACTIVE
from media_server.jobs.tables import jobs
from media_server.models.card import VideoCard, parse_size
from media_server.models.clip_request import ClipParams, Cost
from media_server.models.pricing import predict_cost
from media_server.settings import Settings

logger = logging.getLogger(__name__)

# a client is not sent away for longer: queues shorten by cancels too
_MAX_RETRY_S = 3600.0
# how long a job takes of which nothing is known, for who is told to come back
_UNKNOWN_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What is taken at most; None is no limit."""

    # predicted GPU seconds of one clip
    max_clip_cost_s: float | None = None
    # predicted seconds until a new job would start
    max_queue_wait_s: float | None = None
    # jobs of one owner that wait in one pool
    max_queue_jobs: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take them from the settings."""
        return cls(settings.max_clip_cost_s, settings.max_queue_wait_s, settings.max_queue_jobs)


def admit_clip(
    tx: Transaction, limits: Limits, card: VideoCard, params: ClipParams, *, owner_key_id: str | None, priority: int
) -> tuple[Cost, Place]:
    """Predict what a clip takes, and admit it to its place.

    Raises InvalidRequest if it never fits, RateLimited if the queue is too long now.
    """
    cost = predict_cost(tx, card, params)
    _check_cost(limits, card, params, cost)
    return cost, _check_queue(tx, limits, card.pool, owner_key_id, priority)


def admit_film(
    tx: Transaction,
    limits: Limits,
    card: VideoCard,
    shot: ClipParams,
    num_shots: int,
    *,
    owner_key_id: str | None,
    priority: int,
) -> Cost:
    """Predict what the shots of a film take, each like `shot`, and admit it.

    Raises InvalidRequest if a shot never fits, RateLimited if the queue of storyboards or of clips is too long now.
    """
    cost = predict_cost(tx, card, shot)
    _check_cost(limits, card, shot, cost)
    # the shots of films whose storyboards are being written stand in no queue yet
    to_come_s = _to_come_s(tx, card, owner_key_id) / live_workers(tx, card.pool)
    _check_queue(tx, limits, card.pool, owner_key_id, priority, further_s=to_come_s)
    return Cost(seconds=num_shots * cost.seconds, peak_memory_bytes=cost.peak_memory_bytes)


def admit_text(tx: Transaction, limits: Limits, pool: str, *, owner_key_id: str | None, priority: int) -> None:
    """Admit a job of words, of which no cost is known. Raises RateLimited if too many wait."""
    _check_queue(tx, limits, pool, owner_key_id, priority)


def _check_cost(limits: Limits, card: VideoCard, params: ClipParams, cost: Cost) -> None:
    """Raise InvalidRequest if a clip takes more memory than its device has, or more seconds than one clip may."""
    memory = card.machine.memory_bytes if card.machine is not None else 0
    if memory and cost.peak_memory_bytes > memory:
        rule = f"at most {_gib(memory)} GiB of memory on the model's device by prediction"
        _refuse_cost(card, params, rule, f"{_gib(cost.peak_memory_bytes)} GiB", is_memory=True)
    if limits.max_clip_cost_s is not None and cost.seconds > limits.max_clip_cost_s:
        rule = f"at most {limits.max_clip_cost_s:g} GPU seconds a clip by prediction"
        _refuse_cost(card, params, rule, f"{cost.seconds:.0f} s", is_memory=False)


def _refuse_cost(card: VideoCard, params: ClipParams, rule: str, predicted: str, *, is_memory: bool) -> None:
    """Blame the field that is furthest above the model's default."""
    defaults = card.defaults
    width, height = parse_size(card.size.default) or (params.width, params.height)
    excess: dict[str, float] = {
        "size": params.width * params.height / (width * height),
        "seconds": params.num_frames / max(1.0, defaults.seconds * card.fps),
    }
    if not is_memory:
        excess["num_inference_steps"] = params.num_inference_steps / defaults.num_inference_steps
    param = max(excess, key=lambda name: excess[name])
    value = getattr(params, param)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    logger.info("refused: %s of %s is predicted to take %s (%s)", param, card.name, predicted, rule)
    raise InvalidRequest(
        f"{param}: {rule}, got {shown}, which is predicted to take {predicted}.",
        code="cost_limit_exceeded",
        param=param,
        rule=rule,
        value=value,
    )


def _check_queue(
    tx: Transaction,
    limits: Limits,
    pool: str,
    owner_key_id: str | None,
    priority: int,
    *,
    further_s: float = 0.0,
) -> Place:
    place = place_of_next(tx, pool, owner_key_id, priority)
    if limits.max_queue_jobs is not None and place.waiting >= limits.max_queue_jobs:
        each_s = place.wait_s / place.ahead if place.wait_s is not None and place.ahead else _UNKNOWN_S
        rule = f"at most {limits.max_queue_jobs} jobs wait in a queue"
        _refuse_queue(pool, rule, place.waiting, retry_after_s=each_s)
    wait_s = (place.wait_s or 0.0) + further_s
    if limits.max_queue_wait_s is not None and place.wait_s is not None and wait_s > limits.max_queue_wait_s:
        rule = f"a predicted wait of at most {limits.max_queue_wait_s:g} s"
        _refuse_queue(pool, rule, round(wait_s), retry_after_s=wait_s - limits.max_queue_wait_s)
    return place


def _refuse_queue(pool: str, rule: str, value: int, *, retry_after_s: float) -> None:
    retry_after_s = min(max(retry_after_s, 1.0), _MAX_RETRY_S)
    logger.info("refused: queue %s is full (%s, got %d)", pool, rule, value)
    raise RateLimited(
        f"The queue is full: {rule}, got {value}. Try again in {retry_after_s:.0f} s.",
        code="queue_full",
        retry_after_s=retry_after_s,
        rule=rule,
        value=value,
    )


def _to_come_s(tx: Transaction, card: VideoCard, owner_key_id: str | None) -> float:
    """Add up what the owner's films take whose shots are not queued yet."""
    child = jobs.alias("child")
    is_unwritten = sa.exists().where(
        child.c.parent_id == jobs.c.id, child.c.kind == "storyboard", child.c.status.in_(ACTIVE)
    )
    query = sa.select(sa.func.sum(jobs.c.predicted_gpu_seconds)).where(
        jobs.c.kind == "film",
        jobs.c.status.in_(ACTIVE),
        jobs.c.model == card.name,
        jobs.c.queue_key == (owner_key_id or ""),
        is_unwritten,
    )
    return tx.conn.scalar(query) or 0.0


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f}"
