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
from video.tiny.paths import Poses, camera_path, poses
from video.tiny.shapes import REACH, parts
from video.tiny.vocabulary import RGB
from video.tiny.world import Scene, Thing

# Pixels drawn at once: about 150 bytes each at the worst moment.
PIXELS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}


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
            for indices in _by_kind(chunk, slot):
                _draw_things(flat, [chunk[i] for i in indices], slot, indices, times, height, width)
        canvas = canvas[:-1].view(len(chunk), num_frames, height, width, 3)
        clips[first : first + at_once] = canvas.add_(0.5).clamp_(0, 255).to(torch.uint8)
    return clips


def truth(scene: Scene, num_frames: int, height: int, width: int, fps: int = 16, start_frame: int = 0) -> Truth:
    """Say what `draw` shows of one scene; arguments, rules and errors are those of `draw`."""
    cover, area = covers([scene], num_frames, height, width, fps=fps, start_frame=start_frame)
    count = len(scene.things)
    cover, area = cover[0, :count], area[0, :count]
    times = (start_frame + torch.arange(num_frames)).float() / fps
    where = poses(scene.things, [scene.camera] * count, times)
    masks = cover > 0.5
    columns, rows = masks.any(2), masks.any(3)
    box = torch.stack([_first(columns), _first(rows), _last(columns), _last(rows)], dim=-1)
    return Truth(
        centre=torch.stack([where.x * width, where.y * height], dim=-1),
        box=box * masks.flatten(2).any(2)[..., None],
        visible=(cover.sum((2, 3)) / area.clamp_min(1e-6)).clamp(0, 1),
        masks=masks,
        motions=tuple(thing.motion for thing in scene.things),
    )


def covers(
    scenes: Sequence[Scene],
    num_frames: int,
    height: int,
    width: int,
    *,
    fps: int = 16,
    device: torch.device | str = "cpu",
    start_frame: int = 0,
) -> tuple[Tensor, Tensor]:
    """Say which pixels of B clips show which thing; arguments, rules and errors are those of `draw`.

    Returns: the share of each pixel that shows the first and the second thing, [B, 2, F, H, W] float 0..1 (zeros where
    there is no second), and each thing's whole area in pixels, in the frame or not, [B, 2, F] float.
    """
    _check(scenes, num_frames, height, width, fps, start_frame)
    times = (start_frame + torch.arange(num_frames, device=device)).float() / fps
    flat = torch.zeros(2, len(scenes) * num_frames * height * width + 1, device=device)
    area = torch.zeros(len(scenes), 2, num_frames, device=device)
    for slot in (0, 1):
        for indices in _by_kind(scenes, slot):
            patch = _patch([scenes[i] for i in indices], slot, times, height, width)
            cover = patch.cover()
            flat[slot][patch.index(indices, num_frames)] = cover
            area[torch.tensor(indices, device=device), slot] = cover.sum((2, 3))
    flat[0] = flat[0] * (1 - flat[1])
    return flat[:, :-1].view(2, len(scenes), num_frames, height, width).transpose(0, 1), area


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


def _by_kind(scenes: Sequence[Scene], slot: int) -> list[list[int]]:
    """Group the scenes that have a thing in a slot by its kind."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, scene in enumerate(scenes):
        if slot < len(scene.things):
            groups[scene.things[slot].kind].append(index)
    return list(groups.values())


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


def _patch(scenes: Sequence[Scene], slot: int, times: Tensor, height: int, width: int) -> _Patch:
    things = [scene.things[slot] for scene in scenes]
    return _Patch(poses(things, [scene.camera for scene in scenes], times), things, height, width)


def _draw_things(
    flat: Tensor, scenes: Sequence[Scene], slot: int, clips: Sequence[int], times: Tensor, height: int, width: int
) -> None:
    """Blend the things of one kind into the flat canvas."""
    patch = _patch(scenes, slot, times, height, width)
    things = patch.things
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
