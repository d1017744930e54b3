"""Scenes of the tiny world: what stands where and how it moves, as plain data from a seed.

Positions are fractions of the frame (x of its width, y of its height, y down), radii are half the height of the thing
as a fraction of the frame's shorter side, times are seconds. A scene knows no pixels: it is drawn at any size.

Invariants: a scene is a function of (seed, split) alone, on every Python; the split "train" never holds a pair of
`HELD_OUT`, the split "unseen" always holds at least one; a thing never has a colour that its backdrop hides;
the middle of a thing stays inside the frame for ever, at no more than a tenth of the frame a frame.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from video.tiny.held_out import HELD_OUT, HeldOut
from video.tiny.vocabulary import (
    AT_HOME,
    BACKDROPS,
    CAMERAS,
    COLORS,
    DIRECTIONS,
    HIDDEN_ON,
    KINDS,
    MOTIONS,
    PLAINS,
    RELATIONS,
    SCENES,
    SIZES,
    SPLITS,
    check_word,
)

RADIUS = {"small": 0.135, "medium": 0.178, "large": 0.225}
# Where things stand, as a fraction of the height; on the sea it is the line on which a boat floats.
GROUND = {"day": 0.84, "night": 0.84, "sea": 0.76, "snow": 0.86, "rain": 0.86, "city": 0.90, "nightfall": 0.84}
IN_THE_SKY = ("sun", "moon", "bird", "star")

T = TypeVar("T")
_HELD_OUT = frozenset(HELD_OUT)

SPEED = 0.30  # frame widths (or heights) a second
SPIN = 0.30  # turns a second, clockwise
BOUNCE = 0.95  # bounces a second
PAN_SPEED, PAN_LIMIT = 0.11, 0.28  # frame widths a second, and in all
ZOOM_SPEED, ZOOM_LIMIT = 0.17, 0.42  # natural logarithm of the scale a second, and in all

PAIR_SHARE = 0.36  # of the scenes drawn have two things; a quarter of those kept, since more of them are refused
PLAIN_SHARE = 0.40  # of scenes have a plain backdrop
CAMERA_SHARE = 0.30  # of single-thing scenes before a scenic backdrop have a moving camera
CAMERA_MOTIONS = {"pan": ("still", "spinning", "bouncing", "up", "down"), "zoom": ("still", "spinning")}


@dataclass(frozen=True)
class Thing:
    """One thing and its path.

    x, y: middle at time 0, fractions of width and height. radius: half its height, fraction of the shorter side.
    rate, limit: of the motion: frame widths or heights a second and in all (left, right, up, down); natural logarithm
    of the scale a second and in all (growing, shrinking); bounces a second and height as a fraction of the frame
    (bouncing); turns a second (spinning). phase: where in its bounce or turn it starts, 0..1.
    """

    kind: str
    color: str
    size: str
    motion: str
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.17
    rate: float = 0.0
    limit: float = 0.0
    phase: float = 0.0

    def __post_init__(self) -> None:
        check_word("kind", self.kind, KINDS)
        check_word("color", self.color, COLORS)
        check_word("size", self.size, SIZES)
        check_word("motion", self.motion, MOTIONS)


@dataclass(frozen=True)
class Scene:
    """One or two things before a backdrop; `relation` reads "the first is <relation> the second"."""

    things: tuple[Thing, ...]
    backdrop: str
    camera: str
    relation: str | None
    seed: int

    def __post_init__(self) -> None:
        check_word("backdrop", self.backdrop, BACKDROPS)
        check_word("camera", self.camera, CAMERAS)
        if len(self.things) not in (1, 2):
            raise ValueError(f"things: a scene holds 1 or 2, got {len(self.things)}")
        if (self.relation is not None) != (len(self.things) == 2):
            raise ValueError(f"relation: is given exactly for two things, got {self.relation!r}")
        if self.relation is not None:
            check_word("relation", self.relation, RELATIONS)


def sample_scene(seed: int, split: str) -> Scene:
    """Draw the scene of a seed; `split` is "train" (no held-out pair) or "unseen" (at least one).

    Raises:
        ValueError: `seed` is negative or `split` is neither.
    """
    check_word("split", split, SPLITS)
    if seed < 0:
        raise ValueError(f"seed: must be at least 0, got {seed}")
    rng = random.Random(f"tiny world {split} {seed}")
    wanted: HeldOut | None = None
    if split == "unseen":
        aspect = pick(rng, ("color", "color", "motion", "backdrop"))
        wanted = pick(rng, [pair for pair in HELD_OUT if pair.aspect == aspect])
    while True:
        scene = _draw_words(rng, wanted, seed)
        if scene is not None and is_held_out(scene) == (split == "unseen"):
            return scene


def is_held_out(scene: Scene) -> bool:
    """Whether a scene holds a pair that training never draws."""
    return bool(held_out_pairs(scene))


def held_out_pairs(scene: Scene) -> list[HeldOut]:
    """List the held-out pairs of a scene."""
    pairs = []
    for thing in scene.things:
        pairs += [HeldOut(thing.kind, "color", thing.color), HeldOut(thing.kind, "motion", thing.motion)]
        pairs.append(HeldOut(thing.kind, "backdrop", scene.backdrop))
    return [pair for pair in pairs if pair in _HELD_OUT]


def compose(
    words: Sequence[tuple[str, str, str, str]],
    backdrop: str,
    camera: str = "none",
    relation: str | None = None,
    seed: int = 0,
) -> Scene:
    """Lay out a scene from its words.

    Args:
        words: one or two of (kind, color, size, motion).
        backdrop, camera, relation: words of the vocabulary; a relation exactly for two things.
        seed: at least 0; draws the free choices of the layout and of the backdrop.

    Raises:
        ValueError: a word is not of the vocabulary, or the number of things does not fit.
    """
    rng = random.Random(f"layout {seed}")
    things = tuple(Thing(kind, color, size, motion) for kind, color, size, motion in words)
    bare = Scene(things, backdrop, camera, relation, seed)
    return replace(bare, things=tuple(_place(rng, bare, index) for index in range(len(things))))


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Pick uniformly; built on `random()` alone, whose stream no Python release changes."""
    return options[int(rng.random() * len(options))]


def _draw_words(rng: random.Random, wanted: HeldOut | None, seed: int) -> Scene | None:
    """Draw the words of a scene whose first thing holds the wanted pair; None where they do not go together."""
    kinds = [pick(rng, KINDS)]
    relation = None
    if rng.random() < PAIR_SHARE:
        kinds.append(pick(rng, KINDS))
        relation = pick(rng, RELATIONS)
    if wanted is not None:
        kinds[0] = wanted.kind
    is_plain, at_home = rng.random() < PLAIN_SHARE, rng.random() < 0.3
    scenes = AT_HOME.get(kinds[0], SCENES) if at_home else SCENES
    backdrop = pick(rng, PLAINS if is_plain else scenes)
    if wanted is not None and wanted.aspect == "backdrop":
        backdrop = wanted.word
    camera = "none"
    if relation is None and backdrop in SCENES and rng.random() < CAMERA_SHARE:
        camera = pick(rng, CAMERAS[1:])
    words: list[tuple[str, str, str, str]] = []
    for index, kind in enumerate(kinds):
        color, motion = pick(rng, COLORS), _draw_motion(rng, camera, relation, index)
        if index == 0 and wanted is not None:
            color = wanted.word if wanted.aspect == "color" else color
            motion = wanted.word if wanted.aspect == "motion" else motion
        words.append((kind, color, _draw_size(rng, motion, camera, relation), motion))
    if any(color in HIDDEN_ON[backdrop] for _, color, _, _ in words) or len({word[1] for word in words}) < len(words):
        return None
    if any(word[3] not in _motions(camera, relation) for word in words):
        return None
    return compose(words, backdrop, camera, relation, seed)


def _motions(camera: str, relation: str | None) -> tuple[str, ...]:
    """List the motions that read clearly under a camera move or beside another thing."""
    if camera != "none":
        return CAMERA_MOTIONS[camera.split()[0]]
    if relation in ("left of", "right of"):
        return ("up", "down", "growing", "shrinking", "bouncing", "spinning", "still")
    if relation in ("above", "below"):
        return ("left", "right", "growing", "shrinking", "spinning", "still")
    return MOTIONS


def _draw_motion(rng: random.Random, camera: str, relation: str | None, index: int) -> str:
    rests = index == 1 and rng.random() < 0.5
    motion = pick(rng, _motions(camera, relation))
    return "still" if rests else motion


def _draw_size(rng: random.Random, motion: str, camera: str, relation: str | None) -> str:
    if motion == "growing" or camera == "zoom in":
        return pick(rng, ("small", "medium") if relation is None else ("small",))
    if motion == "shrinking" or camera == "zoom out":
        return pick(rng, ("medium", "large") if relation is None else ("medium",))
    return pick(rng, SIZES if relation is None else SIZES[:2])


def _place(rng: random.Random, scene: Scene, index: int) -> Thing:
    """Give a thing its start, radius and pace: its motion reads within two seconds and never leaves the frame."""
    thing = scene.things[index]
    radius = RADIUS[thing.size] * _between(rng, 0.95, 1.05)
    is_pair = scene.relation is not None
    x, y = _between(rng, 0.36, 0.64), _rest_height(rng, thing, scene.backdrop, radius)
    if is_pair:
        x, y = _pair_position(rng, scene, index)
    if scene.camera.startswith("pan"):
        x += 0.12 if scene.camera == "pan right" else -0.12
    elif scene.camera.startswith("zoom"):
        x, y = _between(rng, 0.44, 0.56), _between(rng, 0.44, 0.58)
    rate, limit, phase = 0.0, 0.0, 0.0
    edge = radius + 0.04
    start, end = edge + _between(rng, 0.0, 0.06), 1.0 - edge
    if thing.motion in DIRECTIONS:
        rate, limit = SPEED * _between(rng, 0.9, 1.15), end - start
        if thing.motion in ("left", "right"):
            x = start if thing.motion == "right" else 1.0 - start
            if thing.kind == "boat" and scene.backdrop == "sea" and not is_pair:
                y = GROUND["sea"] - 0.62 * radius
        else:
            y = start if thing.motion == "down" else 1.0 - start
    elif thing.motion in ("growing", "shrinking"):
        last = (0.25 if not is_pair else 0.19) if thing.motion == "growing" else 0.1
        limit = abs(math.log(last / radius))
        rate = 0.65 * limit * _between(rng, 0.9, 1.15)
        if not is_pair:
            y = min(max(y, 0.30), 0.70)
    elif thing.motion == "bouncing":
        y = min(0.88, GROUND.get(scene.backdrop, 0.88)) - radius
        rate, limit = BOUNCE * _between(rng, 0.92, 1.08), min(0.36, y - radius - 0.03)
        phase = rng.random()
    elif thing.motion == "spinning":
        rate, phase = SPIN * _between(rng, 0.9, 1.1), 0.0
    return replace(thing, x=x, y=y, radius=radius, rate=rate, limit=limit, phase=phase)


def _rest_height(rng: random.Random, thing: Thing, backdrop: str, radius: float) -> float:
    """Choose the height of a thing's middle: in the sky, on the ground, or anywhere before a plain backdrop."""
    if backdrop in PLAINS:
        return _between(rng, 0.40, 0.60)
    if thing.kind in IN_THE_SKY:
        return max(radius + 0.05, _between(rng, 0.24, 0.40))
    if thing.kind == "boat" and backdrop == "sea":
        return GROUND["sea"] - 0.62 * radius
    if backdrop == "sea":
        return _between(rng, 0.40, 0.60)
    return GROUND[backdrop] - radius * _between(rng, 0.95, 1.05)


def _pair_position(rng: random.Random, scene: Scene, index: int) -> tuple[float, float]:
    near, far = _between(rng, 0.26, 0.29), _between(rng, 0.71, 0.74)
    side = near if (scene.relation in ("left of", "above")) == (index == 0) else far
    if scene.relation in ("left of", "right of"):
        return side, _between(rng, 0.44, 0.60)
    return _between(rng, 0.40, 0.60), side


def _between(rng: random.Random, low: float, high: float) -> float:
    return low + (high - low) * rng.random()
