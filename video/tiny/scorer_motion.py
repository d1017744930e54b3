"""Measures how things and the camera move from masks and frames, by geometry alone.

Lengths are fractions of the frame (x of its width, y of its height), angles degrees, clockwise on the screen.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from video.tiny.paths import camera_path
from video.tiny.vocabulary import DIRECTIONS

LEAST_AREA = 0.004  # of the frame: less is not a thing
LEAST_SHARE = 0.12  # of the largest thing's area: less is a fragment
FARTHEST_STEP = 0.25  # of the frame between two frames: farther is another thing

# A thing moves when its middle or its size changes by this much over the clip, measured by the slope.
LEAST_SHIFT, LEAST_GROWTH = 0.10, 0.11
LEAST_BOUNCE = 0.14  # of the height, gone up and down beyond the net way
LEAST_TURN_DEG = 6.0  # in two frames at 16 frames a second
# A turning thing swings around its middle by up to this much, and looks larger or smaller for it.
MOST_SWING, MOST_SWING_GROWTH = 0.20, 0.25
LEAST_CHANGE = 0.04  # of a thing's look around its middle must turn with it
LEAST_PAN, LEAST_ZOOM = 0.07, 0.11
CAMERA_GAIN = 0.85  # a moving camera must explain the frames this much better than a fixed one


@dataclass(frozen=True)
class Track:
    """One thing through F frames. masks: [F, h, w] 0..1. centre: [F, 2]. area: [F], share of the frame. seen: [F] bool.

    Where a thing is not seen its mask is empty and its centre and area are those of the nearest frame.
    """

    masks: Tensor
    centre: Tensor
    area: Tensor
    seen: Tensor


@dataclass(frozen=True)
class CameraMove:
    """name: a word of `CAMERAS`. pan: frame widths, [F]. scale: [F]."""

    name: str
    pan: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Movement:
    """motion: a word of `MOTIONS`. shift_x, shift_y: way over the clip by the slope. growth: natural logarithm of the
    scale over the clip. bounce: way up and down beyond the net one. turn_deg: in two frames."""

    motion: str
    shift_x: float
    shift_y: float
    growth: float
    bounce: float
    turn_deg: float


def components(solid: Tensor) -> Tensor:
    """Label the connected regions of masks [F, h, w] bool: [F, h, w] int64, 0 outside, equal within a region."""
    height, width = solid.shape[1:]
    seeds = torch.arange(1, height * width + 1, device=solid.device).view(1, height, width)
    labels = seeds * solid
    while True:
        spread = F.max_pool2d(labels[:, None].float(), 3, 1, 1)[:, 0].long() * solid
        # jump to what the named pixel is called by now: the number of rounds falls to its logarithm
        named = F.pad(spread.flatten(1), (1, 0)).gather(1, spread.flatten(1)).view_as(spread)
        if torch.equal(named, labels):
            return labels
        labels = named


def find_tracks(found: Tensor) -> tuple[int, list[Track]]:
    """Follow the things of masks [F, h, w] 0..1: how many a typical frame shows, and a track of each."""
    solid = found > 0.5
    # parts a pixel or two apart, such as a hull and its sails, are one thing
    labels = components(F.max_pool2d(solid[:, None].float(), 3, 1, 1)[:, 0] > 0) * solid
    regions = [_regions(labels[f], found[f]) for f in range(len(found))]
    counts = sorted(len(r) for r in regions)
    count = counts[len(counts) // 2]
    if count == 0:
        return 0, []
    first = next(f for f, r in enumerate(regions) if len(r) >= count)
    starts = sorted(regions[first], key=lambda region: -float(region[1]))[:count]
    chosen: list[dict[int, Tensor]] = [{} for _ in starts]
    last: list[Tensor] = []
    for f in [*range(first, len(found)), *range(first - 1, -1, -1)]:
        if f == first or f == first - 1:
            last = [centre for _, _, centre in starts]
        free = list(range(len(regions[f])))
        for slot in sorted(range(count), key=lambda s: _nearest(regions[f], free, last[s])[0]):
            distance, index = _nearest(regions[f], free, last[slot])
            if index is not None and distance < FARTHEST_STEP:
                free.remove(index)
                chosen[slot][f] = regions[f][index][0]
                last[slot] = regions[f][index][2]
    return count, [_track(found, masks) for masks in chosen]


def find_camera(frames: Tensor, found: Tensor, fps: int = 16) -> CameraMove:
    """Tell how the camera moves from what lies behind the things.

    Args:
        frames: [F, 3, h, w] 0..1, of the masks' resolution.
        found: [F, h, w] 0..1, the things.
        fps: frames a second.
    """
    count = len(frames)
    still = CameraMove("none", torch.zeros(count), torch.ones(count))
    times = torch.arange(count) / fps
    chosen = torch.tensor([0, count - 1, (3 * count) // 4, count // 2])
    # without grain and without light: what remains are the outlines of what lies behind
    smooth = F.avg_pool2d(frames[chosen], 3, 1, 1, count_include_pad=False)
    detail = smooth - F.avg_pool2d(smooth, 9, 1, 4, count_include_pad=False)
    # as far from the things as their outlines reach into the averages
    behind = 1 - F.max_pool2d((found[chosen] > 0.2).float()[:, None], 13, 1, 6)
    if count < 5 or float((detail * behind).square().mean()) < 2e-6:
        return still
    names, tries = ["none"], [(torch.zeros(count), torch.ones(count))]
    for name in ("pan left", "pan right", "zoom in", "zoom out"):
        pan, scale = (path[0] for path in camera_path([name], times))
        for strength in torch.linspace(0.4, 1.3, 10):
            names.append(name)
            tries.append((pan * strength, scale**strength))
    pans, scales = torch.stack([p for p, _ in tries]), torch.stack([s for _, s in tries])
    error = _warp_errors(detail, behind, pans[:, chosen], scales[:, chosen])
    best = int(error.argmin())
    moved = abs(float(pans[best, -1])) >= LEAST_PAN or abs(math.log(float(scales[best, -1]))) >= LEAST_ZOOM
    if not moved or float(error[best]) > CAMERA_GAIN * float(error[0]):
        return still
    return CameraMove(names[best], pans[best], scales[best])


def find_movement(track: Track, frames: Tensor, camera: CameraMove) -> Movement:
    """Tell how a thing moves in the world; frames [F, 3, h, w] 0..1, of the masks' resolution."""
    x = 0.5 + (track.centre[:, 0] - 0.5) / camera.scale + camera.pan
    y = 0.5 + (track.centre[:, 1] - 0.5) / camera.scale
    x, y = _median3(x), _median3(y)
    size = _median3(0.5 * track.area.log() - camera.scale.log())
    shift_x, shift_y, growth = _slope(x, track.seen), _slope(y, track.seen), _slope(size, track.seen)
    bounce = _zigzag(y.tolist(), 0.03) - abs(float(y[-1] - y[0]))
    turn = _turn(track, frames)
    shift = max(abs(shift_x), abs(shift_y))
    is_turning = abs(turn) >= LEAST_TURN_DEG
    if is_turning and max(shift, bounce) < MOST_SWING and abs(growth) < MOST_SWING_GROWTH:
        motion = "spinning"
    elif bounce > LEAST_BOUNCE:
        motion = "bouncing"
    elif max(shift / LEAST_SHIFT, abs(growth) / LEAST_GROWTH) > 1:
        if shift / LEAST_SHIFT > abs(growth) / LEAST_GROWTH:
            motion = direction(shift_x, shift_y)
        else:
            motion = "growing" if growth > 0 else "shrinking"
    else:
        motion = "still"
    return Movement(motion, shift_x, shift_y, growth, bounce, turn)


def direction(shift_x: float, shift_y: float) -> str:
    """Name the main direction of a way."""
    left, right, up, down = DIRECTIONS
    if abs(shift_x) >= abs(shift_y):
        return right if shift_x > 0 else left
    return down if shift_y > 0 else up


Region = tuple[Tensor, Tensor, Tensor]


def _regions(labels: Tensor, found: Tensor) -> list[Region]:
    """List the regions of one frame that are large enough: (mask [h, w] bool, area as a share, centre [2])."""
    height, width = labels.shape
    names, areas = torch.unique(labels[labels > 0], return_counts=True)
    if len(names) == 0:
        return []
    least = max(LEAST_AREA * height * width, LEAST_SHARE * float(areas.max()))
    rows, columns = (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
    regions = []
    for name in names[areas >= least]:
        mask = labels == name
        weight = found * mask
        total = weight.sum()
        centre = torch.stack([(weight.sum(0) * columns).sum() / total, (weight.sum(1) * rows).sum() / total])
        regions.append((mask, total / (height * width), centre))
    return regions


def _nearest(regions: list[Region], free: list[int], place: Tensor) -> tuple[float, int | None]:
    distances = [(float((regions[index][2] - place).norm()), index) for index in free]
    return min(distances, default=(math.inf, None))


def _track(found: Tensor, masks: dict[int, Tensor]) -> Track:
    frames, height, width = found.shape
    seen = torch.tensor([f in masks for f in range(frames)])
    # a soft rim of two pixels belongs to the mask, for centres finer than a pixel
    hard = torch.stack([masks.get(f, torch.zeros(height, width, dtype=torch.bool)) for f in range(frames)])
    soft = found * F.max_pool2d(hard.float()[:, None], 5, 1, 2)[:, 0]
    total = soft.sum((1, 2)).clamp_min(1e-6)
    rows, columns = (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
    centre = torch.stack([(soft.sum(1) * columns).sum(1) / total, (soft.sum(2) * rows).sum(1) / total], dim=1)
    where = seen.nonzero()[:, 0]
    nearest = where[(torch.arange(frames)[:, None] - where[None]).abs().argmin(1)]
    return Track(soft, centre[nearest], total[nearest] / (height * width), seen)


def _warp_errors(detail: Tensor, behind: Tensor, pans: Tensor, scales: Tensor) -> Tensor:
    """Compare later ones of K frames, moved back by n tries [n, K], with the first: 0 alike .. 1 unrelated, [n]."""
    tries = len(pans)
    errors = torch.zeros(tries)
    first, first_behind = detail[:1], behind[:1]
    for frame in range(1, len(detail)):
        scale, pan = scales[:, frame], pans[:, frame]
        zero = torch.zeros(tries)
        # frame coordinates run from -1 to 1, hence twice the pan
        rows = torch.stack([scale, zero, -2 * pan * scale, zero, scale, zero], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(rows, [tries, 1, *detail.shape[2:]], align_corners=False)
        moved = F.grid_sample(detail[frame : frame + 1].expand(tries, -1, -1, -1), grid, align_corners=False)
        visible = F.grid_sample(behind[frame : frame + 1].expand(tries, -1, -1, -1), grid, align_corners=False)
        weight = (visible > 0.99) * first_behind
        energy = (weight * (moved.square() + first.square())).sum((1, 2, 3))
        errors += (weight * (moved - first).square()).sum((1, 2, 3)) / energy.clamp_min(1e-6)
    return errors / (len(detail) - 1)


def _median3(values: Tensor) -> Tensor:
    padded = torch.cat([values[:1], values, values[-1:]])
    return torch.stack([padded[:-2], padded[1:-1], padded[2:]]).median(0).values


def _slope(values: Tensor, seen: Tensor) -> float:
    """Fit a line through the seen frames: how far it goes over the whole clip."""
    if int(seen.sum()) < 2:
        return 0.0
    time = torch.arange(len(values), dtype=torch.float32)[seen]
    values = values[seen]
    time_offset = time - time.mean()
    return float((time_offset * (values - values.mean())).sum() / time_offset.square().sum() * (len(seen) - 1))


def _zigzag(values: list[float], least: float) -> float:
    """Measure the way there and back, turns smaller than `least` left out."""
    turning, extreme, way = values[0], values[0], 0.0
    for value in values[1:]:
        rises = extreme >= turning
        if (value > extreme) == rises or extreme == turning:
            extreme = value
        elif abs(value - extreme) > least:
            way += abs(extreme - turning)
            turning, extreme = extreme, value
    return way + abs(extreme - turning)


def _turn(track: Track, frames: Tensor, lag: int = 2) -> float:
    """Find the angle by which a thing turns in `lag` frames, from rings around its middle; degrees, clockwise."""
    bins, height, width = 120, *frames.shape[2:]
    shown = track.seen.nonzero()[:, 0]
    if len(shown) <= lag + 1:
        return 0.0
    colors = torch.cat([frames * track.masks[:, None], track.masks[:, None]], dim=1)[shown]
    radius = (track.area[shown].median() * height * width / math.pi).sqrt()  # pixels
    angle = torch.arange(bins) * (2 * math.pi / bins)
    rings = torch.tensor([0.4, 0.6, 0.8, 1.0, 1.2, 1.45, 1.7]) * radius
    dx, dy = rings[:, None] * torch.cos(angle), rings[:, None] * torch.sin(angle)
    x = track.centre[shown, 0, None, None] * 2 - 1 + dx * 2 / width
    y = track.centre[shown, 1, None, None] * 2 - 1 + dy * 2 / height
    polar = F.grid_sample(colors, torch.stack([x, y], dim=-1), align_corners=False)
    polar = (polar - polar.mean(-1, keepdim=True)) * rings[:, None].sqrt()
    # what stays in place (light from above, a symmetric outline) says nothing of a turn
    changing = polar - polar.mean(0)
    spectrum = torch.fft.rfft(changing, dim=-1)
    cross = (spectrum[lag:] * spectrum[:-lag].conj()).sum((0, 1, 2))
    likeness = torch.fft.irfft(cross, n=bins)
    reach = int(30 / (360 / bins))
    shifts = torch.arange(-reach, reach + 1)
    best = shifts[likeness[shifts].argmax()]
    if float(likeness[best]) < LEAST_CHANGE * float(polar.square().sum()):
        return 0.0
    return float(best) * 360 / bins
