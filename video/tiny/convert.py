"""Makes a checkpoint in diffusers' layout of a run: `python -m video.tiny.convert runs/tiny assets/tiny_wan`.

With `--unpack` it goes the other way, so that training can go on from a checkpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from video.tiny import train_small
from video.tiny.captions import WORDS
from video.tiny.card import SMALL, WHOLE, make_card
from video.tiny.model import build_autoencoder, build_text_encoder, build_transformer, save_checkpoint
from video.tiny.runs import load_weights, save_weights
from video.tiny.tokenizer import build_tokenizer


def convert(
    run: Path, directory: Path, *, is_small: bool = False, revision: str = "0", dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write the parts of a run as one checkpoint for `WanPipeline` and `WanImageToVideoPipeline`.

    Args:
        run: folder with `vae-*`, `text-*` and `transformer-*` safetensors.
        directory: folder to fill.
        is_small: the run is one of `video.tiny.train_small`.
        revision: names the weights for a person.
        dtype: of the weights written.

    Returns:
        The checkpoint's size in bytes.

    Raises:
        FileNotFoundError: if a part is missing.
    """
    scope = SMALL if is_small else WHOLE
    weights, about = load_weights(run, "vae")
    statistics = {"latents_mean": about["latents_mean"], "latents_std": about["latents_std"]}
    vae = build_autoencoder(**(train_small.AUTOENCODER if is_small else {}), **statistics)
    vae.load_state_dict(weights)
    weights, about = load_weights(run, "text")
    tokenizer = build_tokenizer(about["words"])
    text_encoder = build_text_encoder(len(tokenizer))
    text_encoder.load_state_dict(weights)
    weights, _ = load_weights(run, "transformer")
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    transformer: Any = build_transformer(**({"num_layers": num_layers} | (train_small.TRANSFORMER if is_small else {})))
    transformer.load_state_dict(weights)
    save_checkpoint(
        directory,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        flow_shift=scope.flow_shift,
        dtype=dtype,
    )
    (directory / "card.json").write_text(json.dumps(make_card(scope, revision), indent=2) + "\n")
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def unpack(directory: Path, run: Path) -> None:
    """Write the parts of a checkpoint as a run's, so that training goes on from weights that were shipped.

    They have the checkpoint's precision; nothing of the optimiser is kept in it.

    Raises:
        OSError: `directory` holds no such checkpoint.
    """
    vae = AutoencoderKLWan.from_pretrained(directory / "vae")
    statistics = {"latents_mean": vae.config.latents_mean, "latents_std": vae.config.latents_std}
    save_weights(run, "vae", vae.state_dict(), statistics)
    encoder = UMT5EncoderModel.from_pretrained(directory / "text_encoder")
    save_weights(run, "text", encoder.state_dict(), {"words": list(WORDS)})
    transformer = WanTransformer3DModel.from_pretrained(directory / "transformer")
    save_weights(run, "transformer", transformer.state_dict(), {})


def main() -> None:
    """Convert on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--unpack", action="store_true", help="the other way: from the checkpoint to a run")
    parser.add_argument("--small", action="store_true", help="the run is one of video.tiny.train_small")
    parser.add_argument("--revision", default="0", help="names the weights for a person")
    args = parser.parse_args()
    if args.unpack:
        unpack(args.directory, args.run)
        return
    size_bytes = convert(args.run, args.directory, is_small=args.small, revision=args.revision)
    print(f"{args.directory}: {size_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
