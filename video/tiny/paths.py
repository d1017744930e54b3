"""Where the things and the camera of the tiny world are at each time, in closed form.

Invariant: a path depends on time alone, so that any frame can be drawn without the ones before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from video.tiny.vocabulary import MOTIONS
from video.tiny.world import PAN_LIMIT, PAN_SPEED, ZOOM_LIMIT, ZOOM_SPEED, Thing


@dataclass(frozen=True)
class Poses:
    """Where n things stand in F frames on the screen, after the camera; all [n, F] float.

    x, y: middle, fractions of width and height. radius: fraction of the shorter side. angle: radians, clockwise.
    """

    x: Tensor
    y: Tensor
    radius: Tensor
    angle: Tensor


def poses(things: Sequence[Thing], cameras: Sequence[str], times: Tensor) -> Poses:
    """Follow n things under their cameras at F times [F], seconds."""
    fields = [(t.x, t.y, t.radius, t.rate, max(t.limit, 1e-3), t.phase, float(MOTIONS.index(t.motion))) for t in things]
    x, y, radius, rate, limit, phase, motion = torch.tensor(fields, device=times.device)[:, :, None].unbind(1)
    travelled = _travel(times, rate, limit)

    def when(word: str) -> Tensor:
        return (motion == MOTIONS.index(word)).float()

    hop = (phase + rate * times) % 1
    x = x + (when("right") - when("left")) * travelled
    y = y + (when("down") - when("up")) * travelled - when("bouncing") * limit * 4 * hop * (1 - hop)
    radius = radius * torch.exp((when("growing") - when("shrinking")) * travelled)
    angle = when("spinning") * 2 * math.pi * (phase + rate * times)
    pan, scale = camera_path(cameras, times)
    return Poses(0.5 + (x - 0.5 - pan) * scale, 0.5 + (y - 0.5) * scale, radius * scale, angle)


def camera_path(cameras: Sequence[str], times: Tensor) -> tuple[Tensor, Tensor]:
    """Follow n cameras at F times [F]: how far each has turned (frame widths, to the right) and its scale, [n, F]."""
    sides = torch.tensor([[_side(c, "pan right", "pan left"), _side(c, "zoom in", "zoom out")] for c in cameras])
    pan, zoom = sides.to(times.device)[:, :, None].unbind(1)
    limits = torch.tensor([PAN_LIMIT, ZOOM_LIMIT], device=times.device)
    return pan * _travel(times, PAN_SPEED, limits[0]), torch.exp(zoom * _travel(times, ZOOM_SPEED, limits[1]))


def _side(camera: str, positive: str, negative: str) -> float:
    return float(camera == positive) - float(camera == negative)


def _travel(times: Tensor, rate: Tensor | float, limit: Tensor) -> Tensor:
    """Move evenly, then come softly to rest at the limit: about limit·u for small u = rate·t/limit, limit for large."""
    u = rate * times / limit
    return limit * u / (1 + u**3) ** (1 / 3)
