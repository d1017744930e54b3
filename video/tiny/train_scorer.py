"""Train the scorer's networks on drawn, damaged frames: `python -m video.tiny.train_scorer --out FILE`.

Deterministic for one device and thread count. 1200 steps of 24 frames take about ten minutes of one core; on a GPU
`--device cuda --steps 600 --batch 64` shows it more frames in about a minute.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from video.tiny.backdrops import NIGHTFALL_S
from video.tiny.draw import covers, draw
from video.tiny.scorer_degrade import degrade, draw_damage
from video.tiny.scorer_net import LOOKS, Scorer, cut_out, mask_boxes, save_scorer
from video.tiny.vocabulary import COLORS, KINDS, SPLITS
from video.tiny.world import Scene, sample_scene

FIRST_SEED = 1_000_000_000  # scenes of the scorer; the video model's training draws lower seeds
SHAPES = ((96, 160), (96, 96), (96, 160), (96, 176))


def train(steps: int, batch: int, device: str, seed: int = 0, threads: int = 1) -> Scorer:
    """Train from scratch.

    Args:
        steps: of the optimiser, at least 1.
        batch: frames a step, at least 1; each from a scene of its own.
        device: "cpu" or "cuda".
        seed: of weights, scenes and damage.
        threads: of the CPU.
    """
    if steps < 1 or batch < 1:
        raise ValueError(f"train: steps and batch must be at least 1, got {steps} and {batch}")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    scorer = Scorer().to(device)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.15)
    damage_generator = torch.Generator().manual_seed(seed)
    grain_generator = torch.Generator(device).manual_seed(seed)
    started = time.monotonic()
    for step in range(steps):
        first = FIRST_SEED + seed * 100_000_000 + step * batch
        scenes = [sample_scene(first + i, SPLITS[i % 2]) for i in range(batch)]
        losses = _losses(scorer, scenes, step, device, damage_generator, grain_generator)
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            values = {name: round(float(loss.detach()), 4) for name, loss in losses.items()}
            print(json.dumps({"step": step, "seconds": round(time.monotonic() - started, 1), **values}), flush=True)
    scorer.eval()
    return scorer


def _losses(
    scorer: Scorer,
    scenes: Sequence[Scene],
    step: int,
    device: str,
    damage_generator: torch.Generator,
    grain_generator: torch.Generator,
) -> dict[str, Tensor]:
    """Draw one frame of each scene, damage it, and compare what the networks say with the truth."""
    height, width = SHAPES[step % len(SHAPES)]
    draws = torch.rand(2, generator=damage_generator)
    start, fps = int(draws[0] * 24), 6 + int(draws[1] * 4)
    clips = draw(scenes, 2, height, width, fps=fps, device=device, start_frame=start)
    cover, area = covers(scenes, 1, height, width, fps=fps, device=device, start_frame=start)
    frames = clips.permute(1, 0, 4, 2, 3).float() / 255
    damage = draw_damage(len(scenes), damage_generator)
    images, cover = degrade(frames[0], frames[1], cover[:, :, 0], damage, grain_generator)
    small = F.avg_pool2d(cover, 2)
    target = small.sum(1).clamp(0, 1)
    mask, look = scorer.finder(images.contiguous(memory_format=torch.channels_last))
    found = torch.sigmoid(mask)
    overlap = (2 * (found * target).sum((1, 2)) + 1) / (found.sum((1, 2)) + target.sum((1, 2)) + 1)
    losses = {
        "mask": F.binary_cross_entropy_with_logits(mask, target) * 4 + (1 - overlap).mean(),
        "look": F.cross_entropy(look, _looks(scenes, start / fps).to(device), label_smoothing=0.02),
    }
    for slot, share in ((0, 1.0), (1, 0.5)):
        # cut out by what the finder sees, near the truth, as reading does
        near = F.max_pool2d(small[:, slot, None], 5, 1, 2)[:, 0] > 0.3
        other = small[:, 1 - slot] > 0.5
        mine = found.detach() * near * ~other
        seen = cover[:, slot].sum((1, 2)) > 0.5 * area[:, slot, 0].clamp_min(1)
        chosen = seen & (mine > 0.5).flatten(1).any(1)
        if int(chosen.sum()) < 2:
            continue
        boxes = mask_boxes(mine[chosen])
        jitter = torch.randn(boxes.shape, generator=damage_generator).to(device)
        boxes = boxes + jitter * boxes[:, 2:] * torch.tensor([0.03, 0.03, 0.06], device=device)
        # things that spin are drawn too rarely to be known upside down: turn two in five
        turns = torch.rand(2, len(boxes), generator=damage_generator).to(device)
        angles = 2 * torch.pi * turns[0] * (turns[1] < 0.4)
        kind, color = scorer.namer(cut_out(images[chosen], mine[chosen], boxes, angles))
        things = [scenes[i].things[slot] for i in chosen.nonzero()[:, 0].tolist()]
        kinds = torch.tensor([KINDS.index(t.kind) for t in things], device=device)
        colors = torch.tensor([COLORS.index(t.color) for t in things], device=device)
        losses[f"kind{slot}"] = share * F.cross_entropy(kind, kinds, label_smoothing=0.02)
        losses[f"color{slot}"] = share * F.cross_entropy(color, colors, label_smoothing=0.02)
    return losses


def _looks(scenes: Sequence[Scene], time_s: float) -> Tensor:
    """Give the look of each backdrop at a time as probabilities [B, LOOKS]; at nightfall day and night share."""
    begin, end = NIGHTFALL_S
    passed = min(max((time_s - begin) / (end - begin), 0.0), 1.0)
    night = passed * passed * (3 - 2 * passed)
    looks = torch.zeros(len(scenes), len(LOOKS))
    for row, scene in enumerate(scenes):
        if scene.backdrop == "nightfall":
            looks[row, LOOKS.index("day")], looks[row, LOOKS.index("night")] = 1 - night, night
        else:
            looks[row, LOOKS.index(scene.backdrop)] = 1
    return looks


def main(argv: Sequence[str]) -> int:
    """Train and store the weights."""
    parser = argparse.ArgumentParser(prog="train_scorer", description="Train the tiny world's scorer.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    scorer = train(options.steps, options.batch, options.device, options.seed, options.threads)
    save_scorer(scorer, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
