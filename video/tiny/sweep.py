"""Samples the tiny Wan through diffusers' own pipeline, and sweeps guidance, steps, scheduler and shift by the scorer.

    python -m video.tiny.sweep assets/tiny_wan assets/tiny_world/prompts.jsonl --prompts 40 --out runs/sweep.json

Invariants: prompt number n of a list has noise of seed n at every setting; one clip a prompt, no best of several.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor

from video.tiny.model import FLOW_SHIFT, MAX_TOKENS, build_scheduler
from video.tiny.scorer import score
from video.tiny.scorer_prompts import Prompt, read_prompts


@dataclass(frozen=True)
class Setting:
    """How a clip is sampled. scheduler: "unipc" or "euler". flow_shift: at least 1."""

    guidance_scale: float = 3.0
    num_inference_steps: int = 20
    scheduler: str = "unipc"
    flow_shift: float = FLOW_SHIFT

    def __post_init__(self) -> None:
        if self.scheduler not in ("unipc", "euler"):
            raise ValueError(f"Setting: scheduler must be unipc or euler, got {self.scheduler!r}")


def load(checkpoint: Path, device: str = "cpu") -> Any:
    """Load a checkpoint as a `WanPipeline` in fp32, without a progress bar."""
    pipeline: Any = WanPipeline.from_pretrained(str(checkpoint), torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(
    pipeline: Any,
    prompts: Sequence[str],
    setting: Setting,
    *,
    seeds: Sequence[int],
    height: int = 96,
    width: int = 160,
    num_frames: int = 33,
) -> Tensor:
    """Make one clip a prompt.

    Args:
        pipeline: of `load`.
        prompts: B texts.
        setting: guidance, steps, scheduler, shift.
        seeds: B, of the noise; a clip does not depend on the rest of the batch.
        height, width: multiples of 16.
        num_frames: 4k+1.

    Returns:
        `[B, T, H, W, 3]` uint8.
    """
    if setting.scheduler == "unipc":
        pipeline.scheduler = build_scheduler(setting.flow_shift)
    else:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=setting.flow_shift)
    frames = pipeline(
        list(prompts),
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=setting.num_inference_steps,
        guidance_scale=setting.guidance_scale,
        max_sequence_length=MAX_TOKENS,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="np",
    ).frames
    return torch.from_numpy((np.asarray(frames) * 255).round().astype(np.uint8))


def evaluate(pipeline: Any, prompts: Sequence[Prompt], setting: Setting, batch: int, **size: int) -> dict[str, Any]:
    """Sample and score a list of prompts: shares of right answers for each split and in all, and seconds a clip."""
    right: list[tuple[str, dict[str, bool]]] = []
    started_s = time.perf_counter()
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = list(range(start, start + len(part)))
        clips = sample(pipeline, [p.prompt for p in part], setting, seeds=seeds, **size)
        right += [(prompt.split, score(clip, prompt)) for prompt, clip in zip(part, clips, strict=True)]
    row: dict[str, Any] = {
        **asdict(setting),
        **size,
        "seconds_a_clip": (time.perf_counter() - started_s) / len(prompts),
    }
    for group in [*sorted({split for split, _ in right}), "total"]:
        chosen = [answers for split, answers in right if group in (split, "total")]
        row[group] = {name: sum(answers[name] for answers in chosen) / len(chosen) for name in chosen[0]}
    return row


def main() -> None:
    """Sweep on the command line; every row is written as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("list", type=Path, help="a file of prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40, help="evenly spaced over the list")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0])
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--scheduler", nargs="+", default=["unipc"])
    parser.add_argument("--shift", type=float, nargs="+", default=[FLOW_SHIFT])
    parser.add_argument("--size", type=int, nargs=3, default=[96, 160, 33], metavar=("HEIGHT", "WIDTH", "FRAMES"))
    args = parser.parse_args()
    prompts = read_prompts(args.list)
    chosen = [prompts[i * len(prompts) // args.prompts] for i in range(args.prompts)]
    size = dict(zip(("height", "width", "num_frames"), args.size, strict=True))
    pipeline = load(args.checkpoint, args.device)
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for guidance, steps, scheduler, shift in itertools.product(args.guidance, args.steps, args.scheduler, args.shift):
        rows.append(evaluate(pipeline, chosen, Setting(guidance, steps, scheduler, shift), args.batch, **size))
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps({key: rows[-1][key] for key in (*asdict(Setting()), "total", "seconds_a_clip")}), flush=True)


if __name__ == "__main__":
    main()
