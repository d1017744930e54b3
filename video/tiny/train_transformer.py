"""Trains the tiny denoiser: `python -m video.tiny.train_transformer --device cpu --steps 1000 --out runs/a --resume`.

Flow matching: the target is noise - clean over the latent frames that are not conditioned (video/tiny/batches.py); the
loss of a probe on the hidden state in the middle may be added (video/tiny/alignment.py).

Invariant: step n draws everything from (seed, n), so a resumed run continues bit for bit on the CPU.
"""

import argparse
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny import bank, captions, forward
from video.tiny.alignment import Probe
from video.tiny.batches import Batch, causal_mask, choose, choose_near, crop_padding, draw_batch, near_of
from video.tiny.forward import Kernels
from video.tiny.latents import Bucket, Encoded, encode_all, request
from video.tiny.model import TRANSFORMER, build_autoencoder, build_text_encoder, build_transformer
from video.tiny.optim import Budget, Optimizer, learning_rate_scale
from video.tiny.peers import Peers
from video.tiny.runs import Log, load_state, load_weights, save_state, save_weights
from video.tiny.tokenizer import MAX_TOKENS
from video.tiny.train_text import embed

logger = logging.getLogger(__name__)

HIDDEN = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "ffn.net")
STATE_FILE = "transformer.state"
CAPTIONS_EACH = 12
BUCKETS: tuple[Bucket, ...] = (
    Bucket(96, 160, 33, 64, share=0.64, late_share=0.50, material=0.50, max_clips=40960),
    Bucket(96, 96, 33, 96, share=0.10, late_share=0.08, material=0.07, max_clips=8192),
    Bucket(80, 128, 33, 96, share=0.08, late_share=0.05, material=0.06, max_clips=8192),
    Bucket(96, 160, 17, 96, share=0.05, late_share=0.04, material=0.04, max_clips=8192),
    Bucket(96, 96, 57, 64, share=0.06, late_share=0.05, material=0.06, max_clips=8192),
    Bucket(144, 256, 33, 24, share=0.04, late_share=0.14, material=0.12, max_clips=8192),
    Bucket(144, 256, 57, 16, share=0.03, late_share=0.14, material=0.15, max_clips=8192),
)
SMALL_BUCKETS: tuple[Bucket, ...] = (
    Bucket(48, 80, 9, 4, share=0.7, late_share=0.5, material=0.5, max_clips=32),
    Bucket(32, 48, 17, 4, share=0.3, late_share=0.5, material=0.5, max_clips=32),
)


def train(
    model: nn.Module,
    material: list[Encoded],
    empty: Tensor,
    budget: Budget,
    out: Path,
    log: Log,
    kernels: Kernels,
    *,
    seed: int = 0,
    learning_rate: float = 2e-3,
    causal_share: float = 0.15,
    align: float = 0.0,
    near_share: float = 0.0,
    noise_shift: float = 1.0,
    log_every: int = 50,
    save_every: int | None = None,
    weights_every_s: float = 60.0,
    resume: bool = False,
) -> nn.Module:
    """Train to the end of the budget and return the denoiser with averaged weights.

    Args:
        model: the denoiser on its device.
        material: encoded clips by size.
        empty: embedding of the empty caption, `[L, D]`.
        budget: steps or seconds.
        out: folder of the state and the weights.
        log: gets a line every `log_every` steps.
        kernels: compiled or not.
        seed: of everything a step draws.
        learning_rate: peak.
        causal_share: share of the steps whose attention is causal over latent frames.
        align: weight of the probe's loss (`video.tiny.alignment`) over the first half; it is gone after three quarters.
        near_share: share of the steps that see windows around things alone (`batches.Near`); it is gone over the last
            third.
        noise_shift: times the shift of the noise levels.
        log_every, save_every: in steps; a state is written only where `save_every` is given.
        weights_every_s: seconds between writings of the averaged weights.
        resume: continue from the state in `out`.
    """
    device = empty.device
    dtype = kernels.dtype
    peers = Peers()
    material, empty = crop_padding(material, empty)
    optimizer = Optimizer(model, HIDDEN, learning_rate, ema_decay=0.9985)
    probe = Probe(model.patch_embedding.out_channels).to(device)  # type: ignore[union-attr, arg-type]
    probe_optimizer = torch.optim.AdamW(probe.parameters(), lr=learning_rate, weight_decay=0.0)
    step = 0
    state = load_state(out / STATE_FILE, device) if resume else None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        probe.load_state_dict(state["probe"])
        probe_optimizer.load_state_dict(state["probe_optimizer"])
        step = state["step"]
    generator = torch.Generator(device)
    masks = {e.bucket.name: causal_mask(e.bucket, device) for e in material}
    windows = {e.bucket.name: near_of(e) for e in material} if near_share > 0 else {}
    saved_s, seen, losses, window = budget.elapsed_s, 0, torch.zeros((), device=device), 0
    while (progress := peers.agree(budget.progress(step))) < 1:
        # all processes take the same size of clip, each its own clips
        choice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        draws = torch.rand(4, generator=choice).tolist()
        encoded = choose(material, draws[0], progress)
        mask = masks[encoded.bucket.name] if draws[1] < causal_share else None
        generator.manual_seed(seed * 1_000_003 + step + 500_009 * peers.rank)
        is_near = mask is None and draws[2] < near_share * min(max(4 - 4.5 * progress, 0.0), 1.0)
        around = choose_near(windows[encoded.bucket.name], draws[3]) if is_near else None
        batch = draw_batch(encoded, empty, mask, generator, window=around, noise_shift=noise_shift)
        weight = align * min(max(3 - 4 * progress, 0.0), 1.0)
        loss, aligned = flow_and_probe_loss(model, batch, kernels, dtype, probe if weight > 0 else None)
        (loss + weight * aligned).backward()
        peers.average_gradients(optimizer.params)
        scale = learning_rate_scale(progress, step)
        optimizer.step(scale)
        if weight > 0:
            peers.average_gradients(probe.parameters())
            probe_optimizer.step()
            probe_optimizer.zero_grad(set_to_none=True)
        losses, window, seen = losses + loss.detach(), window + 1, seen + len(batch.clean) * peers.size
        if step % log_every == 0:
            value = float(peers.mean(losses)) / window
            optimizer.keep_or_restore(math.isfinite(value))
            losses, window = torch.zeros((), device=device), 0
            if peers.is_first:
                read = float(aligned.detach())
                log.write("transformer", step=step, clips=seen, loss=value, probe=read, lr=learning_rate * scale)
        step += 1
        if save_every is not None and step % save_every == 0 and peers.is_first:
            model_state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
            kept = {"model": model_state, "optimizer": optimizer.state_dict(), "step": step}
            kept |= {"probe": probe.state_dict(), "probe_optimizer": probe_optimizer.state_dict()}
            save_state(out / STATE_FILE, kept)
        if budget.elapsed_s - saved_s > weights_every_s and peers.is_first:
            saved_s = budget.elapsed_s
            save_weights(out, "transformer", optimizer.ema_state(), {"steps": step, "clips": seen, "is_final": False})
    model.load_state_dict(optimizer.ema_state(), strict=False)
    if not peers.is_first:
        return model
    log.write("transformer", step=step, clips=seen, elapsed_s=budget.elapsed_s)
    save_weights(out, "transformer", model.state_dict(), {"steps": step, "clips": seen, "is_final": True})
    return model


def flow_loss(model: nn.Module, batch: Batch, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """Compare the predicted velocity with noise - clean over the frames that are not conditioned."""
    return flow_and_probe_loss(model, batch, kernels, dtype, None)[0]


def flow_and_probe_loss(
    model: nn.Module, batch: Batch, kernels: Kernels, dtype: torch.dtype, probe: Probe | None
) -> tuple[Tensor, Tensor]:
    """Return `flow_loss` and the probe's loss on the hidden state in the middle, 0 without a probe."""
    middle = len(model.blocks) // 2 - 1  # type: ignore[arg-type]
    taps = {middle: batch.clean} if probe is not None else {}
    sigmas = batch.sigmas[:, None, :, None, None]
    noisy = torch.lerp(batch.clean, batch.noise, sigmas)
    velocity = forward.denoise(
        model, noisy, 1000 * batch.sigmas, batch.text.to(dtype), kernels, batch.mask, dtype, MAX_TOKENS, taps
    )
    error = (velocity - (batch.noise - batch.clean)).square().mean((1, 3, 4))
    counts = (batch.sigmas > 0).float()
    loss = (error * counts).sum() / counts.sum().clamp_min(1)
    if probe is None or batch.shown is None:
        return loss, torch.zeros((), device=loss.device)
    return loss, probe.loss(taps[middle], batch.shown)


def fresh_transformer(seed: int, **overrides: Any) -> nn.Module:
    """Build the denoiser with gates near zero and an output of zero."""
    torch.manual_seed(seed)
    model: Any = build_transformer(**overrides)
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    nn.init.normal_(model.condition_embedder.time_proj.weight, std=0.02)
    nn.init.zeros_(model.condition_embedder.time_proj.bias)
    result: nn.Module = model
    return result


def main() -> None:
    """Train on the command line, from the autoencoder and the text encoder in --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make scenes and captions")
    parser.add_argument("--small", action="store_true", help="small clips and batches")
    parser.add_argument("--layers", type=int, default=TRANSFORMER["num_layers"])
    parser.add_argument("--save-every", type=int, default=100, help="steps between states")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    buckets = SMALL_BUCKETS if args.small else BUCKETS
    pool = bank.start_workers(args.workers)
    said = request(pool, buckets, CAPTIONS_EACH)
    device = torch.device(args.device)
    kernels = Kernels.choose(device)
    weights, about = load_weights(args.out, "vae")
    vae = build_autoencoder(latents_mean=about["latents_mean"], latents_std=about["latents_std"]).to(device)
    vae.load_state_dict(weights)
    encoder: Any = build_text_encoder(len(captions.WORDS) + 3)
    encoder.to(device).eval()
    encoder.load_state_dict(load_weights(args.out, "text")[0])
    material = encode_all(buckets, said, vae, encoder, kernels, None)
    train(
        fresh_transformer(args.seed, num_layers=args.layers).to(device),
        material,
        empty_text(encoder, device),
        Budget(steps=args.steps),
        args.out,
        Log(args.out / "log.jsonl"),
        kernels,
        seed=args.seed,
        save_every=args.save_every,
        resume=args.resume,
    )


def empty_text(encoder: Any, device: torch.device) -> Tensor:
    """Embed the empty caption: `[L, D]`."""
    ids = torch.zeros(1, MAX_TOKENS, dtype=torch.int64, device=device)
    ids[0, 0] = 1
    dtype = forward.training_dtype(device)
    return embed(encoder, ids, dtype)[0]


if __name__ == "__main__":
    main()
