"""Trains the tiny autoencoder: `python -m video.tiny.train_autoencoder --device cpu --steps 1000 --out runs/a`.

Loss: L1 + 2 L2 + 0.5 L1 of the differences between neighbours (across, down and in time) + 3e-4 KL, on clips in
[-1, 1]. Residual branches start at zero. Afterwards the latents' mean and deviation are measured a channel.

Invariants: step n draws its noise and its clips from (seed, n), so a resumed run continues bit for bit on the CPU.
"""

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny import bank, forward
from video.tiny.forward import Kernels
from video.tiny.model import build_autoencoder
from video.tiny.optim import Budget, Optimizer, learning_rate_scale
from video.tiny.runs import Log, load_state, save_state, save_weights

logger = logging.getLogger(__name__)

HIDDEN = ("conv1.w", "conv2.w", "time_conv.w", "resample.1.w", "to_qkv.w", "proj.w", "conv_shortcut.w")
KL_WEIGHT = 3e-4
STATE_FILE = "autoencoder.state"


@dataclass(frozen=True)
class Crop:
    """A shape of batch: `batch` clips of `num_frames` frames from the named bank, with its share of the steps."""

    bank: str
    num_frames: int
    batch: int
    share: float


CROPS = (Crop("wide", 9, 24, 0.6), Crop("wide", 17, 12, 0.25), Crop("large", 9, 10, 0.15))
# name: (clips, frames, height, width)
BANKS = {"wide": (3072, 33, 96, 160), "large": (768, 17, 144, 256)}
SMALL_CROPS = (Crop("wide", 5, 2, 0.7), Crop("wide", 9, 2, 0.3))
SMALL_BANKS = {"wide": (64, 9, 48, 80)}


def fresh_autoencoder(seed: int, **overrides: Any) -> nn.Module:
    """Build the autoencoder with residual branches that start at zero."""
    torch.manual_seed(seed)
    vae: Any = build_autoencoder(**overrides)
    for name, module in vae.named_modules():
        if name.endswith("conv2"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    result: nn.Module = vae
    return result


def reconstruction_loss(decoded: Tensor, clips: Tensor) -> Tensor:
    """Compare clips `[B, T, H, W, 3]` in [-1, 1]: L1 + 2 L2 + 0.5 L1 of neighbours' differences."""
    error = decoded - clips
    loss = error.abs().mean() + 2 * error.square().mean()
    for axis in (1, 2, 3):
        loss = loss + 0.5 * error.diff(dim=axis).abs().mean()
    return loss


def train(
    vae: nn.Module,
    banks: dict[str, Tensor],
    crops: tuple[Crop, ...],
    budget: Budget,
    out: Path,
    log: Log,
    kernels: Kernels,
    *,
    held_out: Tensor,
    keeps_latents: bool = False,
    seed: int = 0,
    learning_rate: float = 2e-3,
    log_every: int = 50,
    save_every: int | None = None,
    resume: bool = False,
) -> nn.Module:
    """Train to the end of the budget and return the autoencoder with averaged weights and measured statistics.

    Args:
        vae: the autoencoder on its device.
        banks: clips `[N, T, H, W, 3]` uint8 by name.
        crops: shapes of batches.
        budget: steps or seconds.
        out: folder of the state and the weights.
        log: gets a line every `log_every` steps.
        kernels: compiled or not.
        held_out: clips `[N, T, H, W, 3]` uint8 for the PSNR.
        keeps_latents: train the decoder alone, on the latents that the encoder gives; the encoder and the measured
            statistics stay.
        seed: of the clips and the noise of each step.
        learning_rate: peak.
        log_every, save_every: in steps; a state is written only where `save_every` is given.
        resume: continue from the state in `out`.
    """
    device = held_out.device
    dtype = kernels.dtype
    if keeps_latents:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    optimizer = Optimizer(vae, HIDDEN, learning_rate, ema_decay=0.998)
    step = 0
    state = load_state(out / STATE_FILE, device) if resume else None
    if state is not None:
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    generator = torch.Generator(device)
    while (progress := budget.progress(step)) < 1:
        generator.manual_seed(seed * 1_000_003 + step)
        clips = _draw_batch(banks, crops, step, seed, generator)
        with torch.set_grad_enabled(not keeps_latents):
            mean, log_variance = forward.encode(vae, clips, kernels, dtype)
        noise = torch.randn(mean.shape, generator=generator, device=device)
        decoded = forward.decode(vae, mean + torch.exp(0.5 * log_variance) * noise, kernels, dtype)
        reconstruction = reconstruction_loss(decoded, clips.float() / 127.5 - 1)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        (reconstruction + KL_WEIGHT * kl).backward()
        scale = learning_rate_scale(progress, step)
        optimizer.step(scale)
        if step % log_every == 0:
            loss = float(reconstruction.detach())
            optimizer.keep_or_restore(loss == loss and loss < 100)
            log.write("autoencoder", step=step, loss=loss, kl=float(kl.detach()), lr=learning_rate * scale)
        step += 1
        if step % (10 * log_every) == 0:
            log.write("autoencoder", step=step, psnr=psnr(vae, held_out[:8], kernels, dtype)[0])
        if save_every is not None and step % save_every == 0:
            model_state = {name: tensor.detach() for name, tensor in vae.state_dict().items()}
            save_state(out / STATE_FILE, {"model": model_state, "optimizer": optimizer.state_dict(), "step": step})
    vae.load_state_dict(optimizer.ema_state(), strict=False)
    config: Any = vae.config
    means, deviations = config.latents_mean, config.latents_std
    if not keeps_latents:
        means, deviations = measure_latents(vae, banks, kernels, dtype)
        vae.register_to_config(latents_mean=means, latents_std=deviations)  # type: ignore[operator]
    whole, moving = psnr(vae, held_out, kernels, dtype)
    log.write("autoencoder", step=step, psnr=whole, psnr_moving=moving, elapsed_s=budget.elapsed_s)
    about = {"latents_mean": means, "latents_std": deviations, "steps": step, "psnr": whole, "psnr_moving": moving}
    save_weights(out, "vae", vae.state_dict(), about)
    return vae


@torch.no_grad()
def psnr(vae: nn.Module, clips: Tensor, kernels: Kernels, dtype: torch.dtype) -> tuple[float, float]:
    """Reconstruct `[N, T, H, W, 3]` uint8 clips: mean PSNR of a clip in dB, and that of its moving pixels alone.

    A pixel moves where it differs by more than 16 of 255 from the frame before or after.
    """
    whole: list[Tensor] = []
    moving: list[Tensor] = []
    for clip in clips.split(4):
        mean, _ = forward.encode(vae, clip, kernels, dtype)
        decoded = forward.decode(vae, mean, kernels, dtype).clamp(-1, 1)
        error = (decoded - (clip.float() / 127.5 - 1)).square() / 4
        change = (clip[:, 1:].float() - clip[:, :-1].float()).abs().amax(-1, keepdim=True) > 16
        is_moving = torch.zeros_like(clip[..., :1], dtype=torch.bool)
        is_moving[:, 1:] |= change
        is_moving[:, :-1] |= change
        whole.append(-10 * error.mean((1, 2, 3, 4)).clamp_min(1e-10).log10())
        squared = (error * is_moving).sum((1, 2, 3, 4)) / (3 * is_moving.sum((1, 2, 3, 4))).clamp_min(1)
        moving.append(-10 * squared[squared > 0].clamp_min(1e-10).log10())
    return float(torch.cat(whole).mean()), float(torch.cat(moving).mean())


@torch.no_grad()
def measure_latents(
    vae: nn.Module, banks: dict[str, Tensor], kernels: Kernels, dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Measure the mean and the deviation of the latents a channel over up to 128 clips of each bank."""
    rows: list[Tensor] = []
    for clips in banks.values():
        for part in clips[:128].split(8):
            rows.append(forward.encode(vae, part, kernels, dtype)[0].transpose(0, 1).flatten(1))
    latents = torch.cat(rows, dim=1)
    return latents.mean(1).tolist(), latents.std(1).tolist()


def _draw_batch(
    banks: dict[str, Tensor], crops: tuple[Crop, ...], step: int, seed: int, generator: torch.Generator
) -> Tensor:
    """Cut a batch in time out of a bank; which shape it has depends on (seed, step)."""
    choice = torch.Generator().manual_seed(seed * 1_000_003 + step)
    draws = torch.rand(2, generator=choice).tolist()
    reached, crop = 0.0, crops[0]
    for crop in crops:
        reached += crop.share
        if draws[0] < reached:
            break
    clips = banks[crop.bank]
    rows = torch.randint(len(clips), (crop.batch,), generator=generator, device=clips.device)
    start = int(draws[1] * (clips.shape[1] - crop.num_frames + 1))
    return clips[rows, start : start + crop.num_frames]


def main() -> None:
    """Train on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make scenes")
    parser.add_argument("--small", action="store_true", help="small clips and batches")
    parser.add_argument("--save-every", type=int, default=100, help="steps between states")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pool = bank.start_workers(args.workers)
    device = torch.device(args.device)
    banks = draw_banks(pool, SMALL_BANKS if args.small else BANKS, device)
    _, frames, height, width = (SMALL_BANKS if args.small else BANKS)["wide"]
    held_out = bank.draw_clips(bank.say_all(pool, bank.jobs("unseen", 0, 16, 0)), frames, height, width, device, 16)
    vae = fresh_autoencoder(args.seed).to(device)
    train(
        vae,
        banks,
        SMALL_CROPS if args.small else CROPS,
        Budget(steps=args.steps),
        args.out,
        Log(args.out / "log.jsonl"),
        Kernels.choose(device),
        held_out=held_out,
        seed=args.seed,
        save_every=args.save_every,
        resume=args.resume,
    )


def draw_banks(pool: Any, sizes: dict[str, tuple[int, int, int, int]], device: torch.device) -> dict[str, Tensor]:
    """Draw the clips to train on, by name; scenes of different banks differ."""
    banks: dict[str, Tensor] = {}
    for index, (name, (count, frames, height, width)) in enumerate(sizes.items()):
        said = bank.say_all(pool, bank.jobs("train", 50_000_000 + 1_000_000 * index, count, 0))
        banks[name] = bank.draw_clips(said, frames, height, width, device, count)
    return banks


if __name__ == "__main__":
    main()
