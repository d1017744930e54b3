"""Predictions: the card's figures, and how finished clips set them right."""

from typing import Any

import pytest

from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.spec import JobSpec, Result
from media_server.models.card import Machine, VideoCard
from media_server.models.clip import ClipParams, ClipRequest, validate_clip
from media_server.models.clip_request import Cost
from media_server.models.pricing import Sample, correct, estimate_cost, predict_cost, predictions, read_samples


def _params(card: VideoCard, **fields: Any) -> ClipParams:
    return validate_clip(card, ClipRequest(**{"prompt": "a", "num_frames": 33, "seed": 1, **fields}))


def _make(db: Database, card: VideoCard, *, slowness: float, machine: str = "H200", **fields: Any) -> str:
    """Put a finished clip into the database that took `slowness` times what the card says."""
    params = _params(card, **fields)
    price = estimate_cost(card, params)
    spec = JobSpec(kind="video", pool="video", model=card.name, params=params.params(), prompts=params.prompts())
    job = store.submit(db, spec)
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    result = Result(
        result={"machine": {"name": machine}},
        gpu_seconds=slowness * price.seconds,
        peak_memory_bytes=round(2 * price.peak_memory_bytes),
    )
    assert claims.complete(db, claim, result)
    return job.id


def _seconds(db: Database, card: VideoCard, **fields: Any) -> float:
    with db.read() as tx:
        return predict_cost(tx, card, _params(card, **fields)).seconds


def test_a_continued_clip_makes_again_what_it_takes_over(card: VideoCard) -> None:
    with_overlap = card.model_copy(update={"conditions": ["text", "overlap"]})
    inputs = {"video": "video_x/inputs/video.mp4"}
    # 28 frames after an overlap of 5: 33 as generated, 9 latent frames of 60 tokens
    continued = estimate_cost(with_overlap, _params(with_overlap, num_frames=28, inputs=inputs))
    assert continued == estimate_cost(with_overlap, _params(with_overlap, num_frames=33))


def test_a_clip_without_guidance_takes_one_forward_a_step(card: VideoCard) -> None:
    two = estimate_cost(card, _params(card, guidance_scale=4.0))
    one = estimate_cost(card, _params(card, guidance_scale=1.0))
    assert two.seconds - one.seconds == pytest.approx(8 * 540 * 0.001 / 2)


def test_without_finished_clips_the_card_speaks(db: Database, card: VideoCard) -> None:
    price = estimate_cost(card, _params(card)).seconds
    assert _seconds(db, card) == price
    _make(db, card, slowness=3.0)
    _make(db, card, slowness=3.0)
    # two may be an accident
    assert _seconds(db, card) == price
    _make(db, card, slowness=3.0)
    assert _seconds(db, card) == pytest.approx(3 * price)


def test_the_median_of_the_nearest_counts(db: Database, card: VideoCard) -> None:
    """Small clips take what the card says, large ones twice that; one in between was disturbed."""
    for _ in range(9):
        _make(db, card, slowness=1.0, num_frames=5)
        _make(db, card, slowness=2.0, num_frames=57, num_inference_steps=50)
    _make(db, card, slowness=50.0, num_frames=9)
    small, large = _params(card, num_frames=9), _params(card, num_frames=57, num_inference_steps=40)
    with db.read() as tx:
        assert predict_cost(tx, card, small).seconds == pytest.approx(estimate_cost(card, small).seconds)
        cost = predict_cost(tx, card, large)
    assert cost.seconds == pytest.approx(2 * estimate_cost(card, large).seconds)
    assert cost.peak_memory_bytes == pytest.approx(2 * estimate_cost(card, large).peak_memory_bytes, rel=1e-3)


def test_other_weights_machines_and_deleted_clips_say_nothing(db: Database, card: VideoCard) -> None:
    here = card.model_copy(update={"machine": Machine(name="H200", memory_bytes=0)})
    price = estimate_cost(card, _params(card)).seconds
    for _ in range(3):
        _make(db, here.model_copy(update={"hash": "sha256:other"}), slowness=5.0)
        _make(db, here.model_copy(update={"name": "another"}), slowness=5.0)
        _make(db, here, slowness=5.0, machine="x86_64")
        store.delete(db, _make(db, here, slowness=5.0))
    assert _seconds(db, here) == price
    with db.read() as tx:
        assert read_samples(tx, here) == []
        # a card from before there were machines takes all of its own
        assert len(read_samples(tx, card)) == 3


def test_what_is_not_known_is_not_said(card: VideoCard) -> None:
    unknown = card.model_copy(update={"cost": type(card.cost)()})
    cost = estimate_cost(unknown, _params(unknown))
    assert predictions(cost) == {"predicted_gpu_seconds": None, "predicted_peak_memory_bytes": None}
    sample = Sample(predicted=Cost(seconds=1.0, peak_memory_bytes=0.0), seconds=2.0, peak_memory_bytes=None)
    assert correct(cost, [sample] * 9) == cost
    assert correct(Cost(seconds=3.0, peak_memory_bytes=7.0), [sample] * 9) == Cost(seconds=6.0, peak_memory_bytes=7.0)
