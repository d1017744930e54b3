"""The timeline, read back by OpenTimelineIO: as many clips as shots, at the film's frames."""

import opentimelineio as otio

from media_server.timeline.otio import TimelineShot, film_timeline


def test_clips_lie_at_the_films_frames() -> None:
    shots = [
        TimelineShot("shot 1", 33, {"prompt": "a red ball"}),
        TimelineShot("shot 2", 40, {}),
        TimelineShot("s", 55, {}),
    ]
    text = film_timeline("The Ball", shots, fps=16, media_url="film.mp4", metadata={"film_id": "film_1"})
    timeline = otio.adapters.read_from_string(text, "otio_json")
    assert timeline.name == "The Ball"
    assert timeline.duration() == otio.opentime.RationalTime(128, 16)
    clips = list(timeline.find_clips())
    assert [clip.source_range.start_time.value for clip in clips] == [0, 33, 73]
    assert [clip.range_in_parent().start_time.value for clip in clips] == [0, 33, 73]
    assert [clip.duration().value for clip in clips] == [33, 40, 55]
    assert {clip.media_reference.target_url for clip in clips} == {"film.mp4"}
    assert clips[0].metadata["media_server"]["prompt"] == "a red ball"
    assert timeline.metadata["media_server"]["film_id"] == "film_1"
