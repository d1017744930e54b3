"""Look at an uploaded clip in a process of its own, with limits: a hostile file harms nobody but that process.

The parent's side is `probe_clip`; `python -m media_server.artifacts.probe FILE` is the child's. The child reads a plain
file only (no playlists, no network), of four containers, and decodes one frame to see that it can be decoded.
"""

import contextlib
import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from media_server.errors import InvalidRequest, UnsupportedMedia

# container names as ffmpeg has them, with the bytes that such a file begins with
_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2": "MP4 or MOV", "matroska,webm": "Matroska or WebM", "avi": "AVI"}
_SUFFIXES = dict(zip(_CONTAINERS, (".mp4", ".mkv", ".avi"), strict=True))
_TIMEOUT_S = 20.0
_CPU_S = 15
_MEMORY_BYTES = 4 << 30

MAX_CLIP_SECONDS = 600.0
MAX_CLIP_FRAMES = 20_000
MAX_CLIP_PIXELS = 4096 * 2304
MAX_CLIP_FPS = 240


@dataclass(frozen=True)
class ClipInfo:
    """What an uploaded clip is."""

    container: str
    codec: str
    width: int
    height: int
    fps: float
    num_frames: int
    seconds: float

    @property
    def suffix(self) -> str:
        """The suffix that a file of this container has."""
        return _SUFFIXES[self.container]


def probe_clip(path: Path, *, param: str) -> ClipInfo:
    """Probe a clip; blocking, a fraction of a second.

    Raises UnsupportedMedia if it is no video of a container that is taken, InvalidRequest if it passes a limit.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "media_server.artifacts.probe", str(path)],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(child.stdout) if child.returncode == 0 else {"error": "it could not be read"}
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        answer = {"error": "it could not be read in time"}
    if "error" in answer:
        rule = f"a video file in {', '.join(_CONTAINERS.values())}"
        raise UnsupportedMedia(f"{param}: must be {rule}; {answer['error']}.", param=param, rule=rule)
    info = ClipInfo(**answer)
    for value, limit, unit in (
        (info.seconds, MAX_CLIP_SECONDS, "seconds"),
        (info.num_frames, MAX_CLIP_FRAMES, "frames"),
        (info.width * info.height, MAX_CLIP_PIXELS, "pixels a frame"),
        (info.fps, MAX_CLIP_FPS, "frames a second"),
    ):
        if value > limit:
            raise InvalidRequest(
                f"{param}: at most {limit:g} {unit}, got {value:g}.",
                param=param,
                rule=f"at most {limit:g} {unit}",
                value=value,
            )
    return info


def _probe(path: str) -> ClipInfo:
    import av

    options = {"protocol_whitelist": "file", "format_whitelist": ",".join(_CONTAINERS)}
    with av.open(path, "r", options=options) as file:
        container = file.format.name
        if container not in _CONTAINERS:
            raise ValueError("its container is not one of these")
        if not file.streams.video:
            raise ValueError("it has no video stream")
        stream = file.streams.video[0]
        codec, rate = stream.codec_context.name, stream.average_rate or Fraction(0)
        width, height = stream.codec_context.width, stream.codec_context.height
        if not (width and height and rate):
            raise ValueError("it does not say its size and frame rate")
        if width * height <= MAX_CLIP_PIXELS and next(file.decode(stream), None) is None:
            raise ValueError("it has no frame that decodes")
    # headers lie or say nothing about the number of frames: count packets, up to one past the limit
    num_frames = 0
    with av.open(path, "r", options=options) as file:
        for packet in file.demux(file.streams.video[0]):
            num_frames += packet.size > 0
            if num_frames > MAX_CLIP_FRAMES:
                break
    return ClipInfo(
        container=container,
        codec=codec,
        width=width,
        height=height,
        fps=float(rate),
        num_frames=num_frames,
        seconds=float(num_frames / rate),
    )


def _child(path: str) -> int:
    for limit, value in (
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        # a system may not let the limit on memory be set; the others and the timeout still hold
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    try:
        answer = asdict(_probe(path))
    except Exception as error:
        # PyAV's own errors are ValueErrors too, and name the path
        answer = {"error": str(error) if type(error) is ValueError else "its content is broken or of another kind"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1]))
