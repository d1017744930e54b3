"""Makes a checkpoint in diffusers' layout of a run: `python -m video.tiny.convert runs/tiny assets/tiny_wan`."""

import argparse
from pathlib import Path
from typing import Any

import torch

from video.tiny.model import FLOW_SHIFT, build_autoencoder, build_text_encoder, build_transformer, save_checkpoint
from video.tiny.runs import load_weights
from video.tiny.tokenizer import build_tokenizer


def convert(run: Path, directory: Path, *, flow_shift: float = FLOW_SHIFT, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the parts of a run as one checkpoint for `WanPipeline` and `WanImageToVideoPipeline`.

    Args:
        run: folder with `vae-*`, `text-*` and `transformer-*` safetensors.
        directory: folder to fill.
        flow_shift: the scheduler's.
        dtype: of the weights written.

    Returns:
        The checkpoint's size in bytes.

    Raises:
        FileNotFoundError: if a part is missing.
    """
    weights, about = load_weights(run, "vae")
    vae = build_autoencoder(latents_mean=about["latents_mean"], latents_std=about["latents_std"])
    vae.load_state_dict(weights)
    weights, about = load_weights(run, "text")
    tokenizer = build_tokenizer(about["words"])
    text_encoder = build_text_encoder(len(tokenizer))
    text_encoder.load_state_dict(weights)
    weights, _ = load_weights(run, "transformer")
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    transformer: Any = build_transformer(num_layers=num_layers)
    transformer.load_state_dict(weights)
    save_checkpoint(
        directory,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        flow_shift=flow_shift,
        dtype=dtype,
    )
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def main() -> None:
    """Convert on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--flow-shift", type=float, default=FLOW_SHIFT)
    args = parser.parse_args()
    size_bytes = convert(args.run, args.directory, flow_shift=args.flow_shift)
    print(f"{args.directory}: {size_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
