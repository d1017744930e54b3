"""Joining: exact frames, cuts where they belong, colours kept; by copying packets and by encoding again."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from workers.joining import ClipFile, JoinError, inspect_film, join_clips

FPS = 16
WIDTH, HEIGHT = 64, 48
# dark red, dark green, dark blue: far apart, so that a frame says which clip it is of
COLORS = ((150, 20, 20), (20, 150, 20), (20, 20, 150))

MakeClip = Callable[..., ClipFile]


@pytest.fixture
def make_clip(tmp_path: Path) -> MakeClip:
    def make(
        color: Sequence[int],
        num_frames: int,
        share: int | None = None,
        *,
        preset: str = "medium",
        size: tuple[int, int] = (WIDTH, HEIGHT),
        fps: int = FPS,
    ) -> ClipFile:
        path = tmp_path / f"clip{len(list(tmp_path.glob('clip*.mp4')))}.mp4"
        with av.open(str(path), "w") as file:
            stream = file.add_stream("libx264", rate=fps, options={"crf": "12", "preset": preset})
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            context = stream.codec_context
            context.color_primaries = context.color_trc = context.colorspace = context.color_range = 1
            for index in range(num_frames):
                pixels = np.empty((size[1], size[0], 3), np.uint8)
                pixels[:] = color
                # a bar that moves one pixel a frame: a frame also says which one of its clip it is
                pixels[:, index : index + 1] = 255
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                file.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=1)))
            file.mux(stream.encode(None))
        return ClipFile(path, num_frames if share is None else share)

    return make


def no_report(_: int) -> None:
    return None


def colors_of(film: Path) -> list[int]:
    """Say for each frame which of COLORS it shows."""
    found = []
    with av.open(str(film)) as file:
        for frame in file.decode(video=0):
            pixel = frame.to_ndarray(format="rgb24")[HEIGHT // 2, WIDTH - 2].astype(int)
            found.append(int(np.argmin([np.abs(pixel - color).sum() for color in COLORS])))
    return found


def test_clips_of_one_encoder_are_copied_with_exact_frames(make_clip: MakeClip, tmp_path: Path) -> None:
    lengths = (33, 1, 18)
    clips = [make_clip(color, length) for color, length in zip(COLORS, lengths, strict=True)]
    film = tmp_path / "film.mp4"
    heard: list[int] = []
    assert join_clips(clips, film, fps=FPS, report=heard.append)
    assert colors_of(film) == [0] * 33 + [1] + [2] * 18
    assert heard == [33, 34, 52]
    pictures = inspect_film(film, lengths, fps=FPS, wanted={0, 33, 51}, report=no_report)
    assert [pictures[index].size for index in (0, 33, 51)] == [(WIDTH, HEIGHT)] * 3
    with av.open(str(film)) as file:
        assert file.duration == Fraction(52, FPS) * av.time_base


def test_copied_frames_are_the_clips_own(make_clip: MakeClip, tmp_path: Path) -> None:
    clips = [make_clip(COLORS[0], 9), make_clip(COLORS[1], 9)]
    film = tmp_path / "film.mp4"
    assert join_clips(clips, film, fps=FPS, report=no_report)
    expected = []
    for clip in clips:
        with av.open(str(clip.path)) as file:
            expected += [frame.to_ndarray() for frame in file.decode(video=0)]
    with av.open(str(film)) as file:
        got = [frame.to_ndarray() for frame in file.decode(video=0)]
    assert len(got) == len(expected) == 18
    assert all(np.array_equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["trimmed", "other encoder"])
def test_clips_that_cannot_be_copied_are_encoded_again(case: str, make_clip: MakeClip, tmp_path: Path) -> None:
    if case == "trimmed":
        clips = [make_clip(COLORS[0], 17, 14), make_clip(COLORS[1], 17), make_clip(COLORS[2], 13, 9)]
    else:
        clips = [make_clip(COLORS[0], 14), make_clip(COLORS[1], 17, preset="ultrafast"), make_clip(COLORS[2], 9)]
    film = tmp_path / "film.mp4"
    assert not join_clips(clips, film, fps=FPS, report=no_report)
    assert colors_of(film) == [0] * 14 + [1] * 17 + [2] * 9
    # cuts are keyframes, spacing is even, colour is tagged
    pictures = inspect_film(film, (14, 17, 9), fps=FPS, wanted={0, 14, 31}, report=no_report)
    for index, color in zip((0, 14, 31), COLORS, strict=True):
        got = np.asarray(pictures[index])[HEIGHT // 2, WIDTH - 2].astype(int)
        assert np.abs(got - color).max() <= 6


def test_a_clip_that_is_too_short_is_refused(make_clip: MakeClip, tmp_path: Path) -> None:
    with pytest.raises(JoinError, match="clip 2 has 9 frames, its share is 10"):
        join_clips(
            [make_clip(COLORS[0], 9), make_clip(COLORS[1], 9, 10)], tmp_path / "film.mp4", fps=FPS, report=no_report
        )


def test_sizes_and_rates_that_differ_are_refused(make_clip: MakeClip, tmp_path: Path) -> None:
    one = make_clip(COLORS[0], 5)
    with pytest.raises(JoinError, match="clip 2 is 32x32"):
        join_clips([one, make_clip(COLORS[1], 5, size=(32, 32))], tmp_path / "film.mp4", fps=FPS, report=no_report)
    with pytest.raises(JoinError, match="clip 2 has 24 frames a second"):
        join_clips([one, make_clip(COLORS[1], 5, fps=24)], tmp_path / "film.mp4", fps=FPS, report=no_report)


def test_inspection_refuses_what_is_not_the_film(make_clip: MakeClip, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    join_clips([make_clip(COLORS[0], 8), make_clip(COLORS[1], 8)], film, fps=FPS, report=no_report)
    with pytest.raises(JoinError, match="indexed frames must be 17, got 16"):
        inspect_film(film, (8, 9), fps=FPS, wanted=(), report=no_report)
    with pytest.raises(JoinError, match="the cut at frame 7 is not a keyframe"):
        inspect_film(film, (7, 9), fps=FPS, wanted=(), report=no_report)
    with pytest.raises(JoinError, match="frame rate must be 24"):
        inspect_film(film, (8, 8), fps=24, wanted=(), report=no_report)
    # a clip as the fixture writes it has its index at the end
    late = make_clip(COLORS[0], 4)
    with pytest.raises(JoinError, match="index does not stand before"):
        inspect_film(late.path, (4,), fps=FPS, wanted=(), report=no_report)


def test_a_report_that_raises_stops_the_joining(make_clip: MakeClip, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        join_clips([make_clip(COLORS[0], 5)], tmp_path / "film.mp4", fps=FPS, report=stop)
