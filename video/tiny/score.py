"""`media-server video tiny score`: what clips of the tiny world show, and how well a model does what prompts say.

    media-server video tiny score CLIP.mp4 ...
    media-server video tiny score --prompts assets/tiny_world/prompts.jsonl [--taught] [--first N] [--sheet FILE.png]

With a list, each prompt's clip is made by the product's own loop at the card's settings and its size, in bf16 or fp32
as the service would on the same device. Invariants: prompt number n of the file has noise of seed n, whichever others
are left out; one clip a prompt, no best of several.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from video.checkpoints import Checkpoint, load_checkpoint
from video.conditions import Given, encode_given
from video.loop import Guidance, decode, denoise, encode_text, noise, schedule
from video.tiny.scorer import assets, read, read_clip, score, table
from video.tiny.scorer_prompts import Prompt, read_prompts
from video.tiny.sheets import sheet

Generate = Callable[[str, int], Tensor]
SHEET = 24


def main(argv: Sequence[str], generate: Generate | None = None) -> int:
    """Score clips, or a list of prompts; returns the exit code.

    `generate` makes a clip `[F, H, W, 3]` uint8 from a prompt and a seed; None: the model of `--model`.
    """
    parser = argparse.ArgumentParser(
        prog="media-server video tiny score", description="Say what clips of the tiny world show."
    )
    parser.add_argument("clips", nargs="*", type=Path, metavar="CLIP", help="video files, read one by one")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="make and score a clip for each prompt of a list")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint with a card (default: the embedded one)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda:N")
    parser.add_argument(
        "--taught", action="store_true", help="only prompts of what the model's card says it was taught"
    )
    parser.add_argument("--first", type=int, metavar="N", help="only N prompts, evenly spaced over the list")
    parser.add_argument("--frames", type=int, help="frames a clip (default: the card's)")
    parser.add_argument("--steps", type=int, help="denoise steps (default: the card's)")
    parser.add_argument("--guidance", type=float, help="guidance scale (default: the card's)")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help=f"write a contact sheet of the first {SHEET} clips")
    parser.add_argument("--json", type=Path, metavar="FILE", dest="out", help="write every prompt's answers")
    options = parser.parse_args(argv)
    if bool(options.clips) == bool(options.prompts):
        parser.error("give video files or --prompts FILE")
    if options.prompts is None:
        for path in options.clips:
            print(json.dumps({"clip": str(path), **asdict(read(read_clip(path)))}))
        return 0
    folder = options.model or assets().parent / "tiny_wan"
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    chosen = [
        (seed, prompt)
        for seed, prompt in enumerate(read_prompts(options.prompts))
        if not options.taught or is_taught(prompt, card)
    ]
    if options.first is not None and options.first < len(chosen):
        chosen = [chosen[index * len(chosen) // options.first] for index in range(options.first)]
    if not chosen:
        print("score: no prompt is left to score", file=sys.stderr)
        return 2
    if generate is None:
        generate = model_of(folder, card, options)
    scores: list[tuple[str, dict[str, bool]]] = []
    rows: list[dict[str, Any]] = []
    shown: list[Tensor] = []
    lines: list[str] = []
    started = time.monotonic()
    for seed, prompt in chosen:
        clip = generate(prompt.prompt, seed)
        right = score(clip, prompt)
        scores.append((prompt.split, right))
        rows.append({"id": prompt.id, "prompt": prompt.prompt, "seed": seed, **right})
        if len(shown) < SHEET:
            shown.append(clip)
            wrong = ", ".join(name for name in ("color", "kind", "direction", "scene") if not right[name])
            lines.append(f"{prompt.prompt} [{'wrong: ' + wrong if wrong else 'right'}]")
    print(table(scores))
    print(f"{len(chosen)} clips in {time.monotonic() - started:.0f} s")
    if options.sheet is not None:
        sheet(torch.stack(shown), lines, options.sheet, columns=3)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return 0


def is_taught(prompt: Prompt, card: dict[str, Any]) -> bool:
    """Tell whether the model of a card was taught what a prompt says: its things, camera moves and relations."""
    slots = card["caption_style"]["slots"]
    kinds = {prompt.kind, *([prompt.second_kind] if prompt.second_kind else [])}
    return (
        kinds <= set(slots["kind"])
        and (prompt.relation is None or bool(slots.get("relation")))
        and (prompt.camera == "none" or prompt.camera in slots.get("camera", []))
        and prompt.backdrop in slots["backdrop"]
    )


def model_of(folder: Path, card: dict[str, Any], options: argparse.Namespace) -> Generate:
    """Load a checkpoint and return the function that makes its clips."""
    checkpoint = load_checkpoint(folder, options.device)
    defaults = card["defaults"]
    steps = defaults["num_inference_steps"] if options.steps is None else options.steps
    scale = defaults["guidance_scale"] if options.guidance is None else options.guidance
    num_frames = card["frames"]["default"] if options.frames is None else options.frames
    return partial(generate_clip, checkpoint, card, num_frames=num_frames, steps=steps, scale=scale)


def generate_clip(
    checkpoint: Checkpoint,
    card: dict[str, Any],
    prompt: str,
    seed: int,
    *,
    num_frames: int,
    steps: int,
    scale: float,
    given: Given | None = None,
) -> Tensor:
    """Make a clip `[num_frames, H, W, 3]` uint8 at the card's size, scheduler and shift, with the frames given."""
    defaults = card["defaults"]
    width, height = (int(side) for side in card["size"]["default"].split("x"))
    guidance = Guidance(scale)
    latents = denoise(
        checkpoint,
        noise(checkpoint, num_frames, height, width, seed),
        schedule(checkpoint, steps, defaults["flow_shift"], defaults["scheduler"]),
        encode_text(checkpoint, prompt, defaults["negative_prompt"] if guidance.is_on else None),
        encode_given(checkpoint, given or Given(), num_frames, height, width),
        guidance,
        _silent,
    )
    return torch.cat(list(decode(checkpoint, latents, _silent)))


def _silent(stage: str, step: int, total: int) -> None:
    """Report nothing."""
