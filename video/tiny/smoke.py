"""Times a step of every shape that training meets, before a long run is started on a machine that nobody has tried."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny import forward, train_autoencoder, train_transformer
from video.tiny.batches import causal_mask, draw_batch
from video.tiny.forward import Kernels
from video.tiny.latents import Bucket, Encoded
from video.tiny.model import MAX_TOKENS, TEXT_ENCODER
from video.tiny.optim import Optimizer
from video.tiny.runs import Log

REPEATS = 5


def exercises(device: torch.device) -> list[Callable[[Kernels], None]]:
    """List what compiling must manage: both parts at their real widths, two sizes, with and without a mask."""

    def autoencoder(kernels: Kernels) -> None:
        vae = train_autoencoder.fresh_autoencoder(0).to(device)
        for size in (32, 48):
            clips = torch.zeros(2, 5, size, 80, 3, dtype=torch.uint8, device=device)
            mean, _ = forward.encode(vae, clips, kernels, torch.bfloat16)
            forward.decode(vae, mean, kernels, torch.bfloat16).sum().backward()

    def denoiser(kernels: Kernels, is_masked: bool) -> None:
        model = train_transformer.fresh_transformer(0, num_layers=2).to(device)
        for bucket in (Bucket(48, 80, 9, 5, 1, 1, 1, 1), Bucket(32, 48, 17, 7, 1, 1, 1, 1)):
            shape = (bucket.batch, 16, bucket.latent_frames, bucket.height // 8, bucket.width // 8)
            latents = torch.randn(shape, device=device)
            text = torch.randn(bucket.batch, MAX_TOKENS, TEXT_ENCODER["d_model"], device=device).bfloat16()
            timesteps = torch.rand(bucket.batch, bucket.latent_frames, device=device) * 1000
            mask = causal_mask(bucket, device) if is_masked else None
            out = forward.denoise(model, latents, timesteps, text, kernels, mask, torch.bfloat16)
            out.sum().backward()

    return [autoencoder, partial(denoiser, is_masked=False), partial(denoiser, is_masked=True)]


def time_crops(
    banks: dict[str, Tensor],
    crops: tuple[train_autoencoder.Crop, ...],
    kernels: Kernels,
    device: torch.device,
    log: Log,
) -> None:
    """Log the first and the median step of the autoencoder for each shape of batch."""
    vae = train_autoencoder.fresh_autoencoder(0).to(device)
    optimizer = Optimizer(vae, train_autoencoder.HIDDEN, 1e-3)
    dtype = kernels.dtype
    for crop in crops:
        clips = banks[crop.bank][: crop.batch, : crop.num_frames]

        def step(clips: Tensor = clips) -> None:
            mean, _ = forward.encode(vae, clips, kernels, dtype)
            decoded = forward.decode(vae, mean, kernels, dtype)
            train_autoencoder.reconstruction_loss(decoded, clips.float() / 127.5 - 1).backward()
            optimizer.step(1.0)

        first_s, median_s = _times(step, device)
        shape = f"{crop.bank} {list(clips.shape)}"
        is_tuned = torch.backends.cudnn.benchmark
        log.write("smoke autoencoder", shape=shape, is_tuned=is_tuned, first_s=first_s, step_ms=1000 * median_s)


def time_buckets(
    model: nn.Module, material: list[Encoded], empty: Tensor, kernels: Kernels, device: torch.device, log: Log
) -> None:
    """Log the first and the median step of the denoiser for each size of clip, with and without a causal mask."""
    optimizer = Optimizer(model, train_transformer.HIDDEN, 0.0)
    dtype = kernels.dtype
    generator = torch.Generator(device).manual_seed(0)
    for encoded in material:
        for mask in (None, causal_mask(encoded.bucket, device)):

            def step(encoded: Encoded = encoded, mask: Tensor | None = mask) -> None:
                batch = draw_batch(encoded, empty, mask, generator)
                train_transformer.flow_loss(model, batch, kernels, dtype).backward()
                optimizer.step(1.0)

            first_s, median_s = _times(step, device)
            log.write(
                "smoke transformer",
                bucket=encoded.bucket.name,
                batch=encoded.bucket.batch,
                is_causal=mask is not None,
                first_s=first_s,
                step_ms=1000 * median_s,
            )


def _times(step: Any, device: torch.device) -> tuple[float, float]:
    """Return the first step's seconds and the median of the next `REPEATS`."""
    times = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return times[0], sorted(times[1:])[REPEATS // 2]
