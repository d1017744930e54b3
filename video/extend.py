"""Long clips as a chain of segments, each continuing from the last frames of the one before.

Invariants: the frames that the segments add sum to exactly what was asked; no frame is repeated at a joint and none
is missing; each segment is made as the next 4k+1 frames that hold its overlap and its own, and trimmed; a segment's
seed follows from the clip's seed and its index alone, so a later attempt that continues makes the same clip.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from video.errors import InvalidClip

MAX_SEED = 2**53


@dataclass(frozen=True)
class Segment:
    """One link of the chain: `num_frames` it adds after `overlap_frames` it is given, `made_frames` of 4k+1 in all."""

    index: int
    num_frames: int
    overlap_frames: int
    made_frames: int
    seed: int


def fit_frames(num_frames: int, temporal: int = 4) -> int:
    """Give the smallest 4k+1 that is at least `num_frames`, which is 1 or more."""
    return -(-(num_frames - 1) // temporal) * temporal + 1


def segment_seed(seed: int, index: int) -> int:
    """Give a segment's seed below 2**53; the first segment's is the clip's own."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"segment:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % MAX_SEED


def plan_segments(
    num_frames: int,
    seed: int,
    *,
    max_frames: int,
    segment_frames: Sequence[int] | None = None,
    overlap_frames: int = 1,
    has_source: bool = False,
    temporal: int = 4,
) -> list[Segment]:
    """Divide a clip into segments.

    Args:
        num_frames: to be added in all; a source that is continued is not counted.
        seed: of the clip.
        max_frames: most frames the model makes in one piece, 4k+1.
        segment_frames: what each segment adds; None: one segment, or as few as needed behind a source.
        overlap_frames: known at the start of each segment but the first, 4k+1.
        has_source: whether the first segment continues another clip.
        temporal: the model's temporal factor.

    Raises:
        InvalidClip: the lengths do not sum to the clip's, a segment is too long, or the overlap is not 4k+1.
    """
    if num_frames < 1:
        raise InvalidClip(f"num_frames: must be at least 1, got {num_frames}.")
    chained = has_source or (segment_frames is not None and len(segment_frames) > 1)
    if chained and (overlap_frames < 1 or overlap_frames % temporal != 1 % temporal):
        raise InvalidClip(f"extend.overlap_frames: must be {temporal}k+1, got {overlap_frames}.")
    if segment_frames is None:
        segment_frames = [num_frames] if not has_source else _share(num_frames, max_frames - overlap_frames)
    if sum(segment_frames) != num_frames or min(segment_frames) < 1:
        raise InvalidClip(f"extend.segment_frames: must sum to num_frames {num_frames}, got {list(segment_frames)}.")
    segments = []
    for index, added in enumerate(segment_frames):
        overlap = overlap_frames if index > 0 or has_source else 0
        made = fit_frames(added + overlap, temporal)
        # a front that does not count the source's overlap may pass the longest by as much
        if made > fit_frames(max_frames + (overlap_frames if has_source and index == 0 else 0), temporal):
            raise InvalidClip(
                f"num_frames: at most {max_frames} in one piece, overlap of {overlap} included, got {added + overlap}."
            )
        segments.append(Segment(index, added, overlap, made, segment_seed(seed, index)))
    return segments


def _share(num_frames: int, longest: int) -> list[int]:
    """Share frames evenly over as few segments as possible."""
    if longest < 1:
        raise InvalidClip("extend.overlap_frames: leaves a segment nothing to add.")
    count = -(-num_frames // longest)
    return [num_frames // count + (index < num_frames % count) for index in range(count)]
