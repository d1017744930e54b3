"""The layout that two cores can teach: things start on the grid of the denoiser's tokens and keep one pace a motion.

A thing that stands anywhere has another latent at each place, and a small denoiser answers with the mean of them, a
blob. On the grid a shape has a handful of latents in all. The words of a scene stay as they are; so does what a scorer
reads.

Invariants: a settled scene settles to itself; its thing has left the frame at no time.
"""

import math
from dataclasses import replace

from video.tiny.vocabulary import DIRECTIONS
from video.tiny.world import RADIUS, SPEED, SPIN, Scene, Thing

COLUMNS, ROWS = 10, 6  # tokens across and down a frame of 160x96
TRAVEL = {"left": 0.5, "right": 0.5, "up": 0.36, "down": 0.36}  # frame widths or heights in all
START = {"left": 0.7, "right": 0.3, "up": 4 / 6, "down": 2 / 6}
BOUNCES = 1.0  # a second: a quarter of a bounce a latent frame of four at 16 frames a second
LOWEST = 0.02  # of the frame, under a thing


def settle(scene: Scene) -> Scene:
    """Move the thing of a scene to the grid.

    Raises:
        ValueError: the scene holds two things or a moving camera.
    """
    if len(scene.things) != 1 or scene.camera != "none":
        raise ValueError("scene: one thing before a still camera can be settled")
    return replace(scene, things=(_settle(scene.things[0]),))


def _settle(thing: Thing) -> Thing:
    radius = RADIUS[thing.size]
    x = min(max(round(thing.x * COLUMNS), 4), 6) / COLUMNS
    half_row = 2 * ROWS  # a latent is half a token high
    y = min(round(thing.y * half_row) / half_row, math.floor((1 - LOWEST - radius) * half_row) / half_row)
    settled = replace(thing, x=x, y=y, radius=radius)
    if thing.motion in ("left", "right"):
        return replace(settled, x=START[thing.motion], rate=SPEED, limit=TRAVEL[thing.motion])
    if thing.motion in DIRECTIONS:
        return replace(settled, y=START[thing.motion], rate=SPEED, limit=TRAVEL[thing.motion])
    if thing.motion in ("growing", "shrinking"):
        limit = abs(math.log((0.25 if thing.motion == "growing" else 0.1) / radius))
        return replace(settled, y=round(y * ROWS) / ROWS, rate=0.65 * limit, limit=limit)
    if thing.motion == "bouncing":
        return replace(settled, rate=BOUNCES, limit=min(0.36, y - radius - 0.03), phase=round(4 * thing.phase) % 4 / 4)
    if thing.motion == "spinning":
        return replace(settled, rate=SPIN, phase=0.0)
    return settled
