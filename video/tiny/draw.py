"""Draws scenes of the tiny world to pixels, batched over clips, frames and pixels, with ground truth for each frame.

Things are signed distances (video/tiny/shapes.py) over a painted backdrop (video/tiny/backdrops.py), anti-aliased over
one pixel and blended in sRGB. Each thing is evaluated on a square patch around it only. There is no loop over frames
or pixels; clips are grouped by backdrop and by kind, so that a GPU launches the same kernels for any batch.

Invariants: a pixel depends on its scene, its time and the size alone, never on the rest of the batch; frame f of a
draw that starts at frame s is frame s + f of the scene.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from video.tiny.backdrops import paint
from video.tiny.shapes import REACH, parts
from video.tiny.vocabulary import MOTIONS, RGB
from video.tiny.world import PAN_LIMIT, PAN_SPEED, ZOOM_LIMIT, ZOOM_SPEED, Scene, Thing

# Pixels drawn at once: about 150 bytes each at the worst moment.
PIXELS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class Poses:
    """Where n things stand in F frames on the screen, after the camera; all [n, F] float.

    x, y: middle, fractions of width and height. radius: fraction of the shorter side. angle: radians, clockwise.
    """

    x: Tensor
    y: Tensor
    radius: Tensor
    angle: Tensor


@dataclass(frozen=True)
class Truth:
    """What a drawn clip shows, thing by thing (N things, F frames).

    centre: [N, F, 2] float, x and y of each thing's middle in pixels (the first pixel's middle is 0.5).
    box: [N, F, 4] float, left, top, right, bottom in pixels around what is visible; zeros where nothing is.
    visible: [N, F] float, share of the thing's area that lies in the frame and is not behind the other thing.
    masks: [N, F, H, W] bool, the pixels that show more of the thing than of anything else.
    motions: the word of each thing's motion, in the world (a still thing under a moving camera is still).
    """

    centre: Tensor
    box: Tensor
    visible: Tensor
    masks: Tensor
    motions: tuple[str, ...]


def draw(
    scenes: Sequence[Scene],
    num_frames: int,
    height: int,
    width: int,
    *,
    fps: int = 16,
    device: torch.device | str = "cpu",
    start_frame: int = 0,
) -> Tensor:
    """Draw clips of one size.

    Args:
        scenes: B scenes, at least one.
        num_frames, start_frame: frames start_frame to start_frame + num_frames - 1, at least 1 and 0.
        height, width: multiples of 16.
        fps: frames a second, at least 1.
        device: where it is drawn and stays.

    Returns: [B, F, H, W, 3] uint8, sRGB.

    Raises:
        ValueError: a size, a count or a rate breaks its rule.
    """
    _check(scenes, num_frames, height, width, fps, start_frame)
    clips = torch.empty(len(scenes), num_frames, height, width, 3, dtype=torch.uint8, device=device)
    at_once = max(1, PIXELS_AT_ONCE.get(clips.device.type, 2**22) // (num_frames * height * width))
    times = (start_frame + torch.arange(num_frames, device=device)).float() / fps
    for first in range(0, len(scenes), at_once):
        chunk = scenes[first : first + at_once]
        canvas = _paint_backdrops(chunk, times, height, width)
        flat = canvas.view(-1, 3)
        for slot in (0, 1):
            by_kind: dict[str, list[int]] = defaultdict(list)
            for index, scene in enumerate(chunk):
                if slot < len(scene.things):
                    by_kind[scene.things[slot].kind].append(index)
            for indices in by_kind.values():
                _draw_things(flat, [chunk[i] for i in indices], slot, indices, times, height, width)
        canvas = canvas[:-1].view(len(chunk), num_frames, height, width, 3)
        clips[first : first + at_once] = canvas.add_(0.5).clamp_(0, 255).to(torch.uint8)
    return clips


def truth(scene: Scene, num_frames: int, height: int, width: int, fps: int = 16, start_frame: int = 0) -> Truth:
    """Say what `draw` shows of one scene; arguments, rules and errors are those of `draw`."""
    _check([scene], num_frames, height, width, fps, start_frame)
    times = (start_frame + torch.arange(num_frames)).float() / fps
    count = len(scene.things)
    covers, areas, centres = [], [], []
    for slot in range(count):
        where = poses([scene.things[slot]], [scene.camera], times)
        patch = _Patch(where, [scene.things[slot]], height, width)
        cover = torch.zeros(num_frames * height * width + 1)
        solid = patch.cover()
        cover[patch.index([0], num_frames).flatten()] = solid.flatten()
        covers.append(cover[:-1].view(num_frames, height, width))
        areas.append(solid.sum((0, 2, 3)).clamp_min(1e-6))
        centres.append(torch.stack([where.x[0] * width, where.y[0] * height], dim=-1))
    if count == 2:
        covers[0] = covers[0] * (1 - covers[1])
    cover = torch.stack(covers)
    masks = cover > 0.5
    columns, rows = masks.any(2), masks.any(3)
    box = torch.stack([_first(columns), _first(rows), _last(columns), _last(rows)], dim=-1)
    return Truth(
        centre=torch.stack(centres),
        box=box * masks.flatten(2).any(2)[..., None],
        visible=(cover.sum((2, 3)) / torch.stack(areas)).clamp(0, 1),
        masks=masks,
        motions=tuple(thing.motion for thing in scene.things),
    )


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


def _check(scenes: Sequence[Scene], num_frames: int, height: int, width: int, fps: int, start_frame: int) -> None:
    if len(scenes) == 0:
        raise ValueError("draw: scenes must hold at least one, got none")
    if num_frames < 1 or start_frame < 0 or fps < 1:
        raise ValueError(
            "draw: num_frames and fps must be at least 1 and start_frame at least 0, "
            f"got {num_frames}, {fps} and {start_frame}"
        )
    if height < 16 or width < 16 or height % 16 or width % 16:
        raise ValueError(f"draw: height and width must be multiples of 16, got {height}x{width}")


def _paint_backdrops(scenes: Sequence[Scene], times: Tensor, height: int, width: int) -> Tensor:
    """Paint the backdrops of n clips: [n * F * H * W + 1, 3] float; the last row takes what falls off the frames."""
    device, frames = times.device, len(times)
    canvas = torch.zeros(len(scenes) * frames * height * width + 1, 3, device=device)
    clips = canvas[:-1].view(len(scenes), frames, height, width, 3)
    groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, scene in enumerate(scenes):
        groups[scene.backdrop, scene.camera != "none"].append(index)
    sx = (torch.arange(width, device=device) + 0.5) / width - 0.5
    sy = (torch.arange(height, device=device) + 0.5) / height - 0.5
    for (backdrop, moves), indices in groups.items():
        cameras = [scenes[i].camera for i in indices]
        pan, scale = (path[:, :, None, None] for path in camera_path(cameras, times if moves else times[:1] * 0))
        u = (sx[None, None, None] / scale + 0.5 + pan) * (width / height)
        v = sy[None, None, :, None] / scale + 0.5
        layout = torch.tensor([_layout(scenes[i].seed) for i in indices], device=device)
        u, v = (axis.expand(len(indices), scale.shape[1], height, width) for axis in (u, v))
        painted = paint(backdrop, u, v, times[None, :, None, None], layout, 1 / (height * scale))
        clips[torch.tensor(indices, device=device)] = painted.expand(len(indices), frames, height, width, 3)
    return canvas


def _layout(seed: int) -> list[float]:
    rng = random.Random(f"backdrop {seed}")
    return [rng.random() for _ in range(4)]


class _Patch:
    """The square of pixels around each of n things of one kind in F frames, and the thing's own coordinates there."""

    def __init__(self, where: Poses, things: Sequence[Thing], height: int, width: int) -> None:
        self.height, self.width, self.things = height, width, things
        device = where.x.device
        radius = where.radius * min(height, width)
        side = math.ceil(2 * REACH * float(radius.max())) + 3
        steps = torch.arange(side, device=device)
        left = torch.floor(where.x * width - side / 2).long()
        top = torch.floor(where.y * height - side / 2).long()
        self.columns, self.rows = left[..., None] + steps, top[..., None] + steps  # [n, F, P]
        dx = ((self.columns + 0.5 - (where.x * width)[..., None]) / radius[..., None])[:, :, None, :]
        dy = ((self.rows + 0.5 - (where.y * height)[..., None]) / radius[..., None])[:, :, :, None]
        cos, sin = torch.cos(where.angle)[:, :, None, None], torch.sin(where.angle)[:, :, None, None]
        facing = torch.tensor([-1.0 if t.motion == "left" else 1.0 for t in things], device=device)[:, None, None, None]
        self.x, self.y = facing * (cos * dx + sin * dy), cos * dy - sin * dx
        self.light = (-0.62 * dx - 0.78 * dy).clamp(-1, 1)
        self.per_pixel = radius[:, :, None, None]

    def cover(self) -> Tensor:
        """Cover (0..1) of the whole thing, [n, F, P, P]."""
        cover = torch.zeros_like(self.x)
        for part in parts(self.things[0].kind, self.x, self.y, self.light):
            cover = torch.maximum(cover, self.opacity(part.distance))
        return cover

    def opacity(self, distance: Tensor) -> Tensor:
        return (0.5 - distance * self.per_pixel).clamp(0, 1)

    def index(self, clips: Sequence[int], frames: int) -> Tensor:
        """Rows of the flat canvas, [n, F, P, P]; pixels outside the frame go to its last row, -1."""
        columns, rows = self.columns[:, :, None, :], self.rows[:, :, :, None]
        inside = (columns >= 0) & (columns < self.width) & (rows >= 0) & (rows < self.height)
        start = torch.tensor(clips, device=columns.device)[:, None] * frames
        start = start + torch.arange(frames, device=columns.device)
        flat = (start[:, :, None, None] * self.height + rows) * self.width + columns
        return torch.where(inside, flat, -1)


def _draw_things(
    flat: Tensor, scenes: Sequence[Scene], slot: int, clips: Sequence[int], times: Tensor, height: int, width: int
) -> None:
    """Blend the things of one kind into the flat canvas."""
    things = [scene.things[slot] for scene in scenes]
    patch = _Patch(poses(things, [scene.camera for scene in scenes], times), things, height, width)
    index = patch.index(clips, len(times))
    tones = torch.tensor([_tones(thing.color) for thing in things], device=flat.device)[:, :, None, None, None]
    dark, base, light = tones.unbind(1)
    colors = flat[index]
    for part in parts(things[0].kind, patch.x, patch.y, patch.light):
        if part.ink is not None:
            paint_color = torch.tensor(part.ink, device=flat.device, dtype=flat.dtype)
        elif isinstance(part.shade, Tensor):
            shade = part.shade[..., None]
            paint_color = base + shade.clamp(0, 1) * (light - base) + shade.clamp(-1, 0) * (base - dark)
        else:
            paint_color = base + max(part.shade, 0) * (light - base) + min(part.shade, 0) * (base - dark)
        colors = colors + patch.opacity(part.distance)[..., None] * (paint_color - colors)
    flat[index] = colors


def _tones(color: str) -> list[list[float]]:
    """Give the dark, own and light tone of a colour, sRGB 0..255; black is shaded towards grey on both sides."""
    base = [float(c) for c in RGB[color]]
    if color == "black":
        return [[c + 34 for c in base], base, [c + 46 for c in base]]
    return [[0.66 * c for c in base], base, [c + 0.5 * (255 - c) for c in base]]


def _first(present: Tensor) -> Tensor:
    """Position of the first true element of the last axis."""
    return present.float().argmax(-1).float()


def _last(present: Tensor) -> Tensor:
    """Position after the last true element of the last axis."""
    return present.shape[-1] - present.flip(-1).float().argmax(-1).float()
