"""The scorer's two small networks: where things are and what is behind them, and what a cut-out thing is.

Frames are brought to a shorter side of 96 pixels first, so that things look as large as in training. Masks have half
that resolution. About 350,000 parameters, kept as fp16 in assets/tiny_world/scorer.safetensors, computed in fp32.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from video.tiny.vocabulary import COLORS, KINDS, PLAINS

SIDE = 96  # pixels of the shorter side
CROP = 32  # pixels of a cut-out's side
MARGIN = 1.3  # side of a cut-out over the side of its thing's box
# What is behind in one frame; day turning to night is told from the frames together.
LOOKS: tuple[str, ...] = (*PLAINS, "day", "night", "sea", "snow", "rain", "city")


def _convolve(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Finder(nn.Module):
    """Tells things from what is behind them, and what that is."""

    def __init__(self) -> None:
        super().__init__()
        self.down_half = nn.Sequential(_convolve(3, 16, stride=2), _convolve(16, 16))
        self.down_quarter = nn.Sequential(_convolve(16, 32, stride=2), _convolve(32, 32))
        self.down_eighth = nn.Sequential(_convolve(32, 64, stride=2), _convolve(64, 64, dilation=2), _convolve(64, 64))
        self.up_quarter = _convolve(96, 32)
        self.up_half = _convolve(48, 16)
        self.mask = nn.Conv2d(16, 1, 1)
        self.look = nn.Sequential(nn.Linear(64 * 3 + 9, 64), nn.ReLU(), nn.Linear(64, len(LOOKS)))

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Look at frames [n, 3, H, W] 0..1, sides multiples of 8: mask logits [n, H/2, W/2], look logits [n, LOOKS]."""
        half = self.down_half(frames - 0.5)
        quarter = self.down_quarter(half)
        eighth = self.down_eighth(quarter)
        up = self.up_quarter(torch.cat([F.interpolate(eighth, scale_factor=2.0), quarter], dim=1))
        up = self.up_half(torch.cat([F.interpolate(up, scale_factor=2.0), half], dim=1))
        # what is behind differs from top to bottom: three bands, with their mean colours
        bands = F.adaptive_avg_pool2d(eighth, (3, 1)).flatten(1)
        colors = F.adaptive_avg_pool2d(frames - 0.5, (3, 1)).flatten(1)
        return self.mask(up)[:, 0], self.look(torch.cat([bands, colors], dim=1))


class Namer(nn.Module):
    """Names the kind and the colour of a cut-out thing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolve(4, 24), nn.MaxPool2d(2), _convolve(24, 48), nn.MaxPool2d(2), _convolve(48, 80), _convolve(80, 80)
        )
        self.kind = nn.Sequential(nn.Linear(80 * 16, 64), nn.ReLU(), nn.Linear(64, len(KINDS)))
        self.color = nn.Sequential(nn.Linear(80 + 3, 64), nn.ReLU(), nn.Linear(64, len(COLORS)))

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        """Look at cut-outs [n, 4, CROP, CROP], colours and mask 0..1: logits [n, KINDS] and [n, COLORS]."""
        features = self.body(crops - 0.5)
        mask = crops[:, 3:]
        mean = (crops[:, :3] * mask).sum((2, 3)) / mask.sum((2, 3)).clamp_min(1e-3)
        kind = self.kind(F.adaptive_avg_pool2d(features, 4).flatten(1))
        return kind, self.color(torch.cat([features.mean((2, 3)), mean - 0.5], dim=1))


class Scorer(nn.Module):
    """Both networks together, as they are trained and stored."""

    def __init__(self) -> None:
        super().__init__()
        self.finder = Finder()
        self.namer = Namer()


def load_scorer(path: Path) -> Scorer:
    """Load the weights of a file; ready to read clips."""
    scorer = Scorer()
    scorer.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return scorer.eval()


def save_scorer(scorer: Scorer, path: Path) -> None:
    """Store the weights as fp16."""
    state = {k: v.half() for k, v in scorer.state_dict().items() if not k.endswith("num_batches_tracked")}
    save_file({k: v.contiguous().cpu() for k, v in state.items()}, path)


def to_side(frames: Tensor) -> Tensor:
    """Bring frames [F, 3, H, W] to the networks' size: shorter side `SIDE`, the other the nearest multiple of 8."""
    height, width = frames.shape[2:]
    scale = SIDE / min(height, width)
    size = [max(SIDE, 8 * round(side * scale / 8)) for side in (height, width)]
    if size == [height, width]:
        return frames
    return F.interpolate(frames, size=size, mode="bilinear", align_corners=False, antialias=True)


def cut_out(frames: Tensor, masks: Tensor, boxes: Tensor, angles: Tensor | None = None) -> Tensor:
    """Cut things out of frames.

    Args:
        frames: [n, 3, H, W] 0..1.
        masks: [n, H/2, W/2] 0..1, of the one thing.
        boxes: [n, 3] middle x, middle y and longer side, in pixels of the frames.
        angles: [n] radians by which the cut-outs are turned, if at all.

    Returns: [n, 4, CROP, CROP], colours and mask.
    """
    height, width = frames.shape[2:]
    x, y, side = boxes.unbind(1)
    side = side.clamp_min(4) * MARGIN
    turn = torch.zeros_like(x) if angles is None else angles
    across, along = side * torch.cos(turn), side * torch.sin(turn)
    rows = [across / width, -along / width, 2 * x / width - 1, along / height, across / height, 2 * y / height - 1]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), [len(x), 1, CROP, CROP], align_corners=False)
    colors = F.grid_sample(frames, grid, padding_mode="border", align_corners=False)
    mask = F.grid_sample(masks[:, None], grid, padding_mode="zeros", align_corners=False)
    return torch.cat([colors, mask], dim=1)


def mask_boxes(masks: Tensor, least: float = 0.5) -> Tensor:
    """Box masks [n, h, w] 0..1 of half resolution: middle x, middle y, longer side [n, 3] in pixels; zeros if empty."""
    solid = masks > least
    columns, rows = solid.any(1), solid.any(2)
    edges = []
    for present in (columns, rows):
        first = present.float().argmax(1).float()
        last = present.shape[1] - present.flip(1).float().argmax(1).float()
        edges.append((first, last))
    (left, right), (top, bottom) = edges
    boxes = torch.stack([left + right, top + bottom, 2 * torch.maximum(right - left, bottom - top)], dim=1)
    return boxes * solid.flatten(1).any(1)[:, None]
