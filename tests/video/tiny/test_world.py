"""Scenes: a function of their seed, held-out pairs kept apart, things that stand out and stay in sight."""

import random

import pytest
import torch

from video.tiny.held_out import HELD_OUT
from video.tiny.paths import poses
from video.tiny.vocabulary import (
    BACKDROPS,
    CAMERAS,
    COLORS,
    HIDDEN_ON,
    KINDS,
    MOTIONS,
    PLAIN_RGB,
    PLAINS,
    RELATIONS,
    RGB,
    SIZES,
)
from video.tiny.world import Scene, Thing, compose, held_out_pairs, is_held_out, sample_scene

FPS = 16


def lab(rgb: tuple[int, int, int]) -> torch.Tensor:
    """Convert sRGB 0..255 to CIE Lab (D65), after IEC 61966-2-1 and CIE 15."""
    c = torch.tensor(rgb, dtype=torch.float64) / 255
    linear = torch.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    to_xyz = torch.tensor(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]],
        dtype=torch.float64,
    )
    xyz = to_xyz @ linear / torch.tensor([0.95047, 1.0, 1.08883], dtype=torch.float64)
    f = torch.where(xyz > (6 / 29) ** 3, xyz ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_a_seed_gives_one_scene() -> None:
    again = [sample_scene(seed, "train") for seed in range(50)]
    random.seed(1)
    torch.manual_seed(1)
    assert [sample_scene(seed, "train") for seed in range(50)] == again
    assert len(set(again)) == 50
    assert sample_scene(7, "train") != sample_scene(7, "unseen")


def test_training_never_draws_a_held_out_pair_and_unseen_always_does() -> None:
    for seed in range(20_000):
        scene = sample_scene(seed, "train")
        for thing in scene.things:
            for aspect, word in (("color", thing.color), ("motion", thing.motion), ("backdrop", scene.backdrop)):
                assert (thing.kind, aspect, word) not in HELD_OUT, scene
    for seed in range(1_000):
        assert held_out_pairs(sample_scene(seed, "unseen"))


def test_the_held_out_pairs_are_a_tenth_of_the_colours_and_some_of_the_rest() -> None:
    assert len(set(HELD_OUT)) == len(HELD_OUT)
    by_aspect = {aspect: [p for p in HELD_OUT if p.aspect == aspect] for aspect in ("color", "motion", "backdrop")}
    assert 0.10 <= len(by_aspect["color"]) / (len(KINDS) * len(COLORS)) <= 0.12
    assert len(by_aspect["motion"]) >= 5 and len(by_aspect["backdrop"]) >= 8
    for words in (KINDS, COLORS):
        assert all(sum(word in (p.kind, p.word) for p in by_aspect["color"]) <= 2 for word in words)


def test_every_word_and_every_other_pair_is_drawn() -> None:
    scenes = [sample_scene(seed, "train") for seed in range(12_000)]
    things = [(thing, scene) for scene in scenes for thing in scene.things]
    held_out = {(p.kind, p.word) for p in HELD_OUT if p.aspect == "color"}
    assert {(t.kind, t.color) for t, _ in things} == {(k, c) for k in KINDS for c in COLORS} - held_out
    held_out = {(p.kind, p.word) for p in HELD_OUT if p.aspect == "motion"}
    assert {(t.kind, t.motion) for t, _ in things} == {(k, m) for k in KINDS for m in MOTIONS} - held_out
    assert {t.size for t, _ in things} == set(SIZES)
    assert {s.backdrop for s in scenes} == set(BACKDROPS)
    assert {s.camera for s in scenes} == set(CAMERAS)
    assert {s.relation for s in scenes} == {None, *RELATIONS}
    assert 0.70 < sum(len(s.things) == 1 for s in scenes) / len(scenes) < 0.80
    assert 0.33 < sum(s.backdrop in PLAINS for s in scenes) / len(scenes) < 0.47


def test_colours_are_well_apart() -> None:
    colors = {name: lab(rgb) for name, rgb in RGB.items()}
    for a in COLORS:
        assert all(float((colors[a] - colors[b]).norm()) > 30 for b in COLORS if a != b)
        for plain in PLAINS:
            if a not in HIDDEN_ON[plain]:
                assert float((colors[a] - lab(PLAIN_RGB[plain])).norm()) > 30, (a, plain)


def test_a_thing_never_has_a_colour_that_its_backdrop_hides() -> None:
    for seed in range(3_000):
        for split in ("train", "unseen"):
            scene = sample_scene(seed, split)
            assert all(thing.color not in HIDDEN_ON[scene.backdrop] for thing in scene.things)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 5.0])
def test_motion_reads_at_once_and_stays_in_sight(seconds: float) -> None:
    times = torch.arange(int(seconds * FPS) + 1) / FPS
    for seed in range(600):
        scene = sample_scene(seed, "train")
        pose = poses(scene.things, [scene.camera] * len(scene.things), times)
        assert float(torch.stack([pose.x, pose.y]).min()) > 0.02, scene
        assert float(torch.stack([pose.x, pose.y]).max()) < 0.98, scene
        for axis in (pose.x, pose.y):
            assert float(axis.diff(dim=1).abs().max()) <= 0.1, scene
        for thing, x, y, radius in zip(scene.things, pose.x, pose.y, pose.radius, strict=True):
            if scene.camera != "none":
                continue
            way = {"left": x[0] - x[-1], "right": x[-1] - x[0], "up": y[0] - y[-1], "down": y[-1] - y[0]}
            if thing.motion in way:
                assert float(way[thing.motion]) > (0.22 if seconds == 1 else 0.3), scene
            if thing.motion == "growing":
                assert float(radius[-1] / radius[0]) > (1.15 if seconds == 1 else 1.28), scene
            if thing.motion == "shrinking":
                assert float(radius[-1] / radius[0]) < (0.87 if seconds == 1 else 0.77), scene
            if thing.motion == "bouncing":
                assert float(y.max() - y.min()) > 0.2, scene


def test_two_things_stand_as_the_relation_says_and_never_touch() -> None:
    times = torch.arange(5 * FPS + 1) / FPS
    for seed in range(2_000):
        scene = sample_scene(seed, "train")
        if scene.relation is None:
            continue
        pose = poses(scene.things, [scene.camera] * 2, times)
        x, y = pose.x[1] - pose.x[0], pose.y[1] - pose.y[0]
        ahead = {"left of": x, "right of": -x, "above": y, "below": -y}[scene.relation]
        if scene.relation in ("left of", "right of"):
            assert float(ahead.min()) > 0.25, scene
        else:
            assert float(ahead[0]) > 0.25, scene
        # whole radii apart in a square frame, where it is tightest
        assert float((torch.hypot(x, y) - 0.9 * pose.radius.sum(0)).min()) > 0, scene


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "dog"), ("color", "beige"), ("size", "huge"), ("motion", "sideways")]
)
def test_unknown_words_of_things_are_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be one of .* got '{value}'"):
        Thing(**{"kind": "ball", "color": "red", "size": "small", "motion": "still", field: value})  # type: ignore[arg-type]


def test_malformed_scenes_are_refused() -> None:
    ball = Thing("ball", "red", "small", "still")
    with pytest.raises(ValueError, match="backdrop"):
        Scene((ball,), "desert", "none", None, 0)
    with pytest.raises(ValueError, match="camera"):
        Scene((ball,), "day", "roll", None, 0)
    with pytest.raises(ValueError, match="holds 1 or 2, got 3"):
        Scene((ball,) * 3, "day", "none", None, 0)
    with pytest.raises(ValueError, match="relation"):
        Scene((ball, ball), "day", "none", None, 0)
    with pytest.raises(ValueError, match="relation"):
        Scene((ball, ball), "day", "none", "behind", 0)
    with pytest.raises(ValueError, match="split"):
        sample_scene(0, "test")
    with pytest.raises(ValueError, match="seed: must be at least 0, got -1"):
        sample_scene(-1, "train")


def test_compose_lays_out_what_it_is_told() -> None:
    scene = compose([("car", "red", "large", "left")], "city", seed=3)
    assert (scene.things[0].kind, scene.things[0].motion, scene.backdrop) == ("car", "left", "city")
    assert scene.things[0].x > 0.5
    assert scene == compose([("car", "red", "large", "left")], "city", seed=3)
    assert not is_held_out(compose([("ball", "red", "medium", "bouncing")], "blue"))
