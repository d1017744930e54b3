"""Trains a smaller Wan of the tiny world on CPU cores: `python -m video.tiny.train_small autoencoder --out runs/small`.

The stages, each with its own seconds of wall clock: `autoencoder`, `text`, `encode`, `transformer`. Clips are 64x96
or 96x160 pixels and 1 to 33 frames long. The autoencoder and the text encoder learn the whole tiny world, the denoiser
a part of it that two cores learn in some hours: one thing before a still camera, laid out by `video.tiny.settle`.
`--resume` goes on from the state of an interrupted stage, `--from` starts a stage from the weights of an earlier run in
another folder. `decoder` goes on with the decoder of --from alone, while the denoiser trains on the latents that its
encoder gives.

Invariant: weights, states and the log lie in --out, under the names that `video.tiny.convert` reads.
"""

import argparse
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from video.tiny import bank, captions, latents, train_autoencoder, train_text, train_transformer
from video.tiny.alignment import Shown
from video.tiny.bank import Said
from video.tiny.batches import crop_padding
from video.tiny.forward import Kernels, training_dtype
from video.tiny.latents import Bucket, Encoded, join
from video.tiny.model import build_autoencoder, build_text_encoder
from video.tiny.optim import Budget
from video.tiny.paths import poses
from video.tiny.runs import Log, load_weights
from video.tiny.settle import settle
from video.tiny.train_autoencoder import Crop
from video.tiny.world import Scene

logger = logging.getLogger(__name__)

AUTOENCODER = {"base_dim": 16, "decoder_base_dim": 24}
TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 80, "num_layers": 6, "ffn_dim": 640}
BANKS = {"wide": (1536, 17, 64, 96), "large": (384, 17, 96, 160)}
NEAR = 48  # pixels of the side of a window around a thing, where most of what there is to learn lies
CROPS = (Crop("near", 9, 8, 0.6), Crop("near", 17, 4, 0.15), Crop("wide", 17, 2, 0.15), Crop("large", 17, 1, 0.1))
BUCKETS = (
    Bucket(64, 96, 17, 48, share=0.4, late_share=0.1, material=0.2, max_clips=3072),
    Bucket(64, 96, 33, 24, share=0.1, late_share=0.1, material=0.1, max_clips=512),
    Bucket(96, 160, 17, 12, share=0.3, late_share=0.4, material=0.4, max_clips=2048),
    Bucket(96, 160, 33, 6, share=0.2, late_share=0.3, material=0.3, max_clips=512),
    # shapes cost a fifth here of what they cost in a clip of one second
    Bucket(96, 160, 1, 48, share=0.25, late_share=0.1, material=0.1, max_clips=8192),
    Bucket(96, 160, 5, 24, share=0.25, late_share=0.2, material=0.2, max_clips=4096),
)
CAPTIONS_EACH = 6
LATE = (8, 16, 32)  # frames into a motion at which a clip that goes on from another may begin
DEVICE = torch.device("cpu")


def decoder(args: argparse.Namespace) -> None:
    """Train the decoder of the autoencoder in `args.start` for `args.seconds`."""
    if args.start is None:
        raise ValueError("train_small: decoder needs --from, the folder of an autoencoder")
    autoencoder(args, keeps_latents=True)


def autoencoder(args: argparse.Namespace, keeps_latents: bool = False) -> None:
    """Train the autoencoder for `args.seconds`."""
    banks = {}
    near = []
    for index, (name, (count, frames, height, width)) in enumerate(BANKS.items()):
        said = list(bank.say_all(None, bank.jobs("train", 50_000_000 + 1_000_000 * index, count, 0)))
        banks[name] = bank.draw_clips(said, frames, height, width, DEVICE, count)
        near.append(windows([scene for part in said for scene in part.scenes], banks[name]))
    banks["near"] = torch.cat(near)
    _, frames, height, width = BANKS["wide"]
    unseen = bank.say_all(None, bank.jobs("unseen", 0, 32, 0))
    held_out = bank.draw_clips(unseen, frames, height, width, DEVICE, 32)
    vae: Any = train_autoencoder.fresh_autoencoder(args.seed, **AUTOENCODER)
    if args.start is not None:
        weights, about = load_weights(args.start, "vae")
        vae.load_state_dict(weights)
        vae.register_to_config(latents_mean=about["latents_mean"], latents_std=about["latents_std"])
    train_autoencoder.train(
        vae,
        banks,
        CROPS,
        Budget(seconds=args.seconds),
        args.out,
        Log(args.out / "log.jsonl"),
        Kernels(args.compile, training_dtype(DEVICE)),
        held_out=held_out,
        keeps_latents=keeps_latents,
        seed=args.seed,
        learning_rate=args.rate,
        log_every=20,
        save_every=100,
        resume=args.resume,
    )


def text(args: argparse.Namespace) -> None:
    """Train the text encoder for `args.seconds`."""
    ids, labels = bank.label_all(None, bank.jobs("train", 90_000_000, 16384, 2, 0.3))
    check = bank.label_all(None, bank.jobs("unseen", 0, 512, 1))
    torch.manual_seed(args.seed)
    train_text.train(
        train_text.Reader(len(captions.WORDS) + 3),
        ids,
        labels,
        Budget(seconds=args.seconds),
        args.out,
        Log(args.out / "log.jsonl"),
        check=check,
        seed=args.seed,
        batch=128,
        learning_rate=args.rate,
        log_every=20,
        save_every=100,
        resume=args.resume,
    )


def windows(scenes: list[Scene], clips: Tensor) -> Tensor:
    """Cut each clip `[N, T, H, W, 3]` around its first thing, where that is halfway: `[N, T, NEAR, NEAR, 3]`."""
    height, width = clips.shape[2:4]
    things = [scene.things[0] for scene in scenes]
    middle = poses(things, [scene.camera for scene in scenes], torch.tensor([(clips.shape[1] // 2) / 16]))
    generator = torch.Generator().manual_seed(len(clips))
    jitter = torch.randint(-10, 11, (2, len(scenes)), generator=generator)
    cut = []
    for index, clip in enumerate(clips):
        left = int(middle.x[index, 0] * width) - NEAR // 2 + int(jitter[0, index])
        top = int(middle.y[index, 0] * height) - NEAR // 2 + int(jitter[1, index])
        left, top = min(max(left, 0), width - NEAR), min(max(top, 0), height - NEAR)
        cut.append(clip[:, top : top + NEAR, left : left + NEAR])
    return torch.stack(cut)


def taught_scenes(split: str, first_seed: int, count: int, captions_each: int) -> Iterator[Said]:
    """Say `count` scenes of the part of the world that the denoiser is taught, in parts of at most 64."""
    scenes: list[Scene] = []
    rows: list[Any] = []
    for seed in itertools.count(first_seed, 64):
        said = bank.say(bank.Job(split, seed, 64, captions_each))
        for scene, ids in zip(said.scenes, said.ids, strict=True):
            if is_taught(scene):
                scenes.append(settle(scene))
                rows.append(ids)
        while scenes and len(scenes) >= min(64, count):
            size = min(64, count)
            yield Said(scenes[:size], np.stack(rows[:size]))
            scenes, rows, count = scenes[size:], rows[size:], count - size
            if count == 0:
                return


def is_taught(scene: Scene) -> bool:
    """Tell whether a scene belongs to the part of the world that the denoiser is taught."""
    return len(scene.things) == 1 and scene.camera == "none"


def encode(args: argparse.Namespace) -> None:
    """Draw and encode the clips of the chosen sizes once, and keep them in `encoded-<size>-<first seed>.pt`."""
    weights, about = load_weights(args.out, "vae")
    vae = build_autoencoder(
        **AUTOENCODER, latents_mean=about["latents_mean"], latents_std=about["latents_std"]
    ).requires_grad_(False)
    vae.load_state_dict(weights)
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    encoder.load_state_dict(load_weights(args.out, "text")[0])
    log = Log(args.out / "log.jsonl")
    for index, bucket in enumerate(BUCKETS):
        if args.sizes and bucket.name not in args.sizes:
            continue
        said = taught_scenes(
            "train", args.first_seed + 1_000_000 * index, args.clips or bucket.max_clips, CAPTIONS_EACH
        )
        kernels = Kernels(dtype=training_dtype(DEVICE))
        made = latents.encode_bucket(bucket, said, vae, encoder, kernels, None, LATE if args.late else (0,))
        path = args.out / f"encoded-{bucket.name}-{args.first_seed}.pt"
        assert made.shown is not None
        kept = {"latents": made.latents, "rest": made.rest, "text": made.text, "is_late": made.is_late}
        torch.save(kept | vars(made.shown), path)
        log.write("encoded", bucket=bucket.name, clips=len(made.latents))


def transformer(args: argparse.Namespace) -> None:
    """Train the denoiser for `args.seconds` on the chosen sizes of what is encoded."""
    parts: list[Encoded] = []
    for bucket in BUCKETS:
        if args.sizes and bucket.name not in args.sizes:
            continue
        files = sorted(args.out.glob(f"encoded-{bucket.name}-*.pt"))
        if not files:
            raise FileNotFoundError(f"train_small: no encoded-{bucket.name}-*.pt in {args.out}; run `encode` first")
        for path in files:
            kept = torch.load(path, weights_only=True, mmap=True)
            seen = Shown(*(kept.pop(name) for name in ("cover", "things", "backdrop")))
            kept.setdefault("is_late", torch.zeros(len(kept["latents"]), dtype=torch.bool))
            parts.append(Encoded(bucket, **kept, shown=seen))
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    encoder.load_state_dict(load_weights(args.out, "text")[0])
    # padding goes first: most of what was kept is padding, and joining copies it
    parts, empty = crop_padding(parts, train_transformer.empty_text(encoder, DEVICE))
    material = join(parts)
    parts.clear()
    model = train_transformer.fresh_transformer(args.seed, **TRANSFORMER)
    if args.start is not None:
        model.load_state_dict(load_weights(args.start, "transformer")[0])
    kernels = Kernels(args.compile, training_dtype(DEVICE))
    train_transformer.train(
        model,
        material,
        empty,
        Budget(seconds=args.seconds),
        args.out,
        Log(args.out / "log.jsonl"),
        kernels,
        seed=args.seed,
        learning_rate=args.rate,
        causal_share=args.causal_share,
        align=args.align,
        near_share=args.near_share,
        noise_shift=args.noise_shift,
        log_every=20,
        save_every=200,
        weights_every_s=300.0,
        resume=args.resume,
    )


def main() -> None:
    """Run one stage."""
    stages = {
        "autoencoder": autoencoder,
        "decoder": decoder,
        "text": text,
        "encode": encode,
        "transformer": transformer,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="of the scenes to encode")
    parser.add_argument(
        "--sizes", nargs="+", choices=[bucket.name for bucket in BUCKETS], help="of clips; all unless given"
    )
    parser.add_argument("--causal-share", type=float, default=0.1)
    parser.add_argument("--align", type=float, default=0.1, help="weight of the probe's loss (video.tiny.alignment)")
    parser.add_argument("--near-share", type=float, default=0.0, help="share of windows around things, early")
    parser.add_argument("--noise-shift", type=float, default=1.0, help="times the shift of the noise levels")
    parser.add_argument("--late", action="store_true", help="encode clips that begin in the middle of their motions")
    parser.add_argument("--clips", type=int, help="clips of a size to encode, if not as many as there should be")
    parser.add_argument("--compile", action="store_true", help="compile the blocks; needs a C++ compiler")
    parser.add_argument("--from", dest="start", type=Path, help="folder whose weights the stage starts from")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
