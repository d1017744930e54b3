"""What a clip is predicted to take: by the card's coefficients, set right by what finished clips of its kind took.

The coefficients are measured in seconds when the model is loaded, at one shape, and attention grows faster than they
say. So each prediction is scaled by the median of measured to predicted among the finished clips nearest to it in
price, of the same weights on the same machine, as soon as there are a few.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import sqlalchemy as sa

from media_server.jobs.database import Transaction
from media_server.jobs.states import Status
from media_server.jobs.tables import attempts, jobs
from media_server.models.card import VideoCard
from media_server.models.clip_request import ClipParams, Cost

# the latest finished clips are looked at, the nearest of them are used, and fewer than the least say nothing
_LOOK = 32
_NEAREST = 9
_LEAST = 3
# one forward a step in the place of two
_UNGUIDED = 0.5


@dataclass(frozen=True)
class Sample:
    """A finished clip: what the card says it takes, and what it took."""

    predicted: Cost
    seconds: float
    peak_memory_bytes: int | None


def estimate_cost(card: VideoCard, params: ClipParams) -> Cost:
    """Predict a clip's GPU seconds and peak memory from the card's coefficients alone; zero where they are unknown."""
    return _estimate(card, params.params())


def predict_cost(tx: Transaction, card: VideoCard, params: ClipParams) -> Cost:
    """Predict a clip's GPU seconds and peak memory from the card and the model's finished clips."""
    return correct(estimate_cost(card, params), read_samples(tx, card))


def predictions(cost: Cost) -> dict[str, Any]:
    """Give the members of a job's spec that say so; None where nothing is known."""
    return {
        "predicted_gpu_seconds": cost.seconds or None,
        "predicted_peak_memory_bytes": round(cost.peak_memory_bytes) or None,
    }


def correct(cost: Cost, samples: Sequence[Sample]) -> Cost:
    """Scale a prediction by how the nearest samples compare with theirs."""
    if cost.seconds <= 0 or len(samples) < _LEAST:
        return cost
    nearest = sorted(samples, key=lambda sample: abs(math.log(sample.predicted.seconds / cost.seconds)))[:_NEAREST]
    slowness = median(sample.seconds / sample.predicted.seconds for sample in nearest)
    peaks = [
        sample.peak_memory_bytes / sample.predicted.peak_memory_bytes
        for sample in nearest
        if sample.peak_memory_bytes is not None and sample.predicted.peak_memory_bytes > 0
    ]
    return Cost(
        seconds=cost.seconds * slowness,
        peak_memory_bytes=cost.peak_memory_bytes * (median(peaks) if len(peaks) >= _LEAST else 1.0),
    )


def read_samples(tx: Transaction, card: VideoCard) -> list[Sample]:
    """Read the latest clips that these weights made in one attempt on the machine that the card was measured on."""
    query = (
        sa.select(jobs.c.params, jobs.c.result, jobs.c.peak_memory_bytes, attempts.c.gpu_seconds)
        .join(attempts, sa.and_(attempts.c.job_id == jobs.c.id, attempts.c.attempt == jobs.c.winning_attempt))
        .where(
            jobs.c.kind == "video",
            jobs.c.model == card.name,
            jobs.c.status == Status.COMPLETED,
            jobs.c.deleted_at.is_(None),
            # a later attempt may have continued from finished segments
            jobs.c.winning_attempt == 1,
            attempts.c.gpu_seconds > 0,
        )
        .order_by(jobs.c.created_at.desc())
        .limit(_LOOK)
    )
    samples = []
    for row in tx.conn.execute(query):
        machine = ((row.result or {}).get("machine") or {}).get("name")
        is_same_machine = card.machine is None or machine is None or machine == card.machine.name
        if row.params.get("model_hash") != card.hash or not is_same_machine:
            continue
        predicted = _estimate(card, row.params)
        if predicted.seconds > 0:
            samples.append(Sample(predicted, row.gpu_seconds, row.peak_memory_bytes))
    return samples


def _estimate(card: VideoCard, params: Mapping[str, Any]) -> Cost:
    """Price the parameters of a clip, as its row has them."""
    width, height, cost = params["width"], params["height"], card.cost
    scales = (params["guidance_scale"], params.get("guidance_scale_2") or 0.0)
    per_step_token = cost.seconds_per_step_token * (1.0 if max(scales) > 1 else _UNGUIDED)
    seconds, most_tokens = 0.0, 0
    for num_frames in _pieces(card, params):
        latent_frames = (card.frames.fit(num_frames) - 1) // card.frames.temporal + 1
        tokens = latent_frames * (width // card.size.multiple_of) * (height // card.size.multiple_of)
        most_tokens = max(most_tokens, tokens)
        seconds += params["num_inference_steps"] * tokens * per_step_token
        seconds += card.frames.fit(num_frames) * width * height * cost.seconds_per_frame_pixel
    return Cost(
        seconds=cost.seconds_fixed + seconds,
        peak_memory_bytes=cost.bytes_fixed + most_tokens * cost.bytes_per_token,
    )


def _pieces(card: VideoCard, params: Mapping[str, Any]) -> list[int]:
    """Give the frames of each piece as generated: a continued one makes those that it takes over once more."""
    extend, is_continued = params.get("extend"), "video" in (params.get("inputs") or {})
    if extend is None:
        overlap = card.frames.temporal + 1 if "overlap" in card.conditions else 1
        return [params["num_frames"] + (overlap if is_continued else 0)]
    first, *rest = extend["segment_frames"]
    overlap = extend["overlap_frames"]
    return [first + (overlap if is_continued else 0), *(added + overlap for added in rest)]
