"""Small pictures of a clip while it is denoised: latents to colours by one linear map, fitted to the autoencoder.

The mean colour under a latent pixel is nearly a linear function of the channels of that pixel and its eight neighbours.
The map is found by least squares when a model is loaded: drawn fields of colour, gradients and edges are encoded, and
their colours explained by the latents. So every autoencoder of the Wan family has its own map, its first latent frame
another one, and neither goes stale when weights change; nothing is stored. What is shown is the clip that the model
aims at by now (latents - sigma * velocity), not the noisy latents, at its middle latent frame.
"""

import io
import logging
import math
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad, unfold

from video.checkpoints import Checkpoint
from video.conditions import encode_frames

logger = logging.getLogger(__name__)

# about so many pictures of one denoising
PICTURES = 8
MAX_SIDE = 320
_QUALITY = 70
# 2026-11, embedded model, one core of a busy EPYC: 24 fields take 2 s and explain 0.84 to 0.85 of the variance of the
# colours of two decoded clips, 96 take 10 s and explain 0.86 to 0.89; without the neighbours 24 explain 0.71 to 0.74.
# A picture takes 12 ms, the autoencoder 121 ms for the same latent frame, a denoise step 467 ms.
_FIELDS = 24
_FIELD_SIDE = 64
_NEIGHBOURS = 3
# in normalised latents: keeps channels that say little from being weighed
_RIDGE = 1e-2


@dataclass(frozen=True)
class Preview:
    """A picture of a segment after a step."""

    segment: int
    step: int
    total_steps: int
    jpeg: bytes


@dataclass(frozen=True)
class LinearMap:
    """Colours in 0..1 from normalised latents: `neighbourhoods [n, 9 C] @ weight [9 C, 3] + bias [3]`."""

    weight: Tensor
    bias: Tensor
    # share of the variance of the colours that it explains where it was fitted
    r2: float


@dataclass(frozen=True)
class Previewer:
    """The maps of one autoencoder: of the first latent frame, which is one frame, and of the later ones."""

    first: LinearMap
    later: LinearMap
    spatial_factor: int

    def draw(self, latents: Tensor) -> bytes:
        """Draw the middle latent frame of `[1, C, F, H, W]` normalised latents as a JPEG of at most MAX_SIDE a side."""
        index = latents.shape[2] // 2
        chosen = self.first if index == 0 else self.later
        frame = latents[0, :, index].float()
        height, width = frame.shape[1:]
        colours = (neighbourhoods(frame) @ chosen.weight + chosen.bias).clamp(0, 1)
        growth = min(self.spatial_factor, MAX_SIDE / max(height, width))
        size = max(1, round(height * growth)), max(1, round(width * growth))
        small = colours.T.reshape(1, 3, height, width)
        large = interpolate(small, size=size, mode="bilinear", align_corners=False)[0]
        pixels = (large.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
        return buffer.getvalue()


def is_preview_step(step: int, num_steps: int) -> bool:
    """Whether a picture is drawn after this step, from 1 to `num_steps`; not after the last one, which is decoded."""
    return step < num_steps and step % max(1, math.ceil(num_steps / (PICTURES + 1))) == 0


@torch.inference_mode()
def fit_previewer(checkpoint: Checkpoint) -> Previewer:
    """Fit the maps of a checkpoint's autoencoder to drawn fields of colour."""
    side = math.lcm(checkpoint.size_multiple, 16)
    side *= max(1, _FIELD_SIDE // side)
    generator = torch.Generator("cpu").manual_seed(0)
    frames = checkpoint.temporal_factor + 1
    first: list[tuple[Tensor, Tensor]] = []
    later: list[tuple[Tensor, Tensor]] = []
    for _ in range(_FIELDS):
        field = _draw_field(side, generator)
        # a still: then all frames of a latent frame have the colours that it is to explain
        pixels = (field.permute(1, 2, 0) * 255).round().to(torch.uint8)
        latents = encode_frames(checkpoint, pixels.expand(frames, -1, -1, -1))
        colours = avg_pool2d(field[None].to(checkpoint.device), checkpoint.spatial_factor)[0].flatten(1).T
        for kept, index in ((first, 0), (later, 1)):
            kept.append((neighbourhoods(latents[0, :, index]), colours))
    made = Previewer(_fit(first), _fit(later), checkpoint.spatial_factor)
    logger.info("previews: linear maps explain %.2f and %.2f of the colours", made.first.r2, made.later.r2)
    return made


def neighbourhoods(frame: Tensor) -> Tensor:
    """Give each pixel of `[C, H, W]` with its neighbours, those at the rim with the rim once more: `[H W, 9 C]`."""
    rim = _NEIGHBOURS // 2
    return unfold(pad(frame[None], (rim,) * 4, mode="replicate"), _NEIGHBOURS)[0].T


def _fit(pairs: list[tuple[Tensor, Tensor]]) -> LinearMap:
    """Solve the ridge regression of colours `[n, 3]` on neighbourhoods `[n, 9 C]` and a constant."""
    channels = torch.cat([channels for channels, _ in pairs]).double()
    colours = torch.cat([colours for _, colours in pairs]).double()
    inputs = torch.cat([channels, torch.ones_like(channels[:, :1])], dim=1)
    normal = inputs.T @ inputs
    ridge = _RIDGE * len(inputs) * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    # the constant is free
    ridge[-1, -1] = 0
    solved = torch.linalg.solve(normal + ridge, inputs.T @ colours)
    rest = ((colours - inputs @ solved) ** 2).sum()
    spread = ((colours - colours.mean(0)) ** 2).sum()
    return LinearMap(solved[:-1].float(), solved[-1].float(), float(1 - rest / spread))


def _draw_field(side: int, generator: torch.Generator) -> Tensor:
    """Draw `[3, side, side]` in 0..1: smooth colours of a random scale, half of the time under a shape with an edge."""

    def smooth(cells: int) -> Tensor:
        coarse = torch.rand(1, 3, cells, cells, generator=generator)
        return interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False)[0].clamp(0, 1)

    cells = [1, 2, 3, 5, 8]

    def any_cells() -> int:
        return cells[int(torch.randint(len(cells), (1,), generator=generator))]

    field = smooth(any_cells())
    if torch.rand(1, generator=generator) < 0.5:
        y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
        centre_y, centre_x, radius = torch.rand(3, generator=generator)
        inside = (y - centre_y) ** 2 + (x - centre_x) ** 2 < (0.1 + 0.4 * radius) ** 2
        field = torch.where(inside, smooth(any_cells()), field)
    return field
