"""Reads a clip of the tiny world from its frames alone, and compares it with what was asked for.

Two small networks (video/tiny/scorer_net.py) say where things are, what they are and what is behind; how they move is
measured (video/tiny/scorer_motion.py). `all` holds when colour, kind, direction and scene do; count and strict motion
are reported beside it.
"""

import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from video.tiny.scorer_motion import (
    LEAST_GROWTH,
    LEAST_SHIFT,
    CameraMove,
    Movement,
    Track,
    direction,
    find_camera,
    find_movement,
    find_tracks,
)
from video.tiny.scorer_net import LOOKS, Scorer, cut_out, load_scorer, mask_boxes, to_side
from video.tiny.scorer_prompts import Prompt
from video.tiny.vocabulary import COLORS, DIRECTIONS, KINDS
from video.tiny.world import Scene

NAMED_FRAMES = 12  # frames of a clip from which kind and colour are told
LEAST_DARKENING = 0.3  # probability that passes from day to night over a clip in which night falls


@dataclass(frozen=True)
class Seen:
    """One thing as it was read. x, y: mean middle, fractions of the frame; the probabilities are those of the words."""

    kind: str
    color: str
    movement: Movement
    x: float
    y: float
    kind_probability: float
    color_probability: float

    @property
    def motion(self) -> str:
        return self.movement.motion


@dataclass(frozen=True)
class Reading:
    """A clip as it was read; `things` from the largest to the smallest."""

    count: int
    things: tuple[Seen, ...]
    backdrop: str
    camera: str


@dataclass(frozen=True)
class Expected:
    """What a clip should show. things: (kind, color, motion) each. relation: of the first thing to the second."""

    things: tuple[tuple[str, str, str], ...]
    backdrop: str
    relation: str | None = None


def expected_of(asked: Scene | Prompt) -> Expected:
    """Say what the clip of a scene or a prompt should show."""
    if isinstance(asked, Scene):
        return Expected(tuple((t.kind, t.color, t.motion) for t in asked.things), asked.backdrop, asked.relation)
    things = [(asked.kind, asked.color, asked.motion)]
    if asked.second_kind and asked.second_color and asked.second_motion:
        things.append((asked.second_kind, asked.second_color, asked.second_motion))
    return Expected(tuple(things), asked.backdrop, asked.relation)


@torch.inference_mode()
def read(frames: Tensor, scorer: Scorer | None = None, fps: int = 16) -> Reading:
    """Read a clip.

    Args:
        frames: [F, H, W, 3] uint8 sRGB, F at least 2, sides at least 32.
        scorer: the networks; those shipped unless given.
        fps: frames a second.

    Raises:
        ValueError: frames of another shape or type.
    """
    if frames.dim() != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8:
        raise ValueError(f"read: frames must be [F, H, W, 3] uint8, got {list(frames.shape)} {frames.dtype}")
    if len(frames) < 2 or min(frames.shape[1:3]) < 32:
        raise ValueError(f"read: a clip has at least 2 frames of at least 32x32, got {list(frames.shape)}")
    networks = scorer or shipped_scorer()
    images = to_side(frames.permute(0, 3, 1, 2).float() / 255)
    masks, looks = [], []
    for part in torch.split(images, 16):
        mask, look = networks.finder(part)
        masks.append(torch.sigmoid(mask))
        looks.append(torch.softmax(look, dim=1))
    found = torch.cat(masks)
    small = F.avg_pool2d(images, 2)
    count, tracks = find_tracks(found)
    camera = find_camera(small, found, fps)
    things = [_see(networks, track, images, small, camera) for track in tracks]
    order = sorted(range(len(things)), key=lambda i: -float(tracks[i].area.median()))
    return Reading(count, tuple(things[i] for i in order), _backdrop(torch.cat(looks)), camera.name)


def score(frames: Tensor, expected: Expected | Scene | Prompt, scorer: Scorer | None = None) -> dict[str, bool]:
    """Read a clip and compare: kind, color, direction, motion, scene, count, relation, all."""
    return compare(read(frames, scorer), expected)


def compare(reading: Reading, expected: Expected | Scene | Prompt) -> dict[str, bool]:
    """Compare a reading with what was expected.

    direction: a thing that should go somewhere has its slope that way, one that should grow or shrink changes size so,
    and any other moves exactly as asked. motion: each thing moves exactly as asked. Things are matched so that as much
    as possible is right; a thing that is missing is wrong in all.
    """
    wanted = expected if isinstance(expected, Expected) else expected_of(expected)
    missing: list[Seen | None] = [None] * len(wanted.things)
    best: dict[str, bool] = {}
    for order in permutations([*reading.things[:4], *missing], len(wanted.things)):
        right = {
            "kind": all(s is not None and s.kind == kind for s, (kind, _, _) in zip(order, wanted.things, strict=True)),
            "color": all(
                s is not None and s.color == color for s, (_, color, _) in zip(order, wanted.things, strict=True)
            ),
            "direction": all(
                s is not None and _goes(s.movement, m) for s, (_, _, m) in zip(order, wanted.things, strict=True)
            ),
            "motion": all(s is not None and s.motion == m for s, (_, _, m) in zip(order, wanted.things, strict=True)),
            "relation": wanted.relation is None or _stand(order, wanted.relation),
        }
        if not best or sum(right.values()) > sum(best.values()):
            best = right
    best["scene"] = reading.backdrop == wanted.backdrop
    best["count"] = reading.count == len(wanted.things)
    best["all"] = all(best[name] for name in ("color", "kind", "direction", "scene"))
    return best


def table(scores: Sequence[tuple[str, Mapping[str, bool]]]) -> str:
    """Lay out scores, each with the name of its group, as shares in percent: a line a group, and one for all."""
    columns = ("color", "kind", "direction", "motion", "scene", "count", "relation", "all")
    groups = sorted({group for group, _ in scores})
    lines = ["".join(name.rjust(11) for name in ("group", "clips", *columns))]
    for group in [*groups, "total"]:
        chosen = [right for name, right in scores if group in (name, "total")]
        shares = [f"{100 * sum(right[c] for right in chosen) / max(len(chosen), 1):.1f}" for c in columns]
        lines.append("".join(cell.rjust(11) for cell in (group, str(len(chosen)), *shares)))
    return "\n".join(lines)


@functools.cache
def shipped_scorer() -> Scorer:
    """Load the networks in assets/tiny_world."""
    return load_scorer(assets() / "scorer.safetensors")


def assets() -> Path:
    """Find the folder of this world's assets, installed or in a checkout."""
    try:
        return Path(str(importlib.resources.files("media_server_assets"))) / "tiny_world"
    except ModuleNotFoundError:
        return Path(__file__).parents[2] / "assets" / "tiny_world"


def read_clip(path: Path) -> Tensor:
    """Decode a video file: [F, H, W, 3] uint8."""
    import av

    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    if not frames:
        raise ValueError(f"read_clip: {path.name} holds no video frame")
    return torch.stack(frames)


def _see(networks: Scorer, track: Track, images: Tensor, small: Tensor, camera: CameraMove) -> Seen:
    """Name one thing and tell how it moves."""
    shown = track.seen.nonzero()[:, 0]
    chosen = shown[torch.linspace(0, len(shown) - 1, min(NAMED_FRAMES, len(shown))).round().long()]
    boxes = mask_boxes(track.masks[chosen])
    kinds, colors = networks.namer(cut_out(images[chosen], track.masks[chosen], boxes))
    kind, color = torch.log_softmax(kinds, 1).mean(0).softmax(0), torch.log_softmax(colors, 1).mean(0).softmax(0)
    x, y = track.centre[shown].mean(0).tolist()
    return Seen(
        kind=KINDS[int(kind.argmax())],
        color=COLORS[int(color.argmax())],
        movement=find_movement(track, small, camera),
        x=x,
        y=y,
        kind_probability=float(kind.max()),
        color_probability=float(color.max()),
    )


def _backdrop(looks: Tensor) -> str:
    """Tell the backdrop from the looks of F frames [F, LOOKS]; where day passes into night, night falls."""
    quarter = max(1, len(looks) // 4)
    before, after = looks[:quarter].mean(0), looks[-quarter:].mean(0)
    day, night = LOOKS.index("day"), LOOKS.index("night")
    darkening = min(float(before[day] - after[day]), float(after[night] - before[night]))
    if darkening > LEAST_DARKENING:
        return "nightfall"
    return LOOKS[int(looks.mean(0).argmax())]


def _goes(movement: Movement, motion: str) -> bool:
    """Whether a thing goes the way, or changes size the way, that a motion says."""
    if motion in DIRECTIONS:
        far = max(abs(movement.shift_x), abs(movement.shift_y)) > 0.6 * LEAST_SHIFT
        return far and direction(movement.shift_x, movement.shift_y) == motion
    if motion in ("growing", "shrinking"):
        return movement.growth * (1 if motion == "growing" else -1) > 0.7 * LEAST_GROWTH
    return movement.motion == motion


def _stand(order: Sequence[Seen | None], relation: str) -> bool:
    first, second = order
    if first is None or second is None:
        return False
    return {
        "left of": first.x < second.x,
        "right of": first.x > second.x,
        "above": first.y < second.y,
        "below": first.y > second.y,
    }[relation]
