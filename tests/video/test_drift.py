"""The look of frames, from pictures whose figures are known, and what counts as drifted."""

import pytest
import torch

from video.drift import Look, LookMeter, check_policy, compare
from video.errors import InvalidClip


def look_of(frames: torch.Tensor) -> Look:
    meter = LookMeter()
    for frame in frames:
        meter.add(frame[None])
    return meter.look()


def test_figures_of_known_pictures() -> None:
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).expand(2, 6, 8, 3)
    look = look_of(red)
    assert look.luma == pytest.approx(0.2126, abs=1e-6)
    assert look.saturation == pytest.approx(1.0, abs=1e-5)
    assert (look.clipped_dark, look.clipped_bright, look.sharpness) == pytest.approx((0, 0, 0), abs=1e-9)
    half = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    half[:, :, 2:] = 255
    look = look_of(half)
    assert (look.clipped_dark, look.clipped_bright, look.luma, look.saturation) == pytest.approx((0.5, 0.5, 0.5, 0))
    # the Laplacian at the four inner pixels is +1 beside the edge on the dark side, -1 on the bright one
    assert look.sharpness == pytest.approx(1.0)


def test_the_missions_failure_is_out_of_bounds_before_it_is_black() -> None:
    """Each segment a little darker, black after 25 s: five segments of five seconds."""
    torch.manual_seed(0)
    scene = torch.randint(60, 200, (1, 32, 48, 3)).float()
    reference = look_of(scene.to(torch.uint8))
    flagged = []
    for segment in range(6):
        darker = (scene * (1 - 0.2 * segment)).clamp(0, 255).to(torch.uint8)
        flagged.append("luma" in compare(reference, look_of(darker))["drifted"])
    assert flagged == [False, False, True, True, True, True]


def test_changes_are_reported_by_name() -> None:
    calm = Look(luma=0.5, saturation=0.4, clipped_dark=0.0, clipped_bright=0.0, sharpness=1e-3)
    assert compare(calm, calm)["drifted"] == []
    assert compare(calm, Look(0.5, 0.1, 0.0, 0.3, 5e-3))["drifted"] == ["saturation", "sharpness", "clipped_bright"]
    # grey stays grey: a ratio of two small saturations says nothing
    grey = Look(luma=0.5, saturation=0.01, clipped_dark=0.0, clipped_bright=0.0, sharpness=1e-3)
    assert compare(grey, Look(0.5, 0.03, 0.0, 0.0, 1e-3))["drifted"] == []


def test_policies_that_are_not_there_are_refused_by_name() -> None:
    check_policy("report")
    check_policy("stop")
    for policy in ("correct", "retry"):
        with pytest.raises(InvalidClip, match=f"on_drift: must be one of report, stop, got '{policy}'"):
            check_policy(policy)
