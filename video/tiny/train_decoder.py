"""Teaches the decoder what the denoiser means: `python -m video.tiny.train_decoder --out runs/small --seconds 1200`.

A small denoiser's latents are ragged where a thing ends: not what the encoder would give. Here latents of drawn clips
are noised halfway, the denoiser takes the noise away as it does for a request, and the decoder learns to show what was
drawn. A part of each batch is clean, so that the decoder still reconstructs. The encoder and the latents stay as they
are. The idea is that of decoders that take the last denoising step (LTX-Video, arXiv 2501.00103).

Invariants: weights, encoded clips and the log lie in --out; the clips' pixels are drawn again from their seeds; step n
draws everything from (seed, n).
"""

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny import captions, forward
from video.tiny.draw import draw
from video.tiny.forward import Kernels, training_dtype
from video.tiny.latents import Bucket
from video.tiny.model import PATCH, SPATIAL_FACTOR, build_autoencoder, build_text_encoder, build_transformer
from video.tiny.optim import Budget, Optimizer, learning_rate_scale
from video.tiny.runs import Log, load_weights, save_weights
from video.tiny.tokenizer import MAX_TOKENS
from video.tiny.train_autoencoder import HIDDEN, reconstruction_loss
from video.tiny.train_small import AUTOENCODER, BUCKETS, CAPTIONS_EACH, TRANSFORMER, taught_scenes
from video.tiny.train_transformer import empty_text

logger = logging.getLogger(__name__)

SIZES = {"96x160x5": 384, "96x160x17": 384}  # clips of each
NOISE = (0.3, 0.8)  # of what is put on the latents, as a share; beyond, another clip comes back
STEPS, GUIDANCE = 4, 3.0
WINDOW = 8  # latents of a side
AT_THING = 0.7  # share of the windows that lie around the thing
CLEAN = 0.3  # share of the windows whose latents are the encoder's


@dataclass(frozen=True)
class Material:
    """Clips of one size: pixels `[N, T, H, W, 3]` uint8, latents as encoded and as the denoiser gives them back,
    `[N, 16, F, h, w]`, and the token `[N, 2]` (row, column) that shows most of the thing."""

    pixels: Tensor
    clean: Tensor
    made: Tensor
    token: Tensor


@torch.no_grad()
def roll_out(
    model: nn.Module, clean: Tensor, text: Tensor, empty: Tensor, kernels: Kernels, generator: torch.Generator
) -> Tensor:
    """Noise latents and have the denoiser take it away, in Euler steps under guidance.

    Args:
        model: the denoiser.
        clean: `[B, 16, F, h, w]`.
        text, empty: embeddings of the captions `[B, L, D]` and of none `[L, D]`.
        kernels: compiled or not, and the dtype.
        generator: of the noise.

    Returns:
        Latents `[B, 16, F, h, w]`.
    """
    start = torch.empty(len(clean)).uniform_(*NOISE, generator=generator)
    latents = torch.lerp(clean, torch.randn(clean.shape, generator=generator), start.view(-1, 1, 1, 1, 1))
    words = torch.cat([text, empty.expand_as(text)]).to(kernels.dtype)
    for step in range(STEPS):
        sigma = start * (1 - step / STEPS)
        times = (1000 * sigma)[:, None].expand(-1, clean.shape[2]).repeat(2, 1)
        twice = latents.repeat(2, 1, 1, 1, 1)
        both = forward.denoise(model, twice, times, words, kernels, None, kernels.dtype, MAX_TOKENS)
        asked, free = both.chunk(2)
        latents = latents - (start / STEPS).view(-1, 1, 1, 1, 1) * (free + GUIDANCE * (asked - free))
    return latents


def load_material(
    folder: Path, bucket: Bucket, count: int, model: nn.Module, empty: Tensor, kernels: Kernels
) -> Material:
    """Read `count` encoded clips of a size, draw their pixels again and roll them out."""
    kept = torch.load(folder / f"encoded-{bucket.name}-0.pt", weights_only=True, mmap=True)
    first_seed = 1_000_000 * BUCKETS.index(bucket)
    pixels = torch.cat(
        [
            draw(part.scenes, bucket.num_frames, bucket.height, bucket.width)
            for part in taught_scenes("train", first_seed, count, CAPTIONS_EACH)
        ]
    )
    clean = kept["latents"][:count].float()
    generator = torch.Generator().manual_seed(first_seed)
    made = [
        roll_out(model, some, text[:, index % CAPTIONS_EACH].float(), empty, kernels, generator)
        for index, (some, text) in enumerate(zip(clean.split(16), kept["text"][:count].split(16), strict=True))
    ]
    columns = bucket.width // (SPATIAL_FACTOR * PATCH)
    cover = kept["cover"][:count, 0].float().unflatten(1, (bucket.latent_frames, -1)).sum(1)
    token = torch.stack([cover.argmax(1) // columns, cover.argmax(1) % columns], dim=1)
    return Material(pixels, clean, torch.cat(made), token)


def draw_windows(material: Material, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut windows out of clips: latents `[batch, 16, F, WINDOW, WINDOW]` and pixels `[batch, T, 8 WINDOW, ...]`."""
    height, width = material.clean.shape[-2:]
    latents, pixels = [], []
    for row in torch.randint(len(material.clean), (batch,), generator=generator).tolist():
        draws = torch.rand(4, generator=generator).tolist()
        source = material.clean if draws[0] < CLEAN else material.made
        top, left = int(draws[2] * (height - WINDOW + 1)), int(draws[3] * (width - WINDOW + 1))
        if draws[1] < AT_THING:
            middle = PATCH * material.token[row] + 1
            top = min(max(int(middle[0]) - WINDOW // 2 + int(draws[2] * 5) - 2, 0), height - WINDOW)
            left = min(max(int(middle[1]) - WINDOW // 2 + int(draws[3] * 5) - 2, 0), width - WINDOW)
        latents.append(source[row, :, :, top : top + WINDOW, left : left + WINDOW])
        rows, columns = (slice(SPATIAL_FACTOR * at, SPATIAL_FACTOR * (at + WINDOW)) for at in (top, left))
        pixels.append(material.pixels[row, :, rows, columns])
    return torch.stack(latents), torch.stack(pixels)


def train(
    vae: Any,
    material: list[Material],
    budget: Budget,
    log: Log,
    kernels: Kernels,
    *,
    seed: int = 0,
    learning_rate: float = 1e-3,
    frames_a_step: int = 128,
    log_every: int = 20,
) -> nn.Module:
    """Train the decoder to the end of the budget and return the autoencoder with averaged weights.

    Args:
        vae: the autoencoder; its encoder is not touched.
        material: clips by size, all of them in turn.
        budget: steps or seconds.
        log: gets a line every `log_every` steps.
        kernels: compiled or not, and the dtype.
        seed: of everything a step draws.
        learning_rate: peak.
        frames_a_step: of pixels, in windows of at least four clips.
        log_every: in steps.
    """
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    optimizer = Optimizer(vae, HIDDEN, learning_rate, ema_decay=0.99)
    generator = torch.Generator()
    step, losses = 0, 0.0
    while (progress := budget.progress(step)) < 1:
        generator.manual_seed(seed * 1_000_003 + step)
        some = material[step % len(material)]
        latents, pixels = draw_windows(some, max(4, frames_a_step // some.pixels.shape[1]), generator)
        decoded = forward.decode(vae, latents * std + mean, kernels, kernels.dtype)
        loss = reconstruction_loss(decoded, pixels.float() / 127.5 - 1)
        loss.backward()
        scale = learning_rate_scale(progress, step, warm_up_steps=20)
        optimizer.step(scale)
        losses += float(loss.detach())
        step += 1
        if step % log_every == 0:
            optimizer.keep_or_restore(losses == losses and losses < 100 * log_every)
            log.write("decoder", step=step, loss=losses / log_every, lr=learning_rate * scale)
            losses = 0.0
    vae.load_state_dict(optimizer.ema_state(), strict=False)
    log.write("decoder", step=step, elapsed_s=budget.elapsed_s)
    result: nn.Module = vae
    return result


def main() -> None:
    """Train on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights and of the encoded clips")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    kernels = Kernels(dtype=training_dtype(torch.device("cpu")))
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    encoder.load_state_dict(load_weights(args.out, "text")[0])
    empty = empty_text(encoder, torch.device("cpu")).float()
    model: Any = build_transformer(**TRANSFORMER)
    model.eval().load_state_dict(load_weights(args.out, "transformer")[0])
    weights, about = load_weights(args.out, "vae")
    vae = build_autoencoder(**AUTOENCODER, latents_mean=about["latents_mean"], latents_std=about["latents_std"])
    vae.load_state_dict(weights)
    material = [
        load_material(args.out, bucket, SIZES[bucket.name], model, empty, kernels)
        for bucket in BUCKETS
        if bucket.name in SIZES
    ]
    log = Log(args.out / "log.jsonl")
    train(vae, material, Budget(seconds=args.seconds), log, kernels, seed=args.seed, learning_rate=args.rate)
    save_weights(args.out, "vae", vae.state_dict(), about | {"sharpened": True})


if __name__ == "__main__":
    main()
