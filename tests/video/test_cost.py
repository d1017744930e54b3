"""Cost coefficients, the progress predicted from them, and the card that carries them."""

import json
from pathlib import Path

import pytest
import torch

from media_server.models.card import VideoCard, parse_card
from media_server.models.clip import ClipRequest, validate_clip
from media_server.models.pricing import estimate_cost
from video import cost as cost_module
from video.card import derive_card, make_card
from video.checkpoints import load_checkpoint
from video.cost import Cost, Pace, Shape, fit_memory, measure_cost
from video.errors import CheckpointError
from video.tiny.model import Layout, random_checkpoint

COST = Cost(
    seconds_fixed=1.0, seconds_per_step_token=0.01, seconds_per_frame_pixel=0.001, bytes_fixed=0, bytes_per_token=0
)


def test_progress_follows_the_predicted_seconds() -> None:
    """One segment: 1 s of text, 10 steps of 100 tokens (10 s), 10 frames of 1000 pixels (8 s decoded, 2 s written)."""
    now = [100.0]
    pace = Pace(COST, segments=[(100, 10)], num_steps=10, pixels=1000, num_frames=10, clock=lambda: now[0])
    assert pace.at(0, "encode_prompt", 0, 1) == pytest.approx((0.0, 21.0))
    assert pace.at(0, "denoise", 0, 10)[0] == pytest.approx(100 / 21)
    # half as fast as predicted: 6 s of work took 12
    now[0] = 112.0
    progress, eta_s = pace.at(0, "denoise", 5, 10)
    assert progress == pytest.approx(600 / 21)
    assert eta_s == pytest.approx(30.0)
    assert pace.at(0, "decode", 5, 10)[0] == pytest.approx(100 * (1 + 10 + 4) / 21)
    assert pace.at(0, "encode_video", 10, 10) == pytest.approx((100.0, 0.0))


def test_segments_that_are_taken_over_count_as_done_and_not_as_speed() -> None:
    now = [0.0]
    pace = Pace(COST, segments=[(100, 10), (100, 10)], num_steps=10, pixels=1000, num_frames=20, clock=lambda: now[0])
    total = 1 + 2 * (10 + 8) + 4
    pace.skip(0)
    now[0] = 5.5
    progress, eta_s = pace.at(1, "denoise", 5, 10)
    # done: half the text's second each, the first segment, half of the second's steps
    assert progress == pytest.approx(100 * (1 + 18 + 5) / total)
    assert eta_s == pytest.approx(total - 24)


def test_a_measured_card_prices_clips(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(random_checkpoint(tmp_path, "ti2v"))
    card_values = derive_card(checkpoint)
    card_values["size"] |= {"default": "64x48", "min": [32, 32]}
    card_values["frames"] |= {"default": 9, "max": 33}
    (tmp_path / "card.json").write_text(json.dumps({**card_values, "name": "x", "pool": "y", "hash": "z"}))
    card = parse_card(make_card(load_checkpoint(tmp_path), "tiny", "video"))
    assert isinstance(card, VideoCard)
    assert (card.name, card.hash, card.layout) == ("tiny", checkpoint.weights_hash, "wan-ti2v")
    assert card.machine is not None
    assert card.machine.name and card.machine.memory_bytes > 1 << 28
    short, long = (
        estimate_cost(card, validate_clip(card, ClipRequest(prompt="a", num_frames=frames, num_inference_steps=4)))
        for frames in (5, 33)
    )
    assert 0 < short.seconds < long.seconds
    assert card.cost.bytes_fixed <= short.peak_memory_bytes <= long.peak_memory_bytes


def test_a_shape_that_is_too_slow_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(random_checkpoint(tmp_path, "ti2v"))
    measured: list[Shape] = []

    def measure(_: object, shape: Shape, __: float) -> tuple[float, float]:
        measured.append(shape)
        # a step of one second
        return 1.0 / checkpoint.num_tokens(shape.num_frames, shape.height, shape.width), 1e-6

    monkeypatch.setattr(cost_module, "_measure", measure)
    cost = measure_cost(checkpoint, Shape(64, 64, 5), Shape(832, 480, 81), 3.0)
    # 32 tokens, then the next one could take 16 times as long: twice 16 s is too much
    assert measured == [Shape(64, 64, 5)]
    assert cost.seconds_per_step_token == pytest.approx(1 / 32)
    measured.clear()
    monkeypatch.setattr(cost_module, "MAX_WARM_UP_S", 1e9)
    measure_cost(checkpoint, Shape(64, 64, 5), Shape(832, 480, 81), 3.0)
    assert (measured[0], measured[-1]) == (Shape(64, 64, 5), Shape(832, 480, 81))
    tokens = [checkpoint.num_tokens(shape.num_frames, shape.height, shape.width) for shape in measured]
    assert tokens == sorted(tokens) and all(shape.num_frames % 4 == 1 for shape in measured)


@pytest.mark.parametrize(
    ("layout", "conditions"),
    [("t2v", ["text"]), ("ti2v", ["text", "first_frame"]), ("a14b-i2v", ["first_frame", "last_frame"])],
)
def test_a_model_without_a_card_gets_one(tmp_path: Path, layout: Layout, conditions: list[str]) -> None:
    checkpoint = load_checkpoint(random_checkpoint(tmp_path, layout))
    derived = derive_card(checkpoint)
    card = parse_card({**derived, "name": "x", "pool": "video", "hash": checkpoint.weights_hash, "layout": "wan"})
    assert isinstance(card, VideoCard)
    assert card.conditions == conditions
    assert card.size.multiple_of == 16
    assert str(tmp_path) not in str(derived)


def test_a_card_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "ti2v")
    for content, message in (
        ('{"v": 2, "kind": "video"}', "video card of version 1"),
        ('{"v": 1, "kind": "video"}', "lacks"),
    ):
        (folder / "card.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            make_card(load_checkpoint(folder), "x", "video")


def test_memory_is_the_line_through_the_smallest_and_the_largest_shape() -> None:
    """A workspace of 1000 bytes that every clip needs is no matter of tokens: 3 bytes each are."""
    assert fit_memory([(100, 1300), (200, 1650), (400, 2200)]) == (1000.0, 3.0)
    # one shape says nothing of another; a peak that does not rise costs nothing more
    assert fit_memory([(100, 1300)]) == (1300.0, 0.0)
    assert fit_memory([(100, 1300), (200, 1300)]) == (1300.0, 0.0)


def test_a_container_has_its_share_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cost_module, "_CGROUP_MEMORY", limit)
    whole = cost_module.device_memory_bytes(torch.device("cpu"))
    assert whole > 1 << 28
    limit.write_text("max\n")
    assert cost_module.device_memory_bytes(torch.device("cpu")) == whole
    limit.write_text("1048576\n")
    assert cost_module.device_memory_bytes(torch.device("cpu")) == 1 << 20
