"""What the denoiser sees in one step: clips, captions, noise levels, conditions.

x = (1 - s) clean + s noise, the timestep is 1000 s; s is logit-normal (80 %) or uniform (20 %), shifted more where a
clip has more tokens. Conditioned latent frames are clean with timestep 0: none, the first, the first two to four, or
the first and the last (`rest_latent`); in clips of one or two latent frames at most all but one. A tenth of the
captions is empty. A clip that begins in the middle of its motion always has its first frame given: a prompt alone asks
for a motion from its beginning. In causal batches a latent frame attends to itself and earlier ones; a prefix of any
length is clean and the later frames have noise levels of their own, as in a rollout with cached keys and values.
"""

import math
from collections.abc import Sequence
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
# tokens down and across a window around all that a thing passes over: four of five clips of a second fit the first one
WINDOWS = ((4, 5), (6, 5), (4, 10))
_COVERED = 0.02  # share of a token that a thing has to cover


@dataclass(frozen=True)
class Batch:
    """One step's material: clean `[B, 16, F, h, w]`, sigmas `[B, F]` (0 where conditioned), text `[B, L, D]`."""

    clean: Tensor
    sigmas: Tensor
    noise: Tensor
    text: Tensor
    mask: Tensor | None
    shown: Shown | None = None


@dataclass(frozen=True)
class Near:
    """Clips whose first thing stays within a window of `down` x `across` tokens, and within no smaller one.

    rows: `[n]` int64, the clips; first, last: `[n, 2]` int64, the lowest and highest line and column of tokens that the
    thing covers at any time.
    """

    down: int
    across: int
    rows: Tensor
    first: Tensor
    last: Tensor


def near_of(encoded: Encoded) -> list[Near]:
    """Find the windows of a size of clip, one `Near` for each that some clip fits."""
    assert encoded.shown is not None
    bucket = encoded.bucket
    columns = bucket.width // (SPATIAL_FACTOR * PATCH)
    cover = encoded.shown.cover[:, 0].unflatten(1, (bucket.latent_frames, -1, columns)).amax(1) > _COVERED
    sides = [(cover.any(2), cover.shape[1]), (cover.any(1), cover.shape[2])]
    index = [torch.arange(size, device=cover.device) for _, size in sides]
    first = torch.stack([torch.where(seen, i, size).amin(1) for (seen, size), i in zip(sides, index, strict=True)], 1)
    last = torch.stack([torch.where(seen, i, -1).amax(1) for (seen, _), i in zip(sides, index, strict=True)], 1)
    is_left = (last >= 0).all(1)
    found = []
    for down, across in WINDOWS:
        fits = is_left & (last - first < torch.tensor((down, across), device=cover.device)).all(1)
        is_left &= ~fits
        rows = fits.nonzero()[:, 0]
        if len(rows) and down <= cover.shape[1] and across <= cover.shape[2]:
            found.append(Near(down, across, rows, first[rows], last[rows]))
    return found


def choose_near(windows: Sequence[Near], draw: float) -> Near:
    """Choose a window as often as clips fit it."""
    reached, total = 0, sum(len(window.rows) for window in windows)
    for window in windows:
        reached += len(window.rows)
        if draw * total < reached:
            return window
    return windows[-1]


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
    window: Near | None = None,
    noise_shift: float = 1.0,
) -> Batch:
    """Draw clips, captions, noise levels and conditions; nothing is read back to the host.

    Args:
        encoded: the clips of a size.
        empty: embedding of the empty caption `[L, D]`.
        mask: attention's, in causal batches.
        generator: of everything drawn.
        window: cut it out around each thing, of as many more clips as cost the same; not for causal batches.
        noise_shift: times the shift of the noise levels; what a thing is is decided in much noise.
    """
    bucket, device = encoded.bucket, empty.device
    size, frames = bucket.batch, bucket.latent_frames
    if window is not None:
        size = size * bucket.tokens_a_frame // (window.down * window.across)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def pick(count: int) -> Tensor:
        return torch.randint(count, (size,), generator=generator, device=device)

    if window is None:
        rows = pick(len(encoded.latents))
        seen = None if encoded.shown is None else encoded.shown[rows]
        clean, corners = encoded.latents[rows].float(), None
    else:
        chosen = pick(len(window.rows))
        rows, seen = window.rows[chosen], None
        corners = corners_of(window, chosen, bucket, uniform(size, 2))
        clean = cut(encoded.latents[rows].float(), corners, window)
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
        rest = encoded.rest[rows].float()
        rest = rest if window is None or corners is None else cut(rest, corners, window)
        clean[:, :, -1:] = torch.where(is_last.view(-1, 1, 1, 1, 1), rest, clean[:, :, -1:])
    is_clean = (index < count[:, None]) | (is_last[:, None] & (index == frames - 1))
    return Batch(clean, sigmas * ~is_clean, noise, text, None, seen)


def corners_of(window: Near, chosen: Tensor, bucket: Bucket, draws: Tensor) -> Tensor:
    """Place the windows of some of its clips, so that where one lies does not tell where in it the thing is.

    chosen: `[B]` int64, places in `window.rows`; draws: `[B, 2]`, 0 to 1. Returns the line and column of each window's
    first token, `[B, 2]` int64.
    """
    side = SPATIAL_FACTOR * PATCH
    size = torch.tensor((window.down, window.across), device=draws.device)
    room = torch.tensor((bucket.height // side, bucket.width // side), device=draws.device) - size
    lowest = (window.last[chosen] - size + 1).clamp(min=0)
    highest = torch.minimum(window.first[chosen], room)
    return lowest + (draws * (highest - lowest + 1)).long().clamp(max=highest - lowest)


def cut(clean: Tensor, corners: Tensor, window: Near) -> Tensor:
    """Cut windows out: `[B, 16, F, h, w]` to `[B, 16, F, 2 down, 2 across]`; corners: `[B, 2]` int64, in tokens."""
    down = PATCH * corners[:, :1] + torch.arange(PATCH * window.down, device=clean.device)
    across = PATCH * corners[:, 1:] + torch.arange(PATCH * window.across, device=clean.device)
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
