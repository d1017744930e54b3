"""Hold the scorer to drawn ground truth: `python -m video.tiny.scorer_check [--clips N] [--frames F] [--size HxW]`.

Three tables: clips as drawn, the same damaged as a small autoencoder and a diffusion model do, and the clean readings
against captions of other clips (chance).
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from video.tiny.draw import draw
from video.tiny.scorer import Reading, compare, expected_of, read, shipped_scorer, table
from video.tiny.scorer_degrade import degrade_clip
from video.tiny.scorer_net import Scorer, load_scorer
from video.tiny.vocabulary import SPLITS
from video.tiny.world import Scene, sample_scene

FIRST_SEED = 3_000_000_000  # neither the video model nor the scorer is trained on scenes from here on


@dataclass(frozen=True)
class Check:
    """What was read of each scene, as drawn and damaged."""

    scenes: tuple[Scene, ...]
    clean: tuple[Reading, ...]
    damaged: tuple[Reading, ...]


def check(
    clips: int,
    num_frames: int = 33,
    height: int = 96,
    width: int = 160,
    strength: float = 1.0,
    scorer: Scorer | None = None,
) -> Check:
    """Draw and read clips, half of them of unseen combinations.

    Args:
        clips: at least 1.
        num_frames, height, width: of each clip, as `draw` takes them.
        strength: of the damage; 1 is what the scorer was trained for, 0 leaves the damaged readings out.
        scorer: the networks; those shipped unless given.
    """
    if clips < 1:
        raise ValueError(f"check: clips must be at least 1, got {clips}")
    networks = scorer or shipped_scorer()
    scenes = [sample_scene(FIRST_SEED + index, SPLITS[index % 2]) for index in range(clips)]
    clean, damaged = [], []
    for index, scene in enumerate(scenes):
        clip = draw([scene], num_frames, height, width)[0]
        clean.append(read(clip, networks))
        if strength > 0:
            damaged.append(read(degrade_clip(clip, index, strength), networks))
    return Check(tuple(scenes), tuple(clean), tuple(damaged))


def scores(scenes: Sequence[Scene], readings: Sequence[Reading]) -> list[tuple[str, Mapping[str, bool]]]:
    """Compare readings with scenes, grouped by the number of things."""
    return [
        ("one" if scene.relation is None else "two", compare(reading, expected_of(scene)))
        for scene, reading in zip(scenes, readings, strict=True)
    ]


def shuffled(scenes: Sequence[Scene], readings: Sequence[Reading]) -> list[tuple[str, Mapping[str, bool]]]:
    """Compare each reading with another scene of as many things."""
    order = list(range(len(scenes)))
    random.Random(0).shuffle(order)
    by_count = sorted(order, key=lambda index: len(scenes[index].things))
    partners = dict(zip(by_count, by_count[1:] + by_count[:1], strict=True))
    return scores([scenes[partners[index]] for index in range(len(scenes))], readings)


def confusions(scenes: Sequence[Scene], readings: Sequence[Reading]) -> Counter[str]:
    """Count what single things were taken for, wherever that was wrong."""
    wrong: Counter[str] = Counter()
    for scene, reading in zip(scenes, readings, strict=True):
        if scene.relation is not None or not reading.things:
            continue
        thing, seen = scene.things[0], reading.things[0]
        pairs = [(thing.kind, seen.kind), (thing.color, seen.color), (thing.motion, seen.motion)]
        pairs += [(scene.backdrop, reading.backdrop), (scene.camera, reading.camera)]
        wrong.update(f"{true} read as {said}" for true, said in pairs if true != said)
    return wrong


def main(argv: Sequence[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="scorer_check", description="Hold the scorer to drawn ground truth.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--size", default="96x160")
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--weights", type=Path)
    options = parser.parse_args(argv)
    height, width = (int(side) for side in options.size.split("x"))
    torch.set_num_threads(1)
    scorer = load_scorer(options.weights) if options.weights else None
    found = check(options.clips, options.frames, height, width, options.strength, scorer)
    print("as drawn\n" + table(scores(found.scenes, found.clean)))
    print(dict(confusions(found.scenes, found.clean).most_common(12)))
    if found.damaged:
        print("damaged\n" + table(scores(found.scenes, found.damaged)))
        print(dict(confusions(found.scenes, found.damaged).most_common(12)))
    print("against the captions of other clips\n" + table(shuffled(found.scenes, found.clean)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
