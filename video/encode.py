"""Write frames as files: H.264 for everybody, FFV1 for our own segments, PNG for those who ask.

Sources: ITU-T H.264 Annex E (colour tags), BT.709-6, ISO/IEC 14496-12 (`moov` before `mdat`: faststart), RFC 9043.
Invariants: exactly the frames that come, at exactly the rate that is said; yuv420p in BT.709 limited range, tagged so;
even sides; FFV1 and PNG give back every bit.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import imageio.v3
import torch
from av.codec.context import ThreadType
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from torch import Tensor

from video.errors import InvalidClip

DEFAULT_CRF = 18
CONTAINERS, CODECS, IMAGE_SEQUENCES = ("mp4",), ("h264",), ("png",)
# swscale's default rounding darkens by one level at each pass, which a chain of extensions would add up
_UNBIASED = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
# BT.709-6, items 3.2 and 3.3: luma, and colour differences from -0.5 to 0.5
_TO_YUV = (
    (0.2126, 0.7152, 0.0722),
    (-0.2126 / 1.8556, -0.7152 / 1.8556, 0.9278 / 1.8556),
    (0.7874 / 1.5748, -0.7152 / 1.5748, -0.0722 / 1.5748),
)
_BT709_PRIMARIES, _BT709_TRC, _BT709_SPACE = ColorPrimaries.BT709, ColorTrc.BT709, Colorspace.ITU709


def encode_h264(
    path: Path,
    chunks: Iterable[Tensor],
    *,
    width: int,
    height: int,
    fps: Fraction,
    crf: int = DEFAULT_CRF,
    threads: int = 1,
) -> int:
    """Encode frames as an MP4 that browsers and QuickTime play.

    Args:
        path: file to write.
        chunks: tensors `[n, H, W, 3]` uint8, full-range RGB.
        width: in pixels, even.
        height: in pixels, even.
        fps: frames a second.
        crf: 0 (lossless) to 51.
        threads: of the encoder.

    Returns:
        Number of frames written.

    Raises:
        InvalidClip: a side is odd; yuv420p has one colour sample for two pixels.
    """
    if width % 2 or height % 2:
        raise InvalidClip(f"size: H.264 in yuv420p needs even sides, got {width}x{height}.")
    num_frames = 0
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart", "fflags": "+bitexact"}) as file:
        stream = file.add_stream("libx264", rate=fps)
        context = stream.codec_context
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.time_base = 1 / fps
        context.thread_count = threads
        # 2026-11, x264 of PyAV 18 on AVX-512, 64x64: with its macroblock tree five files of the same frames were three
        # different ones, without it (or held to AVX2) one; the same clip must be the same file
        context.options = {"crf": str(crf), "preset": "medium", "x264-params": "no-mbtree=1"}
        context.color_range = ColorRange.MPEG
        context.color_primaries, context.color_trc, context.colorspace = _BT709_PRIMARIES, _BT709_TRC, _BT709_SPACE
        for chunk in chunks:
            for frame in chunk:
                picture = to_bt709(frame)
                picture.pts, picture.time_base = num_frames, 1 / fps
                file.mux(stream.encode(picture))
                num_frames += 1
        file.mux(stream.encode(None))
    return num_frames


def to_bt709(frame: Tensor) -> VideoFrame:
    """Convert one frame `[H, W, 3]` uint8 of full-range RGB to yuv420p, BT.709, limited range, tagged.

    Chroma is sited at the left of its two pixels, as H.264 says where nothing else is signalled; swscale would site it
    between them, which moves colours by half a pixel each time a clip is continued from its file.
    """
    planes = frame.float() / 255.0 @ frame.new_tensor(_TO_YUV, dtype=torch.float32).T
    luma = 16 + 219 * planes[..., 0]
    rows = (planes[0::2, :, 1:] + planes[1::2, :, 1:]) / 2
    before = torch.cat([rows[:, :1], rows[:, 1:-1:2]], dim=1)
    chroma = 128 + 224 * (before + 2 * rows[:, 0::2] + rows[:, 1::2]) / 4
    height, width = luma.shape
    stacked = torch.cat([luma.flatten(), chroma[..., 0].flatten(), chroma[..., 1].flatten()])
    picture = VideoFrame.from_ndarray(
        stacked.round().to(torch.uint8).view(height * 3 // 2, width).numpy(), format="yuv420p"
    )
    picture.color_range, picture.colorspace = ColorRange.MPEG, _BT709_SPACE
    picture.color_primaries, picture.color_trc = _BT709_PRIMARIES, _BT709_TRC
    return picture


def encode_lossless(path: Path, chunks: Iterable[Tensor], *, width: int, height: int, threads: int = 1) -> int:
    """Write frames `[n, H, W, 3]` uint8 as FFV1, to be read back bit for bit by `read_frames`; returns how many."""
    num_frames = 0
    # without bitexact, Matroska gives each file a random identifier
    with av.open(str(path), "w", format="matroska", options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream("ffv1", rate=25)
        context = stream.codec_context
        context.width, context.height, context.pix_fmt = width, height, "bgr0"
        context.thread_count = threads
        # version 3 with a checksum in each slice: a damaged segment is not continued from
        context.options = {"level": "3", "slices": "4", "slicecrc": "1"}
        for chunk in chunks:
            for frame in chunk:
                picture = VideoFrame.from_ndarray(frame.contiguous().numpy(), format="rgb24")
                file.mux(stream.encode(picture.reformat(format="bgr0")))
                num_frames += 1
        file.mux(stream.encode(None))
    return num_frames


def read_frames(path: Path, threads: int = 1) -> Iterator[Tensor]:
    """Decode a file frame by frame, as `[1, H, W, 3]` uint8 RGB.

    Raises:
        InvalidClip: the file is no video that decodes.
    """
    try:
        with av.open(str(path), "r") as file:
            if not file.streams.video:
                raise InvalidClip("video: the file has no video stream.")
            stream = file.streams.video[0]
            stream.codec_context.thread_count = threads
            stream.codec_context.thread_type = ThreadType.SLICE
            for frame in file.decode(stream):
                picture = frame.reformat(format="rgb24", dst_color_range=ColorRange.JPEG, interpolation=_UNBIASED)
                yield torch.from_numpy(picture.to_ndarray())[None]
    except av.error.FFmpegError as error:
        raise InvalidClip(f"video: the file does not decode ({type(error).__name__}).") from error


def write_image_sequence(path: Path, chunks: Iterable[Tensor]) -> int:
    """Write frames `[n, H, W, 3]` uint8 as `000001.png` and so on into one ZIP file; returns how many."""
    num_frames = 0
    # PNG is compressed already
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_STORED) as archive:
        for chunk in chunks:
            for frame in chunk:
                num_frames += 1
                content = io.BytesIO()
                imageio.v3.imwrite(content, frame.numpy(), extension=".png")
                # a fixed date: the same frames make the same file
                archive.writestr(zipfile.ZipInfo(f"{num_frames:06d}.png"), content.getvalue())
    return num_frames


def check_output(output: dict[str, object]) -> None:
    """Refuse an output that this release does not write.

    Raises:
        InvalidClip: container, codec, image sequence or crf is not one that is offered.
    """
    for name, offered in (("container", CONTAINERS), ("codec", CODECS), ("image_sequence", IMAGE_SEQUENCES)):
        value = output.get(name)
        if value is not None and value not in offered:
            raise InvalidClip(f"output.{name}: must be one of {', '.join(offered)}, got {value!r}.")
    crf = output.get("crf")
    if crf is not None and not (isinstance(crf, int) and 0 <= crf <= 51):
        raise InvalidClip(f"output.crf: must be from 0 to 51, got {crf!r}.")
