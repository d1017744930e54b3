"""Files: every frame, the exact rate, the right colours, playable; FFV1 and PNG bit for bit."""

import io
import json
import os
import zipfile
from fractions import Fraction
from pathlib import Path

import av
import imageio.v3
import numpy as np
import pytest
import torch
from torch import Tensor

from video import probe
from video.encode import check_output, encode_h264, encode_lossless, read_frames, write_image_sequence
from video.errors import InvalidClip, InvalidOutput
from video.probe import FrameGuard, check_file, is_faststart


def gradient(num_frames: int, height: int, width: int) -> Tensor:
    """Frames that move, smooth enough for 4:2:0."""
    x = torch.linspace(0, 1, width)[None, None, :].expand(num_frames, height, width)
    y = torch.linspace(0, 1, height)[None, :, None].expand(num_frames, height, width)
    t = torch.linspace(0, 1, num_frames)[:, None, None].expand(num_frames, height, width)
    return (torch.stack([x, y, (x + t) / 2], -1) * 255).round().to(torch.uint8)


@pytest.mark.parametrize(
    ("num_frames", "fps"), [(33, Fraction(16)), (1, Fraction(24)), (32, Fraction(30000, 1001)), (7, Fraction(25))]
)
def test_every_frame_at_the_exact_rate(tmp_path: Path, num_frames: int, fps: Fraction) -> None:
    path = tmp_path / "clip.mp4"
    frames = gradient(num_frames, 48, 64)
    assert encode_h264(path, [frames[:5], frames[5:]], width=64, height=48, fps=fps) == num_frames
    facts = check_file(path, width=64, height=48, num_frames=num_frames, fps=fps)
    assert facts.duration_s == pytest.approx(float(num_frames / fps), abs=1e-3)
    with av.open(str(path)) as file:
        times = [frame.time for frame in file.decode(video=0)]
    assert times == pytest.approx([index / float(fps) for index in range(num_frames)], abs=1e-4)


def test_colours_are_bt709_in_limited_range(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    for red, green, blue in ((218, 38, 38), (44, 158, 62), (36, 76, 214), (255, 255, 255), (0, 0, 0)):
        frames = torch.tensor([red, green, blue], dtype=torch.uint8).expand(3, 32, 32, 3)
        encode_h264(path, [frames], width=32, height=32, fps=Fraction(16), crf=8)
        with av.open(str(path)) as file:
            planes = next(file.decode(video=0)).to_ndarray()
        # BT.709-6, items 3.2 to 3.4, quantised for 8 bits
        r, g, b = red / 255, green / 255, blue / 255
        luma = 0.2126 * r + 0.7152 * g + 0.0722 * b
        expected = 16 + 219 * luma, 128 + 224 * (b - luma) / 1.8556, 128 + 224 * (r - luma) / 1.5748
        measured = planes[:32].mean(), planes[32:40].mean(), planes[40:].mean()
        assert measured == pytest.approx(expected, abs=1.0)


def test_reading_a_clip_back_shifts_no_level(tmp_path: Path) -> None:
    """A bias of one level at each pass would darken a chain of extensions; crf 0 leaves the conversion alone."""
    path = tmp_path / "clip.mp4"
    frames = gradient(5, 96, 160)
    encode_h264(path, [frames], width=160, height=96, fps=Fraction(16), crf=0)
    read = torch.cat(list(read_frames(path)))
    difference = read.double() - frames.double()
    assert difference.mean((0, 1, 2)).abs().max() < 0.1
    assert difference.abs().mean() < 0.6


def test_lossless_gives_back_every_bit(tmp_path: Path) -> None:
    frames = torch.randint(0, 256, (9, 34, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "segment.mkv"
    assert encode_lossless(path, [frames[:1], frames[1:]], width=50, height=34) == 9
    assert torch.equal(torch.cat(list(read_frames(path))), frames)
    encode_lossless(tmp_path / "again.mkv", [frames], width=50, height=34)
    assert (tmp_path / "again.mkv").read_bytes() == path.read_bytes()


def test_image_sequence_is_one_png_a_frame(tmp_path: Path) -> None:
    frames = gradient(3, 16, 24)
    write_image_sequence(tmp_path / "frames.zip", [frames])
    with zipfile.ZipFile(tmp_path / "frames.zip") as archive:
        assert archive.namelist() == ["000001.png", "000002.png", "000003.png"]
        read = [imageio.v3.imread(io.BytesIO(archive.read(name))) for name in archive.namelist()]
    assert np.array_equal(np.stack(read), frames.numpy())


def test_odd_sides_and_unknown_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidClip, match="even sides, got 33x32"):
        encode_h264(tmp_path / "clip.mp4", [], width=33, height=32, fps=Fraction(16))
    check_output({"container": "mp4", "codec": "h264", "crf": 20, "image_sequence": None})
    for output, message in (
        ({"container": "webm"}, "output.container: must be one of mp4, got 'webm'"),
        ({"codec": "av1"}, "output.codec"),
        ({"crf": 52}, "output.crf: must be from 0 to 51, got 52"),
        ({"image_sequence": "exr"}, "output.image_sequence"),
    ):
        with pytest.raises(InvalidClip, match=message):
            check_output(dict(output))


def test_a_file_that_is_not_as_asked_is_named(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    encode_h264(path, [gradient(5, 32, 48)], width=48, height=32, fps=Fraction(16))
    with pytest.raises(InvalidOutput, match=r"width must be 64, got 48.*num_frames must be 6, got 5"):
        check_file(path, width=64, height=32, num_frames=6, fps=Fraction(16))
    (tmp_path / "broken.mp4").write_bytes(path.read_bytes()[:200])
    with pytest.raises(InvalidOutput, match="cannot be read back"):
        check_file(tmp_path / "broken.mp4", width=48, height=32, num_frames=5, fps=Fraction(16))


def test_faststart_is_read_from_the_order_of_boxes(tmp_path: Path) -> None:
    for order, expected in ((b"moov", True), (b"mdat", False)):
        path = tmp_path / "boxes.mp4"
        path.write_bytes(b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x08" + order)
        assert is_faststart(path) is expected
    slow = tmp_path / "slow.mp4"
    with av.open(str(slow), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=16)
        stream.codec_context.width = stream.codec_context.height = 32
        stream.codec_context.pix_fmt = "yuv420p"
        file.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(stream.encode(None))
    assert not is_faststart(slow)
    with pytest.raises(InvalidOutput, match="is_faststart must be True, got False"):
        check_file(slow, width=32, height=32, num_frames=1, fps=Fraction(16))


def test_black_and_flat_clips_are_no_output() -> None:
    for level, message in ((3, "black"), (90, "flat")):
        guard = FrameGuard()
        guard.add(torch.full((4, 8, 8, 3), level, dtype=torch.uint8))
        with pytest.raises(InvalidOutput, match=message):
            guard.check()
    # one clear frame is enough: a clip may fade
    guard.add(gradient(1, 8, 8))
    guard.check()


def test_probe_prints_facts_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "clip.mp4"
    encode_h264(path, [gradient(6, 32, 48)], width=48, height=32, fps=Fraction(24000, 1001))
    assert probe.main([str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_frames"], facts["fps"], facts["width"], facts["codec"]) == (6, "24000/1001", 48, "h264")
    assert probe.main([str(tmp_path / "none.mp4")]) == 1
    assert "none.mp4" in capsys.readouterr().err


def test_the_same_frames_are_the_same_file(tmp_path: Path) -> None:
    """Whatever lay in memory before: frames of the smallest size, that move, and junk of several sizes between."""
    coarse = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    frames = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear").permute(0, 2, 3, 1)
    chunk = torch.cumsum(frames, 0).remainder(1.0).mul(255).round().to(torch.uint8)
    files = set()
    for count in (0, 3, 50, 7, 400):
        junk = [os.urandom(4096) for _ in range(count)]
        path = tmp_path / f"{len(junk)}.mp4"
        encode_h264(path, [chunk.clone()], width=64, height=64, fps=Fraction(16))
        files.add(path.read_bytes())
    assert len(files) == 1
