"""Drawing: ground truth against pixels, clean edges, batches and times that do not matter, bad input."""

import math

import pytest
import torch

from video.tiny.draw import covers, draw, truth
from video.tiny.vocabulary import BACKDROPS, KINDS, PLAIN_RGB, RGB
from video.tiny.world import Scene, Thing, compose, sample_scene

RED_ON_WHITE = Scene((Thing("ball", "red", "medium", "right", 0.2, 0.5, 0.2, 0.3, 0.6),), "white", "none", None, 1)


def redness(clip: torch.Tensor) -> torch.Tensor:
    """How much more red than green, 0..255: nothing before a white backdrop."""
    values = clip.float()
    return (values[..., 0] - values[..., 1]).clamp_min(0)


@pytest.mark.parametrize(("height", "width"), [(96, 96), (96, 160), (80, 128), (144, 256)])
def test_the_middle_and_the_size_are_those_worked_out_by_hand(height: int, width: int) -> None:
    clip = draw([RED_ON_WHITE], 17, height, width)[0]
    weight = (redness(clip) > 60).float()
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    area = weight.sum((1, 2))
    x = (weight * columns).sum((1, 2)) / area
    y = (weight * rows[:, None]).sum((1, 2)) / area
    time = torch.arange(17) / 16
    u = 0.3 * time / 0.6
    assert torch.allclose(x, (0.2 + 0.6 * u / (1 + u**3) ** (1 / 3)) * width, atol=0.3)
    assert torch.allclose(y, torch.full((17,), height / 2), atol=0.3)
    radius = 0.98 * 0.2 * min(height, width)
    assert torch.allclose(area, torch.full((17,), math.pi * radius**2), rtol=0.04)
    told = truth(RED_ON_WHITE, 17, height, width)
    assert torch.allclose(told.centre[0], torch.stack([x, y], dim=1), atol=0.3)
    both, either = told.masks[0] & weight.bool(), told.masks[0] | weight.bool()
    assert float(both.sum() / either.sum()) > 0.95


def test_truth_matches_the_pixels_of_every_kind() -> None:
    for kind in KINDS:
        scene = compose([(kind, "blue", "large", "up")], "white", seed=5)
        bare = Scene((Thing(kind, "white", "small", "still", -9, -9, 0.1),), "white", "none", None, 5)
        changed = (draw([scene], 9, 96, 160).int() - draw([bare], 9, 96, 160).int()).abs().sum(-1)[0] > 100
        told = truth(scene, 9, 96, 160).masks[0]
        assert float((changed == told).float().mean()) > 0.99, kind
        both = (changed & told).sum() / (changed | told).sum()
        assert float(both) > 0.85, kind
        rows = changed.any(2).float()
        assert abs(float(rows.argmax(1)[0]) - float(truth(scene, 9, 96, 160).box[0, 0, 1])) <= 1.5, kind


def test_edges_are_smooth_over_a_pixel_and_flat_elsewhere() -> None:
    thing = Thing("square", "black", "large", "still", 0.5, 0.5, 0.25)
    row = draw([Scene((thing,), "white", "none", None, 0)], 1, 96, 96)[0, 0, 48, :, 0].float()
    edge = 48 - 0.88 * 0.25 * 96
    outside, inside = row[int(edge) - 3], row[int(edge) + 3]
    assert abs(float(row[int(edge) - 1] - outside)) < 2
    cover = (outside - row[int(edge)]) / (outside - inside)
    assert abs(float(cover) - (1 - (edge - int(edge)))) < 0.12
    steps = draw([RED_ON_WHITE], 1, 96, 96)[0, 0].float().diff(dim=1).abs().sum(-1)
    partial = covers([RED_ON_WHITE], 1, 96, 96)[0][0, 0, 0]
    soft = ((partial > 0.02) & (partial < 0.98)).sum()
    assert 2 * math.pi * 18 * 0.7 < float(soft) < 2 * math.pi * 19.5 * 1.6
    assert float(steps.max()) < 600


def test_a_clip_depends_on_nothing_but_its_scene() -> None:
    scenes = [sample_scene(seed, "train") for seed in range(12)]
    batch = draw(scenes, 5, 96, 96)
    assert torch.equal(batch, draw(scenes, 5, 96, 96))
    for index, scene in enumerate(scenes):
        alone = draw([scene], 5, 96, 96)[0]
        assert int((alone.int() - batch[index].int()).abs().max()) <= 1


def test_a_later_start_continues_the_clip() -> None:
    scenes = [sample_scene(seed, "unseen") for seed in range(10)]
    whole, tail = draw(scenes, 9, 80, 128), draw(scenes, 4, 80, 128, start_frame=5)
    assert int((whole[:, 5:].int() - tail.int()).abs().max()) <= 1


def test_a_rate_is_a_rate() -> None:
    scenes = [sample_scene(seed, "train") for seed in range(6)]
    slow, fast = draw(scenes, 5, 96, 96, fps=8), draw(scenes, 9, 96, 96, fps=16)
    assert int((slow.int() - fast[:, ::2].int()).abs().max()) <= 1


def test_every_backdrop_shows_its_colours_and_only_scenes_differ_by_seed() -> None:
    for backdrop in BACKDROPS:
        away = Thing("ball", "red", "small", "still", -9, -9, 0.1)
        one, other = (draw([Scene((away,), backdrop, "none", None, seed)], 2, 96, 160)[0] for seed in (1, 2))
        if backdrop in PLAIN_RGB:
            assert torch.equal(one, other)
            middle = one[0, 40].float().mean(0)
            assert torch.allclose(middle, torch.tensor(PLAIN_RGB[backdrop]).float(), atol=4)
        else:
            assert not torch.equal(one, other)


def test_day_turns_to_night_and_the_camera_moves_what_is_behind() -> None:
    away = Thing("ball", "red", "small", "still", -9, -9, 0.1)
    dusk = draw([Scene((away,), "nightfall", "none", None, 1)], 33, 96, 160)[0].float().mean((1, 2, 3))
    assert dusk[0] > 120 and dusk[-1] < 70 and bool((dusk.diff() < 0.5).all())
    still, panned = (draw([Scene((away,), "city", c, None, 1)], 33, 96, 160)[0].float() for c in ("none", "pan right"))
    assert torch.equal(still[0], panned[0])
    assert torch.equal(still[0], still[32])
    # 0.11 of the width a second for two seconds, softly slowed: about 31 pixels
    errors = torch.stack([(panned[32, :, :100] - still[0, :, d : d + 100]).abs().mean() for d in range(60)])
    assert 27 <= int(errors.argmin()) <= 35


def test_what_is_seen_of_a_thing_at_the_edge_and_behind_another() -> None:
    half_out = Thing("square", "red", "medium", "still", 0.0, 0.5, 0.2)
    told = truth(Scene((half_out,), "white", "none", None, 0), 1, 96, 96)
    assert abs(float(told.visible[0, 0]) - 0.5) < 0.02
    assert float(told.box[0, 0, 0]) == 0
    away = truth(Scene((Thing("ball", "red", "small", "still", -9, -9, 0.1),), "white", "none", None, 0), 1, 96, 96)
    assert float(away.visible.max()) == 0 and not away.masks.any() and float(away.box.abs().max()) == 0
    behind, before = (Thing("square", c, "medium", "still", 0.5, 0.5, r) for c, r in (("red", 0.2), ("blue", 0.1)))
    told = truth(Scene((behind, before), "white", "none", "above", 0), 1, 96, 96)
    assert abs(float(told.visible[0, 0]) - 0.75) < 0.02 and float(told.visible[1, 0]) > 0.99
    assert not (told.masks[0] & told.masks[1]).any()


def test_things_stay_visible_for_five_seconds() -> None:
    for seed in range(40):
        scene = sample_scene(seed, "train")
        assert float(truth(scene, 81, 96, 96).visible.min()) > 0.6, scene


def test_a_thing_wears_its_colour() -> None:
    for color, rgb in RGB.items():
        scene = compose([("square", color, "large", "still")], "black" if color != "black" else "white")
        told = truth(scene, 1, 96, 96)
        mean = draw([scene], 1, 96, 96)[0, 0][told.masks[0, 0]].float().mean(0)
        nearest = min(RGB, key=lambda name: float((mean - torch.tensor(RGB[name]).float()).norm()))
        assert nearest == color, (color, rgb, mean)


@pytest.mark.parametrize(
    ("frames", "height", "width", "fps", "message"),
    [
        (0, 96, 96, 16, "num_frames and fps must be at least 1"),
        (5, 96, 96, 0, "num_frames and fps must be at least 1"),
        (5, 90, 96, 16, "multiples of 16, got 90x96"),
        (5, 96, 0, 16, "multiples of 16, got 96x0"),
    ],
)
def test_bad_sizes_are_refused(frames: int, height: int, width: int, fps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw([RED_ON_WHITE], frames, height, width, fps=fps)
    with pytest.raises(ValueError, match=message):
        truth(RED_ON_WHITE, frames, height, width, fps=fps)


def test_no_scenes_and_early_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one, got none"):
        draw([], 5, 96, 96)
    with pytest.raises(ValueError, match="start_frame at least 0"):
        draw([RED_ON_WHITE], 5, 96, 96, start_frame=-1)
