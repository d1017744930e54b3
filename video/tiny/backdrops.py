"""The backdrops of the tiny world, painted from world coordinates: calm areas with few, coarse details.

Coordinates: u to the right and v down, in frame heights (v is 0 at the top, 1 at the bottom before any camera move).
A backdrop that does not move is computed for one frame (F = 1) and broadcast. Colours are sRGB in 0..255, blended
without linearising. Each clip's layout comes from four numbers in 0..1 hashed from its seed.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from video.tiny.vocabulary import PLAIN_RGB

Rgb = tuple[float, float, float]
NIGHTFALL_S = (0.1, 2.0)  # day turns to night between these times


def paint(backdrop: str, u: Tensor, v: Tensor, t: Tensor, layout: Tensor, pixel: Tensor) -> Tensor:
    """Paint one backdrop for n clips.

    Args:
        backdrop: a word of `BACKDROPS`.
        u, v: world coordinates of the pixels, both [n, F or 1, H, W], frame heights.
        t: time of each frame, [1, F, 1, 1], seconds.
        layout: four numbers in 0..1 a clip, [n, 4].
        pixel: side of a pixel in world coordinates, [n, F or 1, 1, 1], frame heights.

    Returns: colours [n, F or 1, H, W, 3] float, 0..255.
    """
    if backdrop in PLAIN_RGB:
        return _plain(PLAIN_RGB[backdrop], v)
    return _SCENES[backdrop](u, v, t, layout[:, :, None, None, None].unbind(1), pixel)


def _ink(rgb: Rgb, like: Tensor) -> Tensor:
    return torch.tensor(rgb, device=like.device, dtype=like.dtype)


def _mix(below: Tensor, above: Tensor, cover: Tensor) -> Tensor:
    return below + cover[..., None] * (above - below)


def _ramp(top: Rgb, bottom: Rgb, position: Tensor) -> Tensor:
    """Blend two colours by a position in 0..1: [...] to [..., 3]."""
    return _mix(_ink(top, position), _ink(bottom, position), position.clamp(0, 1))


def _below(v: Tensor, edge: Tensor | float, pixel: Tensor) -> Tensor:
    """Cover (0..1) of the region below an edge, anti-aliased over one pixel."""
    return ((v - edge) / pixel + 0.5).clamp(0, 1)


def _inside(distance: Tensor, pixel: Tensor) -> Tensor:
    return (0.5 - distance / pixel).clamp(0, 1)


def _noise(column: Tensor, row: Tensor | int, layout: Tensor) -> Tensor:
    """Hash integer cells to numbers in 0..1 (exact in integers, hence the same on every device)."""
    value = column.to(torch.int64) * 73856093 + row * 19349663 + (layout * 9973).to(torch.int64) * 83492791
    value = (value ^ (value >> 13)) * 1274126177 & 0x7FFFFFFF
    value = value ^ (value >> 16)
    return (value & 0xFFFF).float() / 65536


def _plain(rgb: Rgb, v: Tensor) -> Tensor:
    base = _ink(rgb, v)
    shade = 1.05 - 0.12 * v
    return (base * shade[..., None]).clamp(0, 255)


def _clouds(
    colors: Tensor, u: Tensor, v: Tensor, a: Tensor, b: Tensor, pixel: Tensor, rgb: Rgb, alpha: Tensor | float
) -> Tensor:
    """Lay three round clouds over the sky, the same pattern every 1.6 heights."""
    for offset, height, size in ((0.0, 0.16, 1.0), (0.62, 0.29, 0.75), (1.12, 0.12, 0.85)):
        x = u - offset - 1.6 * a
        x = x - 1.6 * torch.round(x / 1.6)
        y = v - height - 0.06 * b
        puff = torch.hypot(x, y) - 0.075 * size
        puff = torch.minimum(puff, torch.hypot(x - 0.09 * size, y - 0.02) - 0.055 * size)
        puff = torch.minimum(puff, torch.hypot(x + 0.09 * size, y - 0.02) - 0.05 * size)
        puff = torch.maximum(puff, y - 0.045 * size)
        colors = _mix(colors, _ink(rgb, u), alpha * _inside(puff, pixel))
    return colors


def _hills(u: Tensor, level: float, height: float, phase: Tensor) -> Tensor:
    turn = 2 * math.pi * phase
    return level - height * (0.6 * torch.sin(2.3 * u + turn) + 0.4 * torch.sin(4.1 * u + 2.6 * turn))


def _landscape(u: Tensor, v: Tensor, layout: tuple[Tensor, ...], pixel: Tensor, night: Tensor) -> Tensor:
    """Sky, clouds or stars, hills and meadow; `night` runs from 0 (day) to 1."""
    a, b, c, d = layout
    colors = _mix(_ramp((104, 176, 240), (196, 230, 252), v / 0.7), _ramp((14, 18, 54), (52, 52, 112), v / 0.7), night)
    colors = _clouds(colors, u, v, a, b, pixel, (250, 252, 255), 0.95 * (1 - night))
    cell = 0.22
    column, row = torch.floor(u / cell), torch.floor(v / cell)
    x = u / cell - column - 0.2 - 0.6 * _noise(column, row.to(torch.int64), a)
    y = v / cell - row - 0.2 - 0.6 * _noise(column, row.to(torch.int64) + 57, b)
    size = 0.016 * (_noise(column, row.to(torch.int64) + 91, c) > 0.35)
    colors = _mix(
        colors, _ink((236, 236, 214), u), night * _inside(torch.hypot(x, y) * cell - size, pixel) * (size > 0)
    )
    far = _below(v, _hills(u, 0.66, 0.07, c), pixel)
    colors = _mix(colors, _mix(_ink((128, 196, 132), u), _ink((34, 48, 82), u), night), far)
    near = _below(v, _hills(u + 3, 0.78, 0.03, d), pixel)
    return _mix(
        colors, _mix(_ramp((104, 184, 84), (72, 148, 62), (v - 0.74) / 0.26), _ink((22, 36, 54), u), night), near
    )


def _day(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    return _landscape(u, v, layout, pixel, torch.zeros_like(u[:, :1, :1, :1]))


def _night(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    return _landscape(u, v, layout, pixel, torch.ones_like(u[:, :1, :1, :1]))


def _nightfall(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    begin, end = NIGHTFALL_S
    passed = ((t - begin) / (end - begin)).clamp(0, 1)
    return _landscape(u, v, layout, pixel, passed * passed * (3 - 2 * passed))


def _sea(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    a, b, c, d = layout
    colors = _ramp((150, 206, 240), (226, 240, 246), v / 0.5)
    colors = _clouds(colors, u, v, a, b, pixel, (255, 255, 255), 0.9)
    x = u - 0.35 - 1.9 * c
    x = x - 1.9 * torch.round(x / 1.9)
    island = _below(v, 0.52 - (0.13 - 0.9 * x * x).clamp_min(-1), pixel)
    colors = _mix(colors, _ink((96, 140, 116), u), island)
    colors = _mix(colors, _ramp((58, 142, 202), (22, 84, 160), (v - 0.5) / 0.5), _below(v, 0.5, pixel))
    for level, wave, height, pace, bold in (
        (0.585, 9.0, 0.008, 2.6, 0.011),
        (0.71, 6.5, 0.014, -2.2, 0.015),
        (0.88, 4.7, 0.022, 2.4, 0.021),
    ):
        # waves sway to and fro, so that a moving camera alone shifts what is behind
        crest = level + height * torch.sin(wave * u + 0.6 * torch.sin(pace * t) + 6.3 * d + 7 * level)
        colors = _mix(colors, _ink((150, 204, 234), u), 0.75 * _inside((v - crest).abs() - bold, pixel))
    return colors


def _snow(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    a, _, c, d = layout
    colors = _ramp((150, 184, 216), (212, 226, 238), v / 0.65)
    saw = (torch.remainder(u / 0.9 + c, 1) - 0.5).abs() * 2
    small = (torch.remainder(u / 0.63 + d, 1) - 0.5).abs() * 2
    ridge = 0.66 - torch.maximum(0.30 * saw, 0.22 * small)
    colors = _mix(colors, _ink((124, 150, 184), u), _below(v, ridge, pixel))
    colors = _mix(colors, _ink((240, 246, 252), u), _below(v, ridge, pixel) * (1 - _below(v, 0.475, pixel)))
    colors = _mix(
        colors, _ramp((226, 236, 246), (250, 251, 254), (v - 0.66) / 0.2), _below(v, _hills(u, 0.70, 0.025, a), pixel)
    )
    return _falling(colors, u, v, t, layout, pixel, (252, 253, 255))


def _falling(
    colors: Tensor, u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor, rgb: Rgb
) -> Tensor:
    """Let coarse flakes fall, one to a cell of 0.34 heights."""
    cell = 0.34
    fallen = v - 0.2 * t
    column, row = torch.floor(u / cell), torch.floor(fallen / cell)
    x = u / cell - column - 0.25 - 0.5 * _noise(column, row.to(torch.int64), layout[0])
    y = fallen / cell - row - 0.15 - 0.7 * _noise(column, row.to(torch.int64) + 31, layout[1])
    return _mix(colors, _ink(rgb, u), _inside(torch.hypot(x, y) * cell - 0.025, pixel))


def _rain(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    a, b, c, d = layout
    colors = _ramp((98, 108, 124), (150, 158, 168), v / 0.7)
    bank = 0.17 - 0.045 * torch.sin(5.2 * u + 6.3 * a).abs() * 1.2
    colors = _mix(colors, _ink((76, 84, 98), u), 1 - _below(v, bank + 0.05 * b, pixel))
    colors = _mix(colors, _ink((98, 116, 112), u), _below(v, _hills(u, 0.68, 0.06, c), pixel))
    colors = _mix(
        colors, _ramp((84, 100, 94), (64, 78, 76), (v - 0.78) / 0.22), _below(v, _hills(u + 3, 0.80, 0.02, d), pixel)
    )
    wide, tall = 0.23, 0.5
    slanted = u + 0.12 * v
    column = torch.floor(slanted / wide)
    fallen = v - 0.85 * t + tall * _noise(column, 5, a)
    row = torch.floor(fallen / tall)
    x = (slanted / wide - column - 0.5) * wide
    y = (fallen / tall - row - 0.5) * tall
    drop = torch.hypot(x, (y.abs() - 0.065).clamp_min(0)) - 0.012
    return _mix(colors, _ink((190, 204, 220), u), 0.8 * _inside(drop, pixel))


def _city(u: Tensor, v: Tensor, t: Tensor, layout: tuple[Tensor, ...], pixel: Tensor) -> Tensor:
    colors = _ramp((126, 152, 206), (248, 214, 188), v / 0.75)
    for wide, low, high, rgb, shift, is_lit in (
        (0.21, 0.30, 0.55, (142, 150, 184), 0.0, False),
        (0.27, 0.16, 0.46, (84, 92, 130), 0.11, True),
    ):
        along = u / wide + shift + layout[2] * 7
        column = torch.floor(along)
        roof = 0.86 - low - (high - low) * _noise(column, 3, layout[3])
        x = (along - column - 0.5) * wide
        tower = _inside(torch.maximum(x.abs() - (0.5 * wide - 0.004), roof - v), pixel)
        colors = _mix(colors, _ink(rgb, u), tower)
        if is_lit:
            # two windows abreast, one floor every 0.11 heights
            side, floor = torch.floor(x / 0.1), torch.floor((v - roof - 0.035) / 0.11)
            pane_x, pane_y = (x / 0.1 - side - 0.5).abs() * 0.1, ((v - roof - 0.035) / 0.11 - floor - 0.5).abs() * 0.11
            pane = torch.maximum(pane_x - 0.03, pane_y - 0.033)
            is_on = _noise(column * 7 + side, floor.to(torch.int64), layout[1]) > 0.3
            inside = ((side == 0) | (side == -1)) & (floor >= 0)
            colors = _mix(colors, _ink((255, 220, 130), u), _inside(pane, pixel) * is_on * inside * tower)
    colors = _mix(colors, _ink((164, 166, 172), u), _below(v, 0.84, pixel))
    return _mix(colors, _ramp((86, 88, 98), (70, 72, 82), (v - 0.87) / 0.13), _below(v, 0.87, pixel))


_SCENES: dict[str, Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...], Tensor], Tensor]] = {
    "day": _day,
    "night": _night,
    "sea": _sea,
    "snow": _snow,
    "rain": _rain,
    "city": _city,
    "nightfall": _nightfall,
}
