"""The things of the tiny world as signed distances: each kind is a short list of painted parts.

Distances after I. Quilez, "2D distance functions". Coordinates are the thing's own: its middle is (0, 0), its half
height 1, x to the right, y down. A part is a distance (negative inside, its gradient 1 at the edge) with either a
shade of the thing's colour (-1 dark, 0 itself, 1 light) or an ink of its own. Parts are painted in order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

REACH = 1.42  # no part lies farther from the middle, in half heights

DARK_GLASS = (96, 134, 168)
LAMP = (255, 232, 150)
RUBBER = (34, 34, 38)
STEEL = (176, 180, 186)
WOOD = (122, 82, 52)
BEAK = (250, 170, 40)
EYE = (24, 24, 28)


class Part(NamedTuple):
    """A painted part: distance [n, F, P, P]; shade (-1..1) of the thing's own colour, or an ink (sRGB)."""

    distance: Tensor
    shade: Tensor | float = 0.0
    ink: tuple[int, int, int] | None = None


def parts(kind: str, x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    """List the parts of a kind at points x, y [n, F, P, P]; `light` [n, F, P, P] runs from 1 (top left) to -1."""
    return _KINDS[kind](x, y, light)


def circle(x: Tensor, y: Tensor, cx: float, cy: float, radius: float) -> Tensor:
    return torch.hypot(x - cx, y - cy) - radius


def box(x: Tensor, y: Tensor, cx: float, cy: float, half_x: float, half_y: float, rounding: float = 0.05) -> Tensor:
    qx, qy = (x - cx).abs() - (half_x - rounding), (y - cy).abs() - (half_y - rounding)
    return torch.hypot(qx.clamp_min(0), qy.clamp_min(0)) + torch.maximum(qx, qy).clamp_max(0) - rounding


def polygon(x: Tensor, y: Tensor, corners: list[tuple[float, float]], rounding: float = 0.0) -> Tensor:
    """Distance to a convex polygon, corners clockwise on the screen; exact at the edges."""
    distance: Tensor | None = None
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        length = math.hypot(bx - ax, by - ay)
        nx, ny = (by - ay) / length, (ax - bx) / length
        side = (x - ax) * nx + (y - ay) * ny
        distance = side if distance is None else torch.maximum(distance, side)
    assert distance is not None
    return distance - rounding


def fold(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Fold the plane into one of `count` equal sectors: (along the sector's middle, which starts upwards; across)."""
    sector = 2 * math.pi / count
    angle = torch.atan2(x, -y)
    angle = angle - sector * torch.round(angle / sector)
    radius = torch.hypot(x, y)
    return radius * torch.cos(angle), radius * torch.sin(angle).abs()


def step(value: Tensor, softness: float = 0.06) -> Tensor:
    """Rise smoothly from 0 (value < -softness) to 1 (value > softness)."""
    return ((value + softness) / (2 * softness)).clamp(0, 1)


def _ball(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    band = step(0.2 - (y + 0.35 * x * x - 0.1).abs(), 0.05)
    return [Part(circle(x, y, 0, 0, 0.98), (0.75 * light).clamp(-0.45, 0.8) - 0.75 * band)]


def _square(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    inner = box(x, y, 0, 0, 0.5, 0.5, 0.08)
    return [Part(box(x, y, 0, 0, 0.88, 0.88, 0.12), 0.25 * light - 0.65 * step(x + y) * step(inner))]


def _triangle(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    corners = [(0.0, -1.02), (0.9, 0.53), (-0.9, 0.53)]
    return [Part(polygon(x, y, corners, 0.08), 0.3 - 0.85 * step(x))]


def _star(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    along, across = fold(x, y, 5)
    # the edge runs from the tip (1.1, 0) to the notch at radius 0.52, half a sector away
    notch_along, notch_across = 0.52 * math.cos(math.pi / 5), 0.52 * math.sin(math.pi / 5)
    length = math.hypot(1.1 - notch_along, notch_across)
    edge = ((along - 1.1) * notch_across + across * (1.1 - notch_along)) / length
    return [Part(edge, 0.55 * light + 0.1)]


def _car(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    cabin = polygon(x, y, [(-0.52, -0.62), (0.3, -0.62), (0.68, 0.02), (-0.86, 0.02)], 0.1)
    glass = polygon(x, y, [(-0.42, -0.44), (0.2, -0.44), (0.46, -0.04), (-0.64, -0.04)], 0.03)
    pillar = box(x, y, -0.1, -0.25, 0.07, 0.3)
    body = box(x, y, 0, 0.28, 1.3, 0.4, 0.24)
    wheels = torch.minimum(circle(x, y, -0.72, 0.62, 0.34), circle(x, y, 0.72, 0.62, 0.34))
    hubs = torch.minimum(circle(x, y, -0.72, 0.62, 0.13), circle(x, y, 0.72, 0.62, 0.13))
    return [
        Part(cabin, 0.1),
        Part(torch.maximum(glass, -pillar), ink=DARK_GLASS),
        Part(body, 0.35 - 0.75 * step(y - 0.3, 0.2)),
        Part(wheels, ink=RUBBER),
        Part(hubs, ink=STEEL),
    ]


def _boat(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    hull = polygon(x, y, [(-1.12, 0.32), (1.12, 0.32), (0.7, 0.82), (-0.75, 0.82)], 0.08)
    main = polygon(x, y, [(0.06, -0.98), (0.92, 0.1), (0.06, 0.1)], 0.03)
    jib = polygon(x, y, [(-0.1, -0.72), (-0.1, 0.1), (-0.72, 0.1)], 0.03)
    mast = box(x, y, -0.02, -0.3, 0.06, 0.7)
    return [
        Part(mast, ink=WOOD),
        Part(main, 0.75),
        Part(jib, 0.4),
        Part(hull, 0.1 - 0.8 * step(y - 0.58)),
    ]


def _tree(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    trunk = box(x, y, 0, 0.62, 0.17, 0.38)
    crown = torch.minimum(circle(x, y, 0, -0.46, 0.52), circle(x, y, -0.42, 0.0, 0.42))
    crown = torch.minimum(crown, torch.minimum(circle(x, y, 0.42, 0.0, 0.42), circle(x, y, 0, -0.05, 0.42)))
    return [Part(trunk, ink=WOOD), Part(crown, (0.8 * light - 0.1).clamp(-0.7, 0.6))]


def _house(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    wall = box(x, y, 0, 0.36, 0.8, 0.6, 0.04)
    roof = polygon(x, y, [(0.0, -0.94), (1.06, -0.16), (-1.06, -0.16)], 0.05)
    door = box(x, y, 0.34, 0.62, 0.19, 0.34, 0.04)
    window = box(x, y, -0.34, 0.32, 0.24, 0.2, 0.03)
    return [Part(wall, 0.3), Part(roof, -0.8), Part(door, ink=WOOD), Part(window, ink=LAMP)]


def _bird(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    tail = polygon(x, y, [(-0.55, 0.02), (-0.5, 0.4), (-1.2, 0.5), (-1.22, 0.08)], 0.04)
    slope = 0.25
    body = torch.hypot((x + 0.05 + slope * (y - 0.2)) / 0.82, (y - 0.2) / 0.52)
    body = (body - 1) * 0.55
    head = circle(x, y, 0.6, -0.28, 0.38)
    beak = polygon(x, y, [(0.88, -0.42), (1.28, -0.2), (0.88, -0.08)], 0.03)
    wing = polygon(x, y, [(0.22, 0.12), (-0.5, 0.14), (-0.72, -0.86)], 0.1)
    return [
        Part(beak, ink=BEAK),
        Part(tail, -0.6),
        Part(torch.minimum(body, head), 0.2 + 0.25 * light),
        Part(wing, -0.7),
        Part(circle(x, y, 0.7, -0.36, 0.1), ink=EYE),
    ]


def _sun(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    along, across = fold(x, y, 8)
    # a ray: half width 0.2 at radius 0.72, tip at 1.12
    ray = torch.maximum(((along - 1.12) * 0.2 + across * 0.4) / math.hypot(0.2, 0.4), 0.72 - along)
    return [Part(ray - 0.03, 0.2), Part(circle(x, y, 0, 0, 0.6), 0.4 * light)]


def _moon(x: Tensor, y: Tensor, light: Tensor) -> list[Part]:
    shifted = x - 0.16
    crescent = torch.maximum(circle(shifted, y, 0, 0, 0.98), -circle(shifted, y, 0.5, -0.22, 0.78))
    return [Part(crescent, 0.35 - 0.5 * step(torch.hypot(shifted - 0.5, y + 0.22) - 1.12, 0.12))]


_KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Part]]] = {
    "ball": _ball,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "car": _car,
    "boat": _boat,
    "tree": _tree,
    "house": _house,
    "bird": _bird,
    "sun": _sun,
    "moon": _moon,
}
