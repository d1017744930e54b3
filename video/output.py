"""The files of a finished clip: video, thumbnail, spritesheet with its index, last frame, images if asked for."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from video import encode, sheets
from video.errors import InvalidOutput
from video.probe import ClipFacts, check_file
from video.request import ClipRequest

_FILES = {
    "video": "video.mp4",
    "thumbnail": "thumbnail.jpg",
    "spritesheet": "spritesheet.jpg",
    "spritesheet_vtt": "spritesheet.vtt",
    "last_frame": "last_frame.png",
}
_CONTENT_TYPES = {
    ".mp4": "video/mp4",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".vtt": "text/vtt",
    ".zip": "application/zip",
    ".json": "application/json",
}
_REPORT_EVERY = 16


@dataclass(frozen=True)
class ClipFile:
    """A file of the finished clip."""

    name: str
    path: Path
    content_type: str


@dataclass(frozen=True)
class WrittenClip:
    """What was written: `frames_sha256` is over the raw RGB frames before H.264."""

    files: list[ClipFile]
    facts: ClipFacts
    frames_sha256: str
    spritesheet: dict[str, int]


def clip_file(name: str, path: Path) -> ClipFile:
    """Name a file by its role; its content type follows from its suffix."""
    return ClipFile(name, path, _CONTENT_TYPES[path.suffix])


def write_clip(
    out_dir: Path,
    sources: Sequence[Path],
    request: ClipRequest,
    num_frames: int,
    threads: int,
    report: Callable[[str, int, int], None],
) -> WrittenClip:
    """Write the frames of several files, one after the other, as one clip with its pictures.

    Raises:
        InvalidOutput: the files do not hold `num_frames`, or what was written is not as asked.
    """
    paths = {name: out_dir / file for name, file in _FILES.items()}
    indices = sheets.tile_indices(num_frames)
    wanted, picked, digest = set(indices), list[Tensor](), hashlib.sha256()
    last: list[Tensor] = []

    def frames() -> Iterator[Tensor]:
        for position, frame in enumerate(_read_all(sources, threads)):
            if position % _REPORT_EVERY == 0:
                report("encode_video", position, num_frames)
            if position in wanted:
                picked.append(frame[0])
            digest.update(frame.contiguous().numpy().tobytes())
            last[:] = [frame[0]]
            yield frame

    written = encode.encode_h264(
        paths["video"],
        frames(),
        width=request.width,
        height=request.height,
        fps=request.fps,
        crf=encode.DEFAULT_CRF if request.output.get("crf") is None else int(request.output["crf"]),
        threads=threads,
    )
    if written != num_frames:
        raise InvalidOutput(f"The clip has {written} frames where {num_frames} were asked for.")
    facts = check_file(
        paths["video"], width=request.width, height=request.height, num_frames=num_frames, fps=request.fps
    )
    sheets.write_thumbnail(paths["thumbnail"], picked[len(picked) // 3])
    sheet = sheets.write_spritesheet(paths["spritesheet"], picked)
    vtt = sheets.format_webvtt(indices, num_frames, request.fps, sheet, paths["spritesheet"].name)
    paths["spritesheet_vtt"].write_text(vtt)
    sheets.write_last_frame(paths["last_frame"], last[0])
    if request.output.get("image_sequence") is not None:
        paths["frames"] = out_dir / "frames.zip"
        encode.write_image_sequence(paths["frames"], _read_all(sources, threads))
    report("encode_video", num_frames, num_frames)
    files = [clip_file(name, path) for name, path in paths.items()]
    return WrittenClip(files, facts, digest.hexdigest(), sheet)


def _read_all(sources: Sequence[Path], threads: int) -> Iterator[Tensor]:
    for source in sources:
        yield from encode.read_frames(source, threads)
