"""What the denoiser sees in one step: clips, captions, noise levels, conditions.

x = (1 - s) clean + s noise, the timestep is 1000 s; s is logit-normal (80 %) or uniform (20 %), shifted more where a
clip has more tokens. Conditioned latent frames are clean with timestep 0: none, the first, the first two to four, or
the first and the last (`rest_latent`); in clips of one or two latent frames at most all but one. A tenth of the
captions is empty. In causal batches a latent frame attends to itself and earlier ones; a prefix of any length is
clean and the later frames have noise levels of their own, as in a rollout with cached keys and values.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from video.tiny.alignment import Shown
from video.tiny.latents import FEWEST_FOR_REST, Bucket, Encoded
from video.tiny.tokenizer import MAX_TOKENS

# Shares of the conditions: none, first latent frame, first two to four, first and last.
CONDITIONS = (0.56, 0.20, 0.16, 0.08)
EMPTY_CAPTIONS = 0.1


@dataclass(frozen=True)
class Batch:
    """One step's material: clean `[B, 16, F, h, w]`, sigmas `[B, F]` (0 where conditioned), text `[B, L, D]`."""

    clean: Tensor
    sigmas: Tensor
    noise: Tensor
    text: Tensor
    mask: Tensor | None
    shown: Shown | None = None


def crop_padding(material: list[Encoded], empty: Tensor) -> tuple[list[Encoded], Tensor]:
    """Keep of every text the longest one's tokens and one of the padding, which `denoise` counts as often as it was."""
    longest = max(int((encoded.text != 0).any(-1).any(0).any(0).sum()) for encoded in material)
    kept = min(longest + 1, MAX_TOKENS)
    return [replace(encoded, text=encoded.text[:, :, :kept].contiguous()) for encoded in material], empty[:kept]


def choose(material: list[Encoded], draw: float, progress: float) -> Encoded:
    """Choose a size of clip: shares move from `share` to `late_share` over the second half."""
    late = min(max(2 * progress - 0.6, 0.0), 1.0)
    shares = [e.bucket.share + late * (e.bucket.late_share - e.bucket.share) for e in material]
    reached = 0.0
    for encoded, share in zip(material, shares, strict=True):
        reached += share / sum(shares)
        if draw < reached:
            return encoded
    return material[-1]


def draw_batch(encoded: Encoded, empty: Tensor, mask: Tensor | None, generator: torch.Generator) -> Batch:
    """Draw clips, captions, noise levels and conditions; nothing is read back to the host."""
    bucket, device = encoded.bucket, empty.device
    size, frames = bucket.batch, bucket.latent_frames

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def pick(count: int) -> Tensor:
        return torch.randint(count, (size,), generator=generator, device=device)

    rows = pick(len(encoded.latents))
    seen = None if encoded.shown is None else encoded.shown[rows]
    clean = encoded.latents[rows].float()
    text = encoded.text[rows, pick(encoded.text.shape[1])]
    text = torch.where((uniform(size, 1, 1) < EMPTY_CAPTIONS), empty, text)
    noise = torch.randn(clean.shape, generator=generator, device=device)
    levels = (size, frames if mask is not None else 1)
    normal = torch.randn(levels, generator=generator, device=device)
    sigmas = torch.where(uniform(*levels) < 0.8, torch.sigmoid(normal), uniform(*levels))
    shift = flow_shift(bucket.tokens)
    sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).expand(size, frames)
    index = torch.arange(frames, device=device)
    if mask is not None:
        return Batch(clean, sigmas * (index >= pick(frames)[:, None]), noise, text, mask, seen)
    none, first, several, _ = CONDITIONS
    kind = uniform(size)
    several_count = 2 + pick(max(min(3, frames - 2), 1))
    count = (kind >= none).long()
    count = torch.where((kind >= none + first) & (kind < none + first + several), several_count, count)
    is_last = (kind >= none + first + several) & (frames >= FEWEST_FOR_REST)
    count = count.clamp(max=frames - 1)
    clean[:, :, -1:] = torch.where(is_last.view(-1, 1, 1, 1, 1), encoded.rest[rows].float(), clean[:, :, -1:])
    is_clean = (index < count[:, None]) | (is_last[:, None] & (index == frames - 1))
    return Batch(clean, sigmas * ~is_clean, noise, text, None, seen)


def flow_shift(tokens: int) -> float:
    """Return the shift of the noise levels: 3 at 540 tokens, growing with their square root, within 1.5 to 6."""
    return min(max(3.0 * math.sqrt(tokens / 540), 1.5), 6.0)


def causal_mask(bucket: Bucket, device: torch.device) -> Tensor:
    """Let each latent frame's tokens attend to it and earlier ones: `[N, N]` bool, rows aligned for fused kernels."""
    frame = torch.arange(bucket.tokens, device=device) // bucket.tokens_a_frame
    aligned = (bucket.tokens + 15) // 16 * 16
    mask = torch.zeros(bucket.tokens, aligned, dtype=torch.bool, device=device)
    mask[:, : bucket.tokens] = frame[:, None] >= frame[None, :]
    return mask[:, : bucket.tokens]
