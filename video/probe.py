"""Look at what was made before anybody may have it: the frames as they are decoded, the file after it is written.

Source: ISO/IEC 14496-12 (boxes of an MP4 file). `media-server video probe FILE` prints a file's facts as JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import av
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from torch import Tensor

from video.errors import InvalidClip, InvalidOutput

# a whole clip no brighter than this in any channel of any pixel is black; one whose pixels all lie within FLAT_RANGE
# of each other shows nothing
BLACK_LEVEL = 8
FLAT_RANGE = 2


@dataclass(frozen=True)
class ClipFacts:
    """What a video file is; frames are counted by decoding them."""

    container: str
    codec: str
    pix_fmt: str
    width: int
    height: int
    num_frames: int
    fps: Fraction
    duration_s: float
    color_range: str
    color_primaries: str
    color_trc: str
    colorspace: str
    is_faststart: bool
    size_bytes: int

    def to_json(self) -> dict[str, object]:
        """Give the facts as JSON; a rate that is not whole is written as a fraction."""
        rate: object = int(self.fps) if self.fps.denominator == 1 else str(self.fps)
        return {**asdict(self), "fps": rate}


class FrameGuard:
    """Watches frames as they come, and says whether they show anything."""

    def __init__(self) -> None:
        self.lowest, self.highest, self.num_frames = 255, 0, 0

    def add(self, frames: Tensor) -> None:
        """Take frames `[n, H, W, 3]` uint8."""
        low, high = torch.aminmax(frames)
        self.lowest, self.highest = min(self.lowest, int(low)), max(self.highest, int(high))
        self.num_frames += frames.shape[0]

    def check(self) -> None:
        """Check all frames so far.

        Raises:
            InvalidOutput: all of them are black or flat.
        """
        if self.highest <= BLACK_LEVEL:
            raise InvalidOutput(f"The clip is black: no value of {self.num_frames} frames is above {self.highest}.")
        if self.highest - self.lowest <= FLAT_RANGE:
            raise InvalidOutput(
                f"The clip is flat: all values of {self.num_frames} frames lie from {self.lowest} to {self.highest}."
            )


def probe(path: Path) -> ClipFacts:
    """Read a video file's facts; decodes all of it.

    Raises:
        InvalidClip: the file is no video that decodes.
    """
    try:
        with av.open(str(path), "r") as file:
            if not file.streams.video:
                raise InvalidClip("file: has no video stream.")
            stream = file.streams.video[0]
            num_frames = sum(1 for _ in file.decode(stream))
            context = stream.codec_context
            seconds = stream.duration * stream.time_base if stream.duration and stream.time_base else None
            if seconds is None:
                seconds = Fraction(file.duration or 0, av.time_base)
            return ClipFacts(
                container=file.format.name,
                codec=context.name,
                pix_fmt=context.pix_fmt or "unknown",
                width=context.width,
                height=context.height,
                num_frames=num_frames,
                fps=stream.average_rate or Fraction(0),
                duration_s=float(seconds),
                color_range=_name(ColorRange, context.color_range),
                color_primaries=_name(ColorPrimaries, context.color_primaries),
                color_trc=_name(ColorTrc, context.color_trc),
                colorspace=_name(Colorspace, context.colorspace),
                is_faststart=is_faststart(path),
                size_bytes=path.stat().st_size,
            )
    except av.error.FFmpegError as error:
        raise InvalidClip(f"file: does not decode ({type(error).__name__}).") from error


def is_faststart(path: Path) -> bool:
    """Whether an MP4's index (`moov`) stands before its data (`mdat`), so that it plays while it is fetched."""
    with path.open("rb") as file:
        while len(header := file.read(8)) == 8:
            size, kind = int.from_bytes(header[:4], "big"), header[4:]
            if kind in (b"moov", b"mdat"):
                return kind == b"moov"
            if size == 1:
                size = int.from_bytes(file.read(8), "big") - 8
            if size < 8:
                return False
            file.seek(size - 8, 1)
    return False


def check_file(path: Path, *, width: int, height: int, num_frames: int, fps: Fraction) -> ClipFacts:
    """Probe a written clip and hold it to what was asked for.

    Raises:
        InvalidOutput: the file differs; the message names every field, what it must be and what it is.
    """
    try:
        facts = probe(path)
    except InvalidClip as error:
        raise InvalidOutput(f"The written file cannot be read back: {error}") from error
    expected = {
        "codec": "h264",
        "pix_fmt": "yuv420p",
        "width": width,
        "height": height,
        "num_frames": num_frames,
        "fps": fps,
        "color_range": "limited",
        "color_primaries": "bt709",
        "color_trc": "bt709",
        "colorspace": "bt709",
        "is_faststart": True,
    }
    wrong = [
        f"{name} must be {value}, got {getattr(facts, name)}"
        for name, value in expected.items()
        if getattr(facts, name) != value
    ]
    # the duration is written in ticks of the container
    if abs(facts.duration_s - num_frames / fps) > 0.001:
        wrong.append(f"duration_s must be {float(num_frames / fps):g}, got {facts.duration_s:g}")
    if wrong:
        raise InvalidOutput(f"The written file is not as asked: {'; '.join(wrong)}.")
    return facts


def main(argv: Sequence[str]) -> int:
    """Print the facts of video files as JSON, one object a line."""
    parser = argparse.ArgumentParser(prog="media-server video probe", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    status = 0
    for path in arguments.files:
        try:
            print(json.dumps({"file": path.name, **probe(path).to_json()}))
        except (InvalidClip, OSError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 1
    return status


def _name(names: type[ColorRange | ColorPrimaries | ColorTrc | Colorspace], value: int) -> str:
    """Name a colour property as the standards do."""
    if names is ColorRange:
        return {ColorRange.MPEG: "limited", ColorRange.JPEG: "full"}.get(ColorRange(value), "unspecified")
    try:
        name = names(value).name.lower()
    except ValueError:
        # H.273: 2 is "unspecified" in every table
        return "unspecified" if value == 2 else str(value)
    return "bt709" if name in ("bt709", "itu709") else name
