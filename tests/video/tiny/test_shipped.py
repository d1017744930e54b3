"""The weights in assets/tiny_wan: small, whole, and they do what prompts say, by the scorer and above a floor."""

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from video.checkpoints import Checkpoint, load_checkpoint
from video.conditions import Given
from video.tiny.draw import draw
from video.tiny.score import generate_clip, is_taught
from video.tiny.scorer import assets, read, score
from video.tiny.scorer_prompts import read_prompts
from video.tiny.world import compose

FOLDER = assets().parent / "tiny_wan"
CARD = json.loads((FOLDER / "card.json").read_text())
# measured on all prompts that were taught: see assets/tiny_wan/ORIGIN.md; the floors leave room for twenty of them
FLOORS = {"color": 0.75, "kind": 0.45, "scene": 0.85, "direction": 0.45}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(FOLDER)


def make(checkpoint: Checkpoint, prompt: str, seed: int, given: Given | None = None) -> Tensor:
    scale = CARD["defaults"]["guidance_scale"]
    return generate_clip(checkpoint, CARD, prompt, seed, num_frames=17, steps=10, scale=scale, given=given)


def share(answers: Sequence[dict[str, bool]], name: str) -> float:
    return sum(answer[name] for answer in answers) / len(answers)


def test_the_checkpoint_is_small_and_says_what_it_is() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 30_000_000
    assert CARD["license"] == "Apache-2.0"
    log = [json.loads(line) for line in (FOLDER / "training.jsonl").read_text().splitlines()]
    assert {"autoencoder", "text", "encoded", "transformer"} <= {line["stage"] for line in log}


def test_it_does_what_prompts_say(checkpoint: Checkpoint) -> None:
    taught = [(seed, p) for seed, p in enumerate(read_prompts(assets() / "prompts.jsonl")) if is_taught(p, CARD)]
    chosen = [taught[index * len(taught) // 20] for index in range(20)]
    answers = [score(make(checkpoint, prompt.prompt, seed), prompt) for seed, prompt in chosen]
    reached = {name: share(answers, name) for name in FLOORS}
    assert all(reached[name] >= floor for name, floor in FLOORS.items()), reached


def test_it_goes_on_from_a_first_frame(checkpoint: Checkpoint) -> None:
    first = draw([compose([("ball", "red", "large", "still")], "blue", seed=5)], 1, 96, 160)[0]
    clip = make(checkpoint, "a large red ball standing still on a blue background", 3, Given(start=first))
    error = (clip[0].float() - first[0].float()).square().mean()
    assert -10 * torch.log10(error / 255**2) > 24
    seen = read(clip)
    assert (seen.things[0].color, seen.backdrop) == ("red", "blue")
