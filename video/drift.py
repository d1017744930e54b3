"""How a chain of segments changes its look: measured on decoded frames, against the chain's first segment.

Measured on their own, since scores of quality reward over-exposure: luminance, saturation, clipped shares, sharpness.
Limits of this report: it does not know what the prompt asks for, so a night that falls as asked is reported like a
picture that darkens by itself; the bounds below are set by eye, not calibrated.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from video.errors import InvalidClip

POLICIES = ("report", "stop")

# bounds on a segment against the first one; outside, the segment counts as drifted
LUMA_RATIO = (0.75, 1.33)
SATURATION_RATIO = (0.6, 1.67)
SHARPNESS_RATIO = (0.5, 2.0)
CLIPPED_RISE = 0.2
# below these a ratio says nothing: a grey or an even picture stays so whatever its ratio
_MIN_LUMA, _MIN_SATURATION, _MIN_SHARPNESS = 0.02, 0.05, 1e-5
_DARK, _BRIGHT = 2, 253


@dataclass(frozen=True)
class Look:
    """Means over a segment's frames and pixels.

    `luma` (BT.709, of gamma-encoded values) and `saturation` (HSV) in 0..1; `clipped_dark` and `clipped_bright` the
    shares of pixels with all channels at most 2 and at least 253; `sharpness` the variance of the luma's Laplacian.
    """

    luma: float
    saturation: float
    clipped_dark: float
    clipped_bright: float
    sharpness: float


class LookMeter:
    """Takes frames as they come and gives their look."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.sums = torch.zeros(5, dtype=torch.float64)

    def add(self, frames: Tensor) -> None:
        """Measure frames `[n, H, W, 3]` uint8."""
        for frame in frames:
            self.sums += _measure(frame)
        self.num_frames += frames.shape[0]

    def look(self) -> Look:
        """Give the means so far; at least one frame must have come."""
        return Look(*(float(value) for value in self.sums / self.num_frames))


def check_policy(policy: str) -> None:
    """Refuse a policy that this release does not have.

    Raises:
        InvalidClip: `policy` is not in POLICIES.
    """
    if policy not in POLICIES:
        raise InvalidClip(f"extend.on_drift: must be one of {', '.join(POLICIES)}, got {policy!r}.")


def compare(reference: Look, look: Look) -> dict[str, Any]:
    """Report a segment's look, its change against the reference, and what is out of bounds.

    Returns:
        The look's fields, `luma_change`, `saturation_change`, `sharpness_ratio`, and `drifted`, the names of the
        figures out of bounds.
    """
    drifted = []
    for name, bounds, least in (
        ("luma", LUMA_RATIO, _MIN_LUMA),
        ("saturation", SATURATION_RATIO, _MIN_SATURATION),
        ("sharpness", SHARPNESS_RATIO, _MIN_SHARPNESS),
    ):
        before, after = getattr(reference, name), getattr(look, name)
        if max(before, after) >= least and not bounds[0] <= max(after, 1e-9) / max(before, 1e-9) <= bounds[1]:
            drifted.append(name)
    for name in ("clipped_dark", "clipped_bright"):
        if getattr(look, name) - getattr(reference, name) > CLIPPED_RISE:
            drifted.append(name)
    return {
        **asdict(look),
        "luma_change": look.luma - reference.luma,
        "saturation_change": look.saturation - reference.saturation,
        "sharpness_ratio": look.sharpness / max(reference.sharpness, 1e-9),
        "drifted": drifted,
    }


def _measure(frame: Tensor) -> Tensor:
    """Measure one frame `[H, W, 3]` uint8; gives the five figures of `Look`."""
    pixels = frame.float() / 255.0
    luma = pixels @ pixels.new_tensor([0.2126, 0.7152, 0.0722])
    high, low = pixels.amax(-1), pixels.amin(-1)
    saturation = torch.where(high > 0, (high - low) / high.clamp_min(1e-6), torch.zeros_like(high))
    inner = luma[1:-1, 1:-1]
    laplacian = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:] - 4 * inner
    return torch.stack(
        [
            luma.mean(),
            saturation.mean(),
            (frame <= _DARK).all(-1).float().mean(),
            (frame >= _BRIGHT).all(-1).float().mean(),
            laplacian.var(correction=0),
        ]
    ).double()
