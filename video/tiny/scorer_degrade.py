"""Damage drawn frames as a small autoencoder and a diffusion model do, to train and to test the scorer.

Blur, lost resolution, block noise in the cosine domain, ghosts of a neighbouring frame, bent outlines, shifted colours,
grain. All frames of a clip share their `Damage`, save for the grain.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Damage:
    """How n frames are damaged, all float.

    blur: [n] 0..3 rounds of a 3x3 binomial filter, fractional ones blended. coarse: [n] 0..1 share of the frame at
    half resolution. ghost: [n] 0..1 share of the neighbouring frame. blocks: [n] 0..1 step of the 8x8 cosine
    coefficients, relative to white. grain: [n] standard deviation relative to white. gain, lift: [n, 3] colour.
    saturation: [n]. bend: [n, 2, 4, 6] displacement on a coarse grid, in shares of the shorter side.
    """

    blur: Tensor
    coarse: Tensor
    ghost: Tensor
    blocks: Tensor
    grain: Tensor
    gain: Tensor
    lift: Tensor
    saturation: Tensor
    bend: Tensor

    def repeated(self, frames: int) -> "Damage":
        """Damage each of n clips' F frames alike: n * F frames."""
        return Damage(*(value.repeat_interleave(frames, dim=0) for value in vars(self).values()))


def draw_damage(count: int, generator: torch.Generator, strength: float = 1.0) -> Damage:
    """Draw the damage of `count` frames or clips on the CPU; strength 0 is none, 1 what training uses.

    Every kind of damage is left out of two frames in five.
    """

    def amount(most: float, *shape: int) -> Tensor:
        is_used = torch.rand(count, generator=generator) < 0.6
        values = torch.rand(count, *shape, generator=generator) * most * strength
        return values * is_used.view(-1, *[1] * len(shape))

    def around(most: float, *shape: int) -> Tensor:
        sign = torch.rand(count, *shape, generator=generator) * 2 - 1
        return amount(most).view(-1, *[1] * len(shape)) * sign

    return Damage(
        blur=amount(3.0),
        coarse=amount(1.0),
        ghost=amount(0.4),
        blocks=amount(0.10),
        grain=amount(0.05),
        gain=1 + around(0.14, 3),
        lift=around(0.06, 3),
        saturation=1 + around(0.25),
        bend=around(0.06, 2, 4, 6),
    )


def degrade(
    frames: Tensor, ghosts: Tensor, covers: Tensor, damage: Damage, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Damage frames, and bend what they truly show alike.

    Args:
        frames, ghosts: [n, 3, H, W] float 0..1; the ghost is a neighbour in time. H and W are multiples of 8.
        covers: [n, K, H, W] float 0..1.
        damage: of the n frames.
        generator: of the frames' device, for the grain.

    Returns: frames [n, 3, H, W] 0..1 and covers [n, K, H, W].
    """
    device = frames.device
    blur, coarse, ghost, blocks, grain, gain, lift, saturation, bend = (v.to(device) for v in vars(damage).values())
    wide = (slice(None), None, None, None)
    frames = frames + ghost[wide] * (ghosts - frames)
    bent = _bend(torch.cat([frames, covers], dim=1), bend)
    frames, covers = bent[:, :3], bent[:, 3:]
    small = F.interpolate(F.avg_pool2d(frames, 2), scale_factor=2.0, mode="bilinear", align_corners=False)
    frames = frames + coarse[wide] * (small - frames)
    for round_index in range(3):
        share = (blur - round_index).clamp(0, 1)
        if float(share.max()) > 0:
            frames = frames + share[wide] * (_binomial(frames) - frames)
    frames = _quantise(frames, blocks)
    gray = frames.mean(dim=1, keepdim=True)
    frames = gray + saturation[wide] * (frames - gray)
    frames = frames * gain[:, :, None, None] + lift[:, :, None, None]
    noise = torch.randn(frames.shape, generator=generator, device=device)
    return (frames + grain[wide] * noise).clamp(0, 1), covers


def degrade_clip(clip: Tensor, seed: int, strength: float = 1.0) -> Tensor:
    """Damage a clip [F, H, W, 3] uint8 throughout, each frame haunted by the one three frames before it."""
    generator = torch.Generator().manual_seed(seed)
    frames = clip.permute(0, 3, 1, 2).float() / 255
    before = torch.cat([frames[:1].expand(min(3, len(frames)), -1, -1, -1), frames])[: len(frames)]
    damage = draw_damage(1, generator, strength).repeated(len(frames))
    frames, _ = degrade(frames, before, frames[:, :0], damage, generator)
    return (frames.permute(0, 2, 3, 1) * 255 + 0.5).to(torch.uint8)


def _bend(images: Tensor, bend: Tensor) -> Tensor:
    n, _, height, width = images.shape
    shift = F.interpolate(bend, size=(height, width), mode="bicubic", align_corners=False)
    shift = (
        shift
        * torch.tensor([2 * min(height, width) / width, 2 * min(height, width) / height], device=images.device)[
            None, :, None, None
        ]
    )
    straight = torch.eye(2, 3, device=images.device).expand(n, 2, 3)
    grid = F.affine_grid(straight, [n, 1, height, width], align_corners=False)
    return F.grid_sample(images, grid + shift.permute(0, 2, 3, 1), padding_mode="border", align_corners=False)


def _binomial(frames: Tensor) -> Tensor:
    padded = F.pad(frames, (1, 1, 1, 1), mode="replicate")
    across = (padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]) / 4
    return (across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]) / 4


def _quantise(frames: Tensor, step: Tensor) -> Tensor:
    """Round the cosine coefficients of 8x8 blocks, higher ones more coarsely, as JPEG does."""
    n, channels, height, width = frames.shape
    position = torch.arange(8, device=frames.device, dtype=torch.float32)
    cosines = torch.cos((2 * position[None] + 1) * position[:, None] * torch.pi / 16) / 2
    cosines[0] /= 2**0.5
    tiles = frames.reshape(n, channels, height // 8, 8, width // 8, 8)
    coefficients = torch.einsum("ui,nchiwj,vj->nchuwv", cosines, tiles, cosines)
    frequency = position[:, None] + position[None, :]
    coarse = (step[:, None, None] * (0.3 + 0.35 * frequency)).clamp_min(1e-4)[:, None, None, :, None, :]
    coefficients = torch.round(coefficients / coarse) * coarse
    tiles = torch.einsum("ui,nchuwv,vj->nchiwj", cosines, coefficients, cosines)
    return tiles.reshape(n, channels, height, width)
