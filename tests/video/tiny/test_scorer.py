"""The scorer: right on drawn ground truth, at chance on other captions' clips, honest about what it cannot read."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from video.tiny.draw import covers, draw
from video.tiny.scorer import (
    Expected,
    Reading,
    Seen,
    assets,
    compare,
    expected_of,
    read,
    score,
    shipped_scorer,
    table,
)
from video.tiny.scorer_check import check, scores, shuffled
from video.tiny.scorer_degrade import degrade_clip
from video.tiny.scorer_motion import (
    CameraMove,
    Movement,
    components,
    direction,
    find_camera,
    find_movement,
    find_tracks,
)
from video.tiny.scorer_prompts import FIRST_SEED, make_prompts, read_prompts
from video.tiny.train_scorer import train
from video.tiny.world import compose, held_out_pairs, sample_scene

PROMPTS = assets() / "prompts.jsonl"


def share(found: Sequence[tuple[str, Mapping[str, bool]]], name: str) -> float:
    return sum(right[name] for _, right in found) / len(found)


def test_drawn_clips_are_read_right_and_other_captions_are_not() -> None:
    found = check(24, num_frames=25, height=96, width=96, strength=1.0)
    clean = scores(found.scenes, found.clean)
    damaged = scores(found.scenes, found.damaged)
    other = shuffled(found.scenes, found.clean)
    for name in ("color", "kind", "direction", "scene", "count"):
        assert share(clean, name) >= 0.95, name
    assert share(clean, "all") >= 0.9
    for name in ("color", "kind", "direction", "scene"):
        assert share(damaged, name) >= 0.8, name
        assert share(other, name) <= 0.35, name
    assert share(other, "all") == 0


def test_motion_is_measured_from_true_masks() -> None:
    wrong: list[str | list[str]] = []
    for seed in range(24):
        scene = sample_scene(3_500_000_000 + seed, "train")
        clip, (cover, _) = draw([scene], 25, 96, 160)[0], covers([scene], 25, 96, 160)
        found = F.avg_pool2d(cover[0].sum(0)[:, None].clamp(0, 1), 2)[:, 0]
        small = F.avg_pool2d(clip.permute(0, 3, 1, 2).float() / 255, 2)
        count, tracks = find_tracks(found)
        camera = find_camera(small, found) if scene.camera != "none" else find_camera(small[:1], found[:1])
        assert count == len(scene.things)
        wrong += [scene.camera] if camera.name != scene.camera else []
        if camera.name == scene.camera == "none":
            camera = CameraMove("none", torch.zeros(25), torch.ones(25))
        said = sorted(find_movement(track, small, camera).motion for track in tracks)
        wrong += [] if said == sorted(thing.motion for thing in scene.things) else [said]
    assert len(wrong) <= 1, wrong


def test_regions_are_told_apart() -> None:
    rows = ["##..#", "##..#", ".....", "#.###", "..#.#"]
    solid = torch.tensor([[[c == "#" for c in row] for row in rows]])
    labels = components(solid)[0]
    assert torch.equal(labels > 0, solid[0])
    assert len(labels[labels > 0].unique()) == 4
    assert labels[0, 0] == labels[1, 1] and labels[3, 2] == labels[4, 4] and labels[0, 4] != labels[3, 4]


def test_a_track_survives_a_frame_without_its_thing() -> None:
    found = torch.zeros(7, 48, 48)
    for f in range(7):
        found[f, 20:30, 5 + 4 * f : 15 + 4 * f] = 1
    found[3] = 0
    count, (track,) = find_tracks(found)
    assert count == 1 and track.seen.tolist() == [True] * 3 + [False] + [True] * 3
    expected = torch.tensor([(10 + 4 * f) / 48 for f in range(7)])
    assert torch.allclose(track.centre[track.seen, 0], expected[track.seen], atol=1e-4)
    assert torch.allclose(track.area[0], torch.tensor(100 / 48**2), rtol=1e-3)
    assert find_tracks(torch.zeros(7, 48, 48)) == (0, [])


def test_directions_are_named() -> None:
    ways = [(0.3, 0.1), (-0.3, 0.1), (0.1, 0.3), (0.1, -0.3)]
    assert [direction(x, y) for x, y in ways] == ["right", "left", "down", "up"]


def seen(kind: str, color: str, motion: str, x: float = 0.5, shift: float = 0.0) -> Seen:
    return Seen(kind, color, Movement(motion, shift, 0.0, 0.0, 0.0, 0.0), x, 0.5, 0.9, 0.9)


def test_a_reading_is_compared_thing_by_thing() -> None:
    wanted = Expected((("ball", "red", "left"), ("star", "blue", "still")), "sea", "left of")
    star, ball = seen("star", "blue", "still", 0.8), seen("ball", "red", "left", 0.2, -0.4)
    right = compare(Reading(2, (star, ball), "sea", "none"), wanted)
    assert all(right.values())
    swapped = Reading(2, (seen("star", "red", "still", 0.8), seen("ball", "blue", "left", 0.2, -0.4)), "sea", "none")
    assert not compare(swapped, wanted)["color"] and compare(swapped, wanted)["kind"]
    alone = compare(Reading(1, (ball,), "sea", "none"), wanted)
    assert not alone["color"] and not alone["kind"] and not alone["count"] and not alone["all"] and alone["scene"]
    empty = compare(Reading(0, (), "sea", "none"), wanted)
    assert [name for name, ok in empty.items() if ok] == ["scene"]


def test_the_slope_counts_for_direction_and_the_word_for_motion() -> None:
    wanted = Expected((("ball", "red", "right"),), "sea")
    odd = compare(Reading(1, (seen("ball", "red", "bouncing", shift=0.2),), "sea", "none"), wanted)
    assert odd["direction"] and not odd["motion"] and odd["all"]
    back = compare(Reading(1, (seen("ball", "red", "left", shift=-0.2),), "sea", "none"), wanted)
    assert not back["direction"] and not back["all"]


def test_a_table_counts_by_group() -> None:
    names = ("color", "kind", "direction", "motion", "scene", "count", "relation", "all")
    good, bad = dict.fromkeys(names, True), dict.fromkeys(names, False)
    lines = table([("train", good), ("train", bad), ("unseen", good)]).splitlines()
    assert lines[1].split() == ["train", "2", *["50.0"] * 8]
    assert lines[2].split() == ["unseen", "1", *["100.0"] * 8]
    assert lines[3].split() == ["total", "3", *["66.7"] * 8]


def test_what_is_no_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[F, H, W, 3\] uint8, got \[4, 96, 96, 4\]"):
        read(torch.zeros(4, 96, 96, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32"):
        read(torch.zeros(4, 96, 96, 3))
    with pytest.raises(ValueError, match="at least 2 frames"):
        read(torch.zeros(1, 96, 96, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="clips must be at least 1"):
        check(0)


def test_an_empty_clip_shows_nothing() -> None:
    reading = read(torch.full((9, 96, 96, 3), 238, dtype=torch.uint8))
    assert (reading.count, reading.things, reading.backdrop) == (0, (), "white")


def test_damage_is_the_same_for_a_seed_and_none_at_strength_0() -> None:
    clip = draw([sample_scene(1, "train")], 5, 96, 96)[0]
    assert torch.equal(degrade_clip(clip, 3), degrade_clip(clip, 3))
    assert not torch.equal(degrade_clip(clip, 3), degrade_clip(clip, 4))
    assert int((degrade_clip(clip, 3, strength=0.0).int() - clip.int()).abs().max()) <= 1


def test_the_prompts_are_the_ones_that_were_written_before_training() -> None:
    prompts = read_prompts(PROMPTS)
    assert prompts == make_prompts()
    assert len(prompts) == 200 == len({p.id for p in prompts})
    assert sum(p.split == "unseen" for p in prompts) == 100
    for prompt in prompts:
        assert bool(prompt.held_out) == (prompt.split == "unseen")
        scene = sample_scene(prompt.seed, prompt.split)
        assert prompt.seed >= FIRST_SEED and bool(held_out_pairs(scene)) == bool(prompt.held_out)
        first = scene.things[0]
        assert expected_of(prompt) == expected_of(scene)
        assert (first.kind, first.color, first.motion) == (prompt.kind, prompt.color, prompt.motion)
    assert sum(p.second_kind is None for p in prompts) >= 170


def test_a_broken_list_of_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for text in ("{", "[]", '{"id": "a"}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 of prompts\.jsonl is not a prompt"):
            read_prompts(file)


def test_the_weights_are_small() -> None:
    assert (assets() / "scorer.safetensors").stat().st_size <= 2**20
    assert sum(p.numel() for p in shipped_scorer().parameters()) < 400_000


def test_training_is_deterministic_and_refuses_nonsense() -> None:
    one, two = (train(2, 4, "cpu", seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ValueError, match="steps and batch must be at least 1, got 0 and 4"):
        train(0, 4, "cpu")


def test_score_reads_and_compares() -> None:
    scene = compose([("moon", "yellow", "large", "still")], "night", seed=2)
    right = score(draw([scene], 17, 96, 160)[0], scene)
    assert right["all"] and right["count"] and right["motion"]
