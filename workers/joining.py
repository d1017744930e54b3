"""Join clips into one film with exactly the frames that were asked for (PyAV; ISO 14496-12, H.264 in MP4).

Clips of one encoder configuration are joined by copying packets: nothing is lost and each clip's first frame is a
keyframe at its cut. Clips that differ, or that carry more frames than their share, are decoded, cut and encoded again.
Either way the result is probed before anybody may have it: `inspect_film` decodes every frame.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
from av.video.reformatter import Colorspace
from PIL import Image

# ITU-T H.273: 1 is BT.709 for primaries, transfer and matrix; 1 is the limited ("tv") range
_BT709 = 1
_LIMITED = 1
_CRF = "16"
_FASTSTART = {"movflags": "+faststart"}

Report = Callable[[int], None]


class JoinError(Exception):
    """The clips cannot become the film that was asked for, or the file written is not that film."""


@dataclass(frozen=True)
class ClipFile:
    """A clip on disk and the frames of it that the film shows, from its first."""

    path: Path
    num_frames: int


@dataclass(frozen=True)
class _Probe:
    codec: str
    pix_fmt: str
    size: tuple[int, int]
    rate: Fraction
    time_base: Fraction
    extradata: bytes
    num_frames: int
    # how far the decode times run ahead of the first frame's time: the encoder's reordering, in ticks
    lead: int


def join_clips(clips: Sequence[ClipFile], out: Path, *, fps: float, report: Report) -> bool:
    """Write the film; `report` hears the number of frames written and may raise to stop.

    Returns True if the clips were copied, False if they had to be encoded again.
    Raises JoinError if a clip is of another size or rate, or shorter than its share.
    """
    rate = Fraction(fps).limit_denominator(1001)
    probes = [_probe(clip) for clip in clips]
    for number, (clip, probe) in enumerate(zip(clips, probes, strict=True), start=1):
        if probe.size != probes[0].size:
            raise JoinError(f"clip {number} is {probe.size[0]}x{probe.size[1]}, the first is of another size")
        if probe.rate != rate:
            raise JoinError(f"clip {number} has {probe.rate} frames a second, the film {rate}")
        if probe.num_frames < clip.num_frames:
            raise JoinError(f"clip {number} has {probe.num_frames} frames, its share is {clip.num_frames}")
    can_copy = _can_copy(clips, probes)
    with av.open(str(out), "w", format="mp4", options=_FASTSTART) as film:
        if can_copy:
            _copy_packets(clips, probes, film, report)
        else:
            _encode_again(clips, film, rate, probes[0].size, report)
    return can_copy


def inspect_film(
    path: Path, shot_frames: Sequence[int], *, fps: float, wanted: Collection[int], report: Report
) -> dict[int, Image.Image]:
    """Decode the whole film and check it; returns the `wanted` frames as RGB pictures.

    Raises JoinError if codec, colour, rate, number or spacing of the frames is off, a cut is not a keyframe, or the
    index does not stand before the frames.
    """
    rate = Fraction(fps).limit_denominator(1001)
    total_frames = sum(shot_frames)
    cuts = {sum(shot_frames[:index]) for index in range(len(shot_frames))}
    pictures: dict[int, Image.Image] = {}
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        context = stream.codec_context
        _expect("codec", context.name, "h264")
        _expect("pixel format", context.pix_fmt, "yuv420p")
        _expect("colour", (context.color_primaries, context.color_trc, context.colorspace), (_BT709, _BT709, _BT709))
        _expect("frame rate", stream.average_rate, rate)
        _expect("indexed frames", stream.frames, total_frames)
        count = 0
        for frame in film.decode(stream):
            assert frame.pts is not None and stream.time_base is not None
            _expect(
                f"time of frame {count}", frame.pts * stream.time_base * Fraction(fps).limit_denominator(1001), count
            )
            if count in cuts and not frame.key_frame:
                raise JoinError(f"the cut at frame {count} is not a keyframe")
            if count in wanted:
                pictures[count] = Image.fromarray(frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709))
            count += 1
            report(count)
    _expect("frames", count, total_frames)
    if not _has_index_first(path):
        raise JoinError("the film's index does not stand before its frames")
    return pictures


def _probe(clip: ClipFile) -> _Probe:
    with av.open(str(clip.path)) as file:
        if not file.streams.video:
            raise JoinError("a clip carries no video")
        stream = file.streams.video[0]
        context = stream.codec_context
        if stream.average_rate is None or stream.time_base is None:
            raise JoinError("a clip carries no frame rate")
        first = next(packet for packet in file.demux(stream))
        return _Probe(
            codec=context.name,
            pix_fmt=context.pix_fmt or "",
            size=(context.width, context.height),
            rate=stream.average_rate,
            time_base=stream.time_base,
            extradata=bytes(context.extradata or b""),
            num_frames=stream.frames,
            lead=-(first.dts or 0),
        )


def _can_copy(clips: Sequence[ClipFile], probes: Sequence[_Probe]) -> bool:
    first = probes[0]
    return all(
        probe.num_frames == clip.num_frames
        and (probe.codec, probe.pix_fmt, probe.time_base) == ("h264", "yuv420p", first.time_base)
        and probe.extradata == first.extradata
        for clip, probe in zip(clips, probes, strict=True)
    )


def _copy_packets(
    clips: Sequence[ClipFile], probes: Sequence[_Probe], film: av.container.OutputContainer, report: Report
) -> None:
    out: av.VideoStream | None = None
    frames_written = 0
    # a very short clip is not reordered; decode times must rise across the cut all the same
    lead = max(probe.lead for probe in probes)
    for clip, probe in zip(clips, probes, strict=True):
        with av.open(str(clip.path)) as file:
            stream = file.streams.video[0]
            out = out or film.add_stream_from_template(stream)
            offset = int(frames_written / probe.rate / probe.time_base)
            for packet in file.demux(stream):
                if packet.dts is None or packet.pts is None:
                    # the demuxer's closing packet carries nothing
                    continue
                packet.pts += offset
                packet.dts += offset - (lead - probe.lead)
                packet.stream = out
                film.mux(packet)
        frames_written += clip.num_frames
        report(frames_written)


def _encode_again(
    clips: Sequence[ClipFile],
    film: av.container.OutputContainer,
    rate: Fraction,
    size: tuple[int, int],
    report: Report,
) -> None:
    out = film.add_stream("libx264", rate=rate, options={"crf": _CRF, "preset": "medium"})
    out.width, out.height = size
    out.pix_fmt = "yuv420p"
    context = out.codec_context
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED
    frames_written = 0
    for clip in clips:
        with av.open(str(clip.path)) as file:
            taken = 0
            for frame in file.decode(file.streams.video[0]):
                if taken == clip.num_frames:
                    break
                picture = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
                picture.pts = frames_written
                picture.time_base = 1 / rate
                # the encoder begins a picture group at each cut
                is_cut = taken == 0
                picture.pict_type = av.video.frame.PictureType.I if is_cut else av.video.frame.PictureType.NONE
                film.mux(out.encode(picture))
                taken += 1
                frames_written += 1
                report(frames_written)
            if taken < clip.num_frames:
                raise JoinError(f"a clip gave {taken} frames, its share is {clip.num_frames}")
    film.mux(out.encode(None))


def _has_index_first(path: Path) -> bool:
    """Walk the file's top-level boxes: `moov` before `mdat`, so that playing starts before all is loaded."""
    with path.open("rb") as file:
        while len(head := file.read(8)) == 8:
            size, kind = int.from_bytes(head[:4], "big"), head[4:]
            if kind in (b"moov", b"mdat"):
                return kind == b"moov"
            if size == 1:
                size = int.from_bytes(file.read(8), "big") - 8
            file.seek(size - 8, 1)
    return False


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise JoinError(f"the film's {what} must be {expected}, got {got}")
