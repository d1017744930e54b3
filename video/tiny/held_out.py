"""The pairs of words that training never draws, so that what the model makes of them shows what it has understood.

Invariant: the choice is a function of the vocabulary alone (SHA-256 order), hence the same on every machine.
"""

import hashlib
from typing import NamedTuple

from video.tiny.vocabulary import AT_HOME, BACKDROPS, COLORS, KINDS, MOTIONS

# Pairs that a newcomer types first are never held out.
NATURAL = {
    ("ball", "bouncing"), ("ball", "red"), ("ball", "blue"), ("car", "red"), ("boat", "white"), ("tree", "green"),
    ("sun", "yellow"), ("moon", "white"), ("moon", "yellow"), ("star", "yellow"), ("house", "red"), ("bird", "blue"),
    ("star", "spinning"), ("house", "still"), ("tree", "still"), ("bird", "right"), ("bird", "left"), ("car", "left"),
    ("car", "right"), ("boat", "left"), ("boat", "right"), ("sun", "up"), ("sun", "down"),
    ("boat", "still"),
}  # fmt: skip


class HeldOut(NamedTuple):
    """A pair that training never draws: a kind with a word of one aspect (color, motion or backdrop)."""

    kind: str
    aspect: str
    word: str


def _hold_out(aspect: str, words: tuple[str, ...], share: float, most: int) -> list[HeldOut]:
    """Choose pairs by the order of their SHA-256, at most `most` of one kind and of one word."""
    pairs = [HeldOut(kind, aspect, word) for kind in KINDS for word in words]
    pairs.sort(key=lambda pair: hashlib.sha256(" ".join(pair).encode()).digest())
    held: list[HeldOut] = []
    for pair in pairs:
        is_natural = (pair.kind, pair.word) in NATURAL or pair.word in AT_HOME.get(pair.kind, ())
        is_full = max(sum(h.kind == pair.kind for h in held), sum(h.word == pair.word for h in held)) >= most
        if len(held) < round(share * len(pairs)) and not (is_natural or is_full):
            held.append(pair)
    return held


HELD_OUT: tuple[HeldOut, ...] = (
    *_hold_out("color", COLORS, 0.11, most=2),
    *_hold_out("motion", MOTIONS, 0.07, most=1),
    *_hold_out("backdrop", BACKDROPS, 0.06, most=1),
)
