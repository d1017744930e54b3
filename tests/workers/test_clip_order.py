"""What the GPU program is told: the job's own words and numbers, and how long it may be silent."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from media_server.jobs import store
from media_server.jobs.spec import Job, JobSpec
from media_server.models.card import VideoCard, parse_card
from tests.fresh_database import open_migrated
from tests.workers.test_video_worker import CARD, PARAMS
from workers.clip_order import OrderError, make_order, predict_longest_s


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A clip of 9 frames of 64x64 in twelve segments with words of their own."""
    db = open_migrated(f"sqlite:///{tmp_path / 'jobs.db'}")
    texts = {f"segment.{index}": f"then {index}" for index in range(12)}
    spec = JobSpec(
        kind="video", pool="video", model="fake-wan", params=PARAMS, prompts={"prompt": "a", **texts, "other": "b"}
    )
    made = store.submit(db, spec)
    db.close()
    return made


def _card(**changes: Any) -> VideoCard:
    card = parse_card({**CARD, **changes})
    assert isinstance(card, VideoCard)
    return card


def test_an_order_has_what_the_job_has_and_defaults_of_the_card(job: Job) -> None:
    order = make_order(job, _card())
    asked = {name: value for name, value in PARAMS.items() if name != "inputs"}
    assert asked.items() <= order.items()
    assert (order["prompt"], order["negative_prompt"], order["scheduler"]) == ("a", "", "unipc")
    # the tenth segment comes after the ninth, not after the first
    assert order["segment_prompts"] == [f"then {index}" for index in range(12)]


@pytest.mark.parametrize(("conditions", "overlap"), [(["text", "overlap"], 5), (["text", "first_frame"], 1)])
def test_a_clip_that_is_continued_says_how_much_it_takes_over(job: Job, conditions: list[str], overlap: int) -> None:
    continued = dataclasses.replace(job, params={**job.params, "inputs": {"video": "video_x/inputs/video.mp4"}})
    assert make_order(continued, _card(conditions=conditions))["extend"] == {"overlap_frames": overlap}


def test_what_cannot_be_ordered_is_said(job: Job) -> None:
    with pytest.raises(OrderError, match="This pool serves other, not fake-wan"):
        make_order(job, _card(name="other"))
    with pytest.raises(OrderError, match="prompt has been erased"):
        make_order(dataclasses.replace(job, prompts={}), _card())


def test_the_longest_piece_is_a_step_or_the_encoding_of_what_is_given(job: Job) -> None:
    # 64x64 pixels of 9 frames are 3 latent frames of 16 tokens, at 0.1 s each; 9 * 4096 pixels at 1 ms
    card = _card(cost={"seconds_per_step_token": 0.1, "seconds_per_frame_pixel": 1e-3})
    assert predict_longest_s(job, card) == pytest.approx(4.8)
    given = dataclasses.replace(job, params={**job.params, "inputs": {"first_frame": "x"}})
    assert predict_longest_s(given, card) == pytest.approx(36.864)
    slow_text = _card(cost={"seconds_fixed": 9.0, "seconds_per_step_token": 0.1})
    assert predict_longest_s(job, slow_text) == 9.0
