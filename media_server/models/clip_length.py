"""How long a clip is, in how many chained segments, and whether the frames it is given leave something to make."""

import math

from media_server.models.card import VideoCard
from media_server.models.clip_request import Adjustment, ClipRequest, Segments
from media_server.validation import refuse


def find_overlap(card: VideoCard, request: ClipRequest) -> int:
    """Give the frames that a segment takes over from the one before: its last one, or as many as the model can hold."""
    asked = request.extend.overlap_frames if request.extend else None
    if asked is None:
        return card.frames.temporal + 1 if "overlap" in card.conditions else 1
    if asked > 1 and "overlap" not in card.conditions:
        refuse("extend.overlap_frames", f"{card.name} continues from one frame", asked)
    if asked != card.frames.fit(asked) and asked != 1:
        refuse("extend.overlap_frames", f"must follow the frame rule {card.frames.rule}", asked)
    if asked >= card.frames.max:
        refuse("extend.overlap_frames", f"must be below {card.frames.max}", asked)
    return asked


def find_num_frames(card: VideoCard, request: ClipRequest, fps: int, overlap: int) -> int:
    """Find the one length that was asked for; all ways of saying it must agree."""
    most = card.limits.max_frames(fps)
    too_long = f"at most {card.limits.max_seconds:g} s, which is {most} frames at {fps} fps"
    asked: dict[str, int] = {}
    if request.num_frames is not None:
        asked["num_frames"] = request.num_frames
    in_all = request.extend.seconds if request.extend else None
    for param, seconds in (("seconds", request.seconds), ("extend.seconds", in_all)):
        if seconds is None:
            continue
        # 1e308 s times a frame rate is no number of frames any more
        if not math.isfinite(seconds * fps):
            refuse(param, too_long, seconds)
        asked[param] = round(seconds * fps)
    if len(set(asked.values())) > 1:
        refuse(next(iter(asked)), f"lengths must agree at {fps} fps", asked)
    if asked:
        param, num_frames = next(iter(asked.items()))
    else:
        param, num_frames = "seconds", round(card.defaults.seconds * fps)
        if request.extend is not None and request.extend.segments is not None:
            # each segment as long as a clip of its own
            param = "extend.segments"
            single = min(num_frames, card.frames.max)
            num_frames = single + (request.extend.segments - 1) * max(single - overlap, 1)
    if num_frames < 1:
        refuse(param, f"at least one frame at {fps} fps", getattr(request, param, None))
    if num_frames > most:
        refuse(param, too_long, num_frames)
    return num_frames


def plan_segments(
    card: VideoCard, request: ClipRequest, num_frames: int, overlap: int
) -> tuple[Segments | None, list[Adjustment]]:
    """Divide a clip into segments, None if one will do; and say what is done otherwise than asked."""
    longest = card.frames.max
    asked = request.extend.segments if request.extend else None
    needed = 1 if num_frames <= longest else 1 + -(-(num_frames - longest) // (longest - overlap))
    if asked is not None and asked < needed:
        refuse("extend.segments", f"{num_frames} frames need at least {needed} segments", asked)
    if asked is not None and asked > num_frames:
        refuse("extend.segments", f"at most one segment a frame, of {num_frames}", asked)
    count = asked or needed
    on_drift = request.extend.on_drift if request.extend else "report"
    if on_drift not in card.on_drift:
        refuse("extend.on_drift", f"{card.name} offers {', '.join(card.on_drift)}", on_drift)
    if count == 1:
        return None, []
    if not {"first_frame", "overlap"} & set(card.conditions):
        refuse("seconds", f"{card.name} cannot continue a clip: at most {longest} frames", num_frames)
    # equal lengths as generated: the first segment has no overlap to repeat
    total = num_frames + (count - 1) * overlap
    made = [total // count + (index < total % count) for index in range(count)]
    frames = [made[0], *(length - overlap for length in made[1:])]
    if min(frames) < 1:
        refuse("extend.segments", f"{num_frames} frames are too few with an overlap of {overlap}", count)
    adjusted = []
    if request.extend is None:
        adjusted.append(
            Adjustment(
                param="num_frames" if request.num_frames is not None else "seconds",
                rule=f"{card.name} makes at most {longest} frames in one piece",
                asked=num_frames if request.num_frames is not None else num_frames / (request.fps or card.fps),
                given=f"{count} chained segments, {num_frames} frames in all",
            )
        )
    segments = Segments(
        segments=count,
        segment_frames=frames,
        overlap_frames=overlap,
        anchor=request.extend.anchor if request.extend else False,
        on_drift=on_drift,
    )
    return segments, adjusted


def check_known_frames(card: VideoCard, request: ClipRequest, num_frames: int, extend: Segments | None) -> None:
    """Refuse a length that the frames given at its ends fill, or that they do not fit.

    Frames are given by whole latent frames: an image is one of them, an overlap of 4k+1 frames k+1.
    """
    overlap = extend.overlap_frames if extend else find_overlap(card, request)
    lengths = extend.segment_frames if extend else [num_frames]
    for index, added in enumerate(lengths):
        is_continued = index > 0 or "video" in request.inputs
        length = added + (overlap if is_continued else 0)
        known = (overlap - 1) // card.frames.temporal + 1 if is_continued else int("first_frame" in request.inputs)
        is_end_given = index == len(lengths) - 1 and "last_frame" in request.inputs
        if known + is_end_given > (card.frames.fit(length) - 1) // card.frames.temporal:
            refuse("num_frames", "must leave something to make beside the frames that are given", num_frames)
        missing = card.frames.fit(length) - length
        if is_end_given and missing and card.layout == "wan-i2v":
            rule = f"cannot be trimmed if it ends in a given frame; {num_frames + missing} frames can be made"
            refuse("num_frames", rule, num_frames)
