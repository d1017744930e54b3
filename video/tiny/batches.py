"""What the denoiser sees in one step: clips, captions, noise levels, conditions.

x = (1 - s) clean + s noise, the timestep is 1000 s; s is logit-normal (80 %) or uniform (20 %), shifted more where a
clip has more tokens. Conditioned latent frames are clean with timestep 0: none, the first, the first two to four, or
the first and the last (`rest_latent`); in clips of one or two latent frames at most all but one. A tenth of the
captions is empty. A clip that begins in the middle of its motion always has its first frame given: a prompt alone asks
for a motion from its beginning. In causal batches a latent frame attends to itself and earlier ones; a prefix of any
length is clean and the later frames have noise levels of their own, as in a rollout with cached keys and values.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from video.tiny.alignment import Shown
from video.tiny.latents import FEWEST_FOR_REST, Bucket, Encoded
from video.tiny.model import PATCH, SPATIAL_FACTOR
from video.tiny.tokenizer import MAX_TOKENS

# Shares of the conditions: none, first latent frame, first two to four, first and last.
CONDITIONS = (0.56, 0.20, 0.16, 0.08)
EMPTY_CAPTIONS = 0.1
NEAR = (4, 5)  # tokens down and across a window around a thing
LONGEST_NEAR = 2  # latent frames of a clip in which a thing stays within its window


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


def draw_batch(
    encoded: Encoded,
    empty: Tensor,
    mask: Tensor | None,
    generator: torch.Generator,
    *,
    is_near: bool = False,
    noise_shift: float = 1.0,
) -> Batch:
    """Draw clips, captions, noise levels and conditions; nothing is read back to the host.

    Args:
        encoded: the clips of a size.
        empty: embedding of the empty caption `[L, D]`.
        mask: attention's, in causal batches.
        generator: of everything drawn.
        is_near: cut a window of `NEAR` tokens around each thing, of as many more clips as cost the same; not for the
            causal batches nor for clips in which things go far.
        noise_shift: times the shift of the noise levels; what a thing is is decided in much noise.
    """
    bucket, device = encoded.bucket, empty.device
    size, frames = bucket.batch, bucket.latent_frames
    if is_near:
        size = size * bucket.tokens_a_frame // (NEAR[0] * NEAR[1])

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def pick(count: int) -> Tensor:
        return torch.randint(count, (size,), generator=generator, device=device)

    rows = pick(len(encoded.latents))
    seen = None if encoded.shown is None else encoded.shown[rows]
    clean = encoded.latents[rows].float()
    if is_near:
        assert seen is not None
        clean, seen = near(clean, seen, bucket, pick(6)), None
    text = encoded.text[rows, pick(encoded.text.shape[1])]
    text = torch.where((uniform(size, 1, 1) < EMPTY_CAPTIONS), empty, text)
    noise = torch.randn(clean.shape, generator=generator, device=device)
    levels = (size, frames if mask is not None else 1)
    normal = torch.randn(levels, generator=generator, device=device)
    sigmas = torch.where(uniform(*levels) < 0.8, torch.sigmoid(normal), uniform(*levels))
    shift = noise_shift * flow_shift(bucket.tokens)
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
    if encoded.is_late is not None:
        count = torch.where(encoded.is_late[rows], count.clamp(min=1), count)
    count = count.clamp(max=frames - 1)
    if frames >= FEWEST_FOR_REST:
        clean[:, :, -1:] = torch.where(is_last.view(-1, 1, 1, 1, 1), encoded.rest[rows].float(), clean[:, :, -1:])
    is_clean = (index < count[:, None]) | (is_last[:, None] & (index == frames - 1))
    return Batch(clean, sigmas * ~is_clean, noise, text, None, seen)


def near(clean: Tensor, seen: Shown, bucket: Bucket, draws: Tensor) -> Tensor:
    """Cut a window around the first thing of each clip: `[B, 16, F, h, w]` to `[B, 16, F, 2 NEAR, 2 NEAR]`.

    draws: `[B]` int64, 0 to 5: which of six windows, so that a window does not tell where in it the thing is.
    """
    columns = bucket.width // (SPATIAL_FACTOR * PATCH)
    lines = bucket.height // (SPATIAL_FACTOR * PATCH)
    token = seen.cover[:, 0].float().unflatten(1, (bucket.latent_frames, -1)).sum(1).argmax(1)
    top = (token // columns - 1 - draws % 2).clamp(0, lines - NEAR[0])
    left = (token % columns - 1 - draws // 2).clamp(0, columns - NEAR[1])
    down = PATCH * top[:, None] + torch.arange(PATCH * NEAR[0], device=clean.device)
    across = PATCH * left[:, None] + torch.arange(PATCH * NEAR[1], device=clean.device)
    picked = torch.arange(len(clean), device=clean.device)[:, None, None]
    # axes that are indexed come first where others stand between them
    return clean[picked, :, :, down[:, :, None], across[:, None, :]].permute(0, 3, 4, 1, 2)


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
