"""Trains every part of the tiny Wan within a budget of wall clock, on one GPU.

    python -m video.tiny.train_all --device cuda --budget-s 560 --out runs/tiny

Order: scenes and captions (worker processes, ahead of need), clips, text encoder, autoencoder, encoded clips, denoiser,
contact sheets. Everything lies flat in --out: fp32 weights in shards, a log of JSON lines, two PNGs; weights are
written early and again. `python -m video.tiny.convert` makes a checkpoint in diffusers' layout of them.
"""

import argparse
import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from video.tiny import bank, captions, sheets, smoke, train_autoencoder, train_text, train_transformer
from video.tiny.forward import Kernels
from video.tiny.latents import encode_all, request
from video.tiny.model import TRANSFORMER
from video.tiny.optim import Budget
from video.tiny.runs import Log

logger = logging.getLogger(__name__)

# Seconds of the stages for a budget of 560; the denoiser has what the others leave.
AUTOENCODER_S, TEXT_S, ENCODE_S, SHEETS_S = 170.0, 12.0, 65.0, 18.0


def main() -> None:
    """Run all stages."""
    args = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = Log(args.out / "log.jsonl")
    # fork before CUDA is touched
    pool = bank.start_workers(args.workers)
    buckets = train_transformer.SMALL_BUCKETS if args.small else train_transformer.BUCKETS
    sizes = train_autoencoder.SMALL_BANKS if args.small else train_autoencoder.BANKS
    crops = train_autoencoder.SMALL_CROPS if args.small else train_autoencoder.CROPS
    text_scenes, checked = 24576, 1024
    if args.smoke:
        text_scenes, checked = 2048, 64
        buckets = tuple(replace(b, max_clips=min(b.max_clips, 128)) for b in buckets)
        sizes = {name: (min(n, 128), t, h, w) for name, (n, t, h, w) in sizes.items()}
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    if args.cache is not None:
        load_compiled(args.cache)
    kernels = Kernels() if args.eager else Kernels.choose(device, smoke.exercises(device))
    if args.smoke and kernels.is_compiled:
        save_compiled(args.out / "compiled.bin")
    log.write("start", torch=torch.__version__, is_compiled=kernels.is_compiled, seed=args.seed)

    banks = train_autoencoder.draw_banks(pool, sizes, device)
    _, frames, height, width = sizes["wide"]
    count = 4 if args.small else 32
    unseen = bank.say_all(pool, bank.jobs("unseen", 0, count, 0))
    held_out = bank.draw_clips(unseen, frames, height, width, device, count)
    if device.type == "cuda":
        torch.cuda.synchronize()
    log.write("clips", **{name: len(clips) for name, clips in banks.items()})
    ids, labels = bank.label_all(pool, bank.jobs("train", 90_000_000, text_scenes, 2, 0.3))
    check_ids, check_labels = bank.label_all(pool, bank.jobs("unseen", 0, checked, 1))
    log.write("captions", rows=len(ids))
    # the workers answer in order: what is needed last is asked for last
    said = request(pool, buckets, train_transformer.CAPTIONS_EACH)

    encoder = train_text.train(
        train_text.Reader(len(captions.WORDS) + 3).to(device),
        ids.to(device),
        labels.to(device),
        Budget(seconds=args.text_s),
        args.out,
        log,
        check=(check_ids.to(device), check_labels.to(device)),
        seed=args.seed,
        batch=32 if args.small else train_text.BATCH,
    )
    del ids, labels
    if args.smoke:
        for is_tuned in (False, True):
            torch.backends.cudnn.benchmark = is_tuned
            smoke.time_crops(banks, crops, kernels, device, log)
    torch.backends.cudnn.benchmark = args.tune
    vae: Any = train_autoencoder.train(
        train_autoencoder.fresh_autoencoder(args.seed).to(device),
        banks,
        crops,
        Budget(seconds=args.autoencoder_s),
        args.out,
        log,
        kernels,
        held_out=held_out,
        seed=args.seed,
        learning_rate=args.autoencoder_rate,
    )
    torch.backends.cudnn.benchmark = False
    vae.eval().requires_grad_(False)
    banks.clear()
    if not args.smoke:
        sheets.reconstructions(vae, held_out[:12], args.out / "autoencoder.png")
    material = encode_all(buckets, said, vae, encoder, kernels, args.encode_s)
    log.write("encoded", **{e.bucket.name: len(e.latents) for e in material})
    if pool is not None:
        pool.terminate()
    model: Any = train_transformer.fresh_transformer(args.seed, num_layers=args.layers).to(device)
    empty = train_transformer.empty_text(encoder, device)
    if args.smoke:
        smoke.time_buckets(model, material, empty, kernels, device, log)
    # a collection of cycles in the middle of a step would starve the GPU
    gc.collect()
    gc.disable()
    train_transformer.train(
        model,
        material,
        empty,
        Budget(seconds=args.transformer_s or args.budget_s - log.seconds - args.sheets_s),
        args.out,
        log,
        kernels,
        seed=args.seed,
        learning_rate=args.transformer_rate,
        causal_share=args.causal_share,
    )
    del material
    sheets.generations(model, vae, encoder, buckets[0], args.out / "generated.png", count=4 if args.small else 48)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    log.write("end", peak_gb=peak)


def load_compiled(path: Path) -> None:
    """Take up what a smoke run compiled; whatever does not fit is compiled again."""
    try:
        torch.compiler.load_cache_artifacts(path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("nothing taken up from %s: %s", path.name, error)


def save_compiled(path: Path) -> None:
    """Write what was compiled so far, for `--cache` of a later run on an equal machine."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is not None:
        path.write_bytes(saved[0])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-s", type=float, default=560.0, help="wall clock of everything")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="little material, and the time of a step of every shape")
    parser.add_argument("--small", action="store_true", help="small clips and batches, for a machine without a GPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tune", action="store_true", help="let cuDNN try its algorithms for the autoencoder")
    parser.add_argument("--cache", type=Path, help="compiled.bin of a smoke run on an equal machine")
    parser.add_argument("--workers", type=int, default=14, help="processes that make scenes and captions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=TRANSFORMER["num_layers"])
    parser.add_argument("--causal-share", type=float, default=0.15)
    parser.add_argument("--autoencoder-rate", type=float, default=2e-3)
    parser.add_argument("--transformer-rate", type=float, default=2e-3)
    parser.add_argument("--autoencoder-s", type=float, default=AUTOENCODER_S)
    parser.add_argument("--text-s", type=float, default=TEXT_S)
    parser.add_argument("--encode-s", type=float, default=ENCODE_S)
    parser.add_argument("--transformer-s", type=float, help="instead of what the budget leaves")
    parser.add_argument("--sheets-s", type=float, default=SHEETS_S)
    return parser.parse_args()


if __name__ == "__main__":
    main()
