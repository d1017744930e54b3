"""The layout that the shipped denoiser is taught stays within the frame, on the grid, and says the same words."""

from dataclasses import replace

import pytest
import torch

from video.tiny import captions
from video.tiny.paths import poses
from video.tiny.settle import BOUNCES, COLUMNS, ROWS, settle
from video.tiny.train_small import is_taught
from video.tiny.world import compose, sample_scene

SCENES = [scene for seed in range(400) if is_taught(scene := sample_scene(seed, "train"))]


def test_settling_keeps_the_words_of_a_scene() -> None:
    for scene in SCENES:
        thing, settled = scene.things[0], settle(scene).things[0]
        assert (thing.kind, thing.color, thing.size, thing.motion) == (
            settled.kind,
            settled.color,
            settled.size,
            settled.motion,
        )
        assert captions.caption(scene, 3) == captions.caption(settle(scene), 3)


def test_a_settled_scene_settles_to_itself() -> None:
    for scene in SCENES:
        assert settle(settle(scene)) == settle(scene)


def test_a_settled_thing_starts_on_the_grid() -> None:
    for scene in SCENES:
        thing = settle(scene).things[0]
        assert thing.x * COLUMNS == pytest.approx(round(thing.x * COLUMNS))
        assert thing.y * 2 * ROWS == pytest.approx(round(thing.y * 2 * ROWS))


def test_a_settled_thing_stays_in_the_frame() -> None:
    things = [settle(scene).things[0] for scene in SCENES]
    path = poses(things, ["none"] * len(things), torch.linspace(0, 4, 65))
    high = path.radius
    assert (path.y - high).min() > -0.01 and (path.y + high).max() < 1.0
    assert path.x.min() > 0.15 and path.x.max() < 0.85


def test_bounces_repeat_from_latent_to_latent() -> None:
    thing = settle(compose([("ball", "red", "medium", "bouncing")], "blue", seed=4)).things[0]
    path = poses([thing], ["none"], torch.arange(33) / 16)
    assert BOUNCES == 1.0
    assert torch.allclose(path.y[0, :16], path.y[0, 16:32], atol=1e-5)


def test_two_things_and_moving_cameras_are_refused() -> None:
    scene = SCENES[0]
    with pytest.raises(ValueError, match="one thing"):
        settle(replace(scene, camera="pan left"))
