"""A film as an OpenTimelineIO timeline (schema Timeline.1, opentimelineio.readthedocs.io).

One video track, one clip a shot; each clip names the film's file as its medium and its own frames in it, so that the
cuts of the timeline are the cuts of the film. What made a shot stands in its metadata under `media_server`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import opentimelineio as otio


@dataclass(frozen=True)
class TimelineShot:
    """One shot as the timeline shows it; `num_frames` are its frames in the film."""

    name: str
    num_frames: int
    metadata: dict[str, Any]


def film_timeline(
    title: str, shots: Sequence[TimelineShot], *, fps: float, media_url: str, metadata: dict[str, Any]
) -> str:
    """Write the timeline of a film whose file lies at `media_url`; returns OTIO JSON."""
    total_frames = sum(shot.num_frames for shot in shots)
    whole = otio.opentime.TimeRange(_at(0, fps), _at(total_frames, fps))
    track = otio.schema.Track(name="video", kind=otio.schema.TrackKind.Video)
    start = 0
    for shot in shots:
        track.append(
            otio.schema.Clip(
                name=shot.name,
                media_reference=otio.schema.ExternalReference(target_url=media_url, available_range=whole),
                source_range=otio.opentime.TimeRange(_at(start, fps), _at(shot.num_frames, fps)),
                metadata={"media_server": shot.metadata},
            )
        )
        start += shot.num_frames
    timeline = otio.schema.Timeline(name=title, global_start_time=_at(0, fps), metadata={"media_server": metadata})
    timeline.tracks.append(track)
    return str(otio.adapters.write_to_string(timeline, "otio_json"))


def _at(frame: int, fps: float) -> Any:
    return otio.opentime.RationalTime(frame, fps)
