"""Images and clips that a request brings: what is taken, what is refused, and what is done to them and said."""

import asyncio
import base64
import io
import random
import struct
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from media_server.artifacts import inputs, probe
from media_server.artifacts.inputs import PreparedImage, prepare_image, read_image_url
from media_server.artifacts.probe import probe_clip
from media_server.errors import InvalidRequest, MediaServerError, TooLarge, UnsupportedMedia


def _bytes(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


def _prepare(content: bytes, width: int = 160, height: int = 96) -> tuple[PreparedImage, Image.Image]:
    prepared = prepare_image(content, param="input_reference", width=width, height=height)
    return prepared, Image.open(io.BytesIO(prepared.png))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_the_formats_that_are_taken(format: str) -> None:
    prepared, image = _prepare(_bytes(Image.new("RGB", (160, 96), (0, 128, 0)), format))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (160, 96))
    assert np.allclose(np.asarray(image)[50, 50], (0, 128, 0), atol=3)
    assert prepared.adjustments == ()


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused_by_their_bytes(format: str) -> None:
    with pytest.raises(UnsupportedMedia, match="PNG, JPEG or WebP"):
        _prepare(_bytes(Image.new("RGB", (64, 64)), format))


def test_cover_keeps_the_centre_and_says_so() -> None:
    # left third red, middle green, right blue
    wide = Image.new("RGB", (300, 60))
    for index, color in enumerate(("red", "lime", "blue")):
        wide.paste(color, (index * 100, 0, index * 100 + 100, 60))
    prepared, image = _prepare(_bytes(wide), 96, 96)
    # a square of the middle 60 pixels
    assert np.array_equal(np.unique(np.asarray(image).reshape(-1, 3), axis=0), [[0, 255, 0]])
    assert prepared.adjustments == ("cover crop: the central 60x60 of 300x60 kept", "scaled by 1.6 to 96x96")
    assert (prepared.source_width, prepared.source_height) == (300, 60)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (96, 160), "blue")
    image.paste("red", (0, 0, 96, 80))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: what is on top comes to the right
    prepared, upright = _prepare(_bytes(image, exif=exif))
    assert upright.getpixel((10, 48)) == (0, 0, 255)
    assert upright.getpixel((150, 48)) == (255, 0, 0)
    assert prepared.adjustments == ("turned upright as its EXIF orientation says",)


def test_sixteen_bits_are_scaled_and_transparency_is_laid_on_white() -> None:
    grey = Image.fromarray(np.full((96, 160), 32896, np.uint16))
    assert _prepare(_bytes(grey))[1].getpixel((0, 0)) == (128, 128, 128)
    clear = Image.new("RGBA", (160, 96), (255, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (0, 0, 80, 96))
    prepared, image = _prepare(_bytes(clear))
    assert (image.getpixel((10, 10)), image.getpixel((150, 10))) == ((255, 0, 0), (255, 255, 255))
    assert prepared.adjustments == ("transparency laid on white",)


def test_palette_images_come_out_right() -> None:
    image = Image.new("RGB", (160, 96), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert _prepare(_bytes(image))[1].getpixel((5, 5)) == (10, 200, 30)


def test_pixels_are_capped_before_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("decoded")

    picture = _bytes(Image.new("1", (300, 300)))
    with monkeypatch.context() as patched:
        patched.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
        patched.setattr(inputs, "MAX_IMAGE_PIXELS", 89_999)
        with pytest.raises(InvalidRequest, match="at most 89999 pixels, got 90000"):
            _prepare(picture)
    # Pillow's own limit is a warning, and at its double an error: both are refusals
    for limit in (89_999, 30_000):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(InvalidRequest, match="pixels"):
            _prepare(picture)


def _animated() -> bytes:
    frames = [Image.new("L", (32, 32), level) for level in (0, 200)]
    return _bytes(frames[0], "WEBP", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_bytes(Image.effect_noise((200, 200), 50))[:500], "broken"),
        (_bytes(Image.new("RGB", (300, 4))), "at least 8 pixels"),
        (_animated(), "animated"),
    ],
)
def test_broken_small_and_animated(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        _prepare(content)
    assert caught.value.param == "input_reference" and caught.value.rule


def test_data_uris() -> None:
    png = _bytes(Image.new("RGB", (16, 16)))

    def read(uri: str) -> bytes:
        return asyncio.run(read_image_url(uri, param="last_frame", allow_private=False))

    text = base64.b64encode(png).decode()
    assert read(f"data:image/png;base64,{text}") == png
    assert read(f"data:image/png;charset=utf-8;base64,{text}") == png
    for rest in ("image/png,abc", "image/png;base64,a b", ";base64,abc", "", f"image/png;{text}"):
        bad = f"data:{rest}"
        with pytest.raises(InvalidRequest) as caught:
            read(bad)
        assert (caught.value.param, caught.value.code) == ("last_frame", "invalid_url")
    with pytest.raises(TooLarge):
        read("data:image/png;base64," + "A" * (inputs.MAX_IMAGE_BYTES * 4 // 3 + 100))


def _write(path: Path, codec: str, frames: int = 10, size: tuple[int, int] = (64, 48), fps: int = 10) -> Path:
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=fps)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for index in range(frames):
            pixels = np.full((size[1], size[0], 3), index * 20 % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.mov", "mpeg4"), ("a.webm", "libvpx"), ("a.avi", "mpeg4")]
)
def test_clips_are_measured(tmp_path: Path, name: str, codec: str) -> None:
    info = probe_clip(_write(tmp_path / name, codec), param="video")
    assert (info.width, info.height, info.fps, info.num_frames, info.seconds) == (64, 48, 10.0, 10, 1.0)
    assert info.suffix == {"a.mp4": ".mp4", "a.mov": ".mp4", "a.webm": ".mkv", "a.avi": ".avi"}[name]


def test_the_probe_takes_no_module_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = _write(tmp_path / "a.mp4", "libx264")
    for name in ("av", "json", "media_server"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(tmp_path)
    assert probe_clip(clip, param="video").num_frames == 10


def test_what_is_no_clip_is_refused_without_its_path(tmp_path: Path) -> None:
    clip = _write(tmp_path / "a.mp4", "libx264")
    playlist = tmp_path / "a.m3u8"
    playlist.write_text(f"#EXTM3U\n#EXTINF:1,\n{clip}\n#EXT-X-ENDLIST\n")
    concat = tmp_path / "concat.mp4"
    concat.write_text(f"ffconcat version 1.0\nfile {clip}\n")
    image = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(image)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[:200])
    sound = tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as file:
        stream = file.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    for path in (playlist, concat, image, cut, sound, tmp_path / "missing.mp4"):
        with pytest.raises(UnsupportedMedia) as caught:
            probe_clip(path, param="video")
        assert caught.value.param == "video"
        assert str(tmp_path) not in str(caught.value.to_body())


def test_clips_past_a_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = _write(tmp_path / "a.mp4", "libx264")
    for name, limit, reason in (
        ("MAX_CLIP_SECONDS", 0.5, "seconds"),
        ("MAX_CLIP_FRAMES", 9, "frames"),
        ("MAX_CLIP_PIXELS", 1000, "pixels"),
        ("MAX_CLIP_FPS", 5, "frames a second"),
    ):
        with monkeypatch.context() as limits, pytest.raises(MediaServerError, match=reason):
            limits.setattr(probe, name, limit)
            probe_clip(clip, param="video")


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = _write(tmp_path / "a.mp4", "libx264")
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.01)
    with pytest.raises(UnsupportedMedia, match="in time"):
        probe_clip(clip, param="video")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_broken_exif_block_is_ignored() -> None:
    png = _bytes(Image.new("RGB", (160, 96), "blue"))
    # behind the signature (8) and IHDR (25)
    for block in (b"", b"junk", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x0a\xff\xff\xff\xff"):
        prepared, image = _prepare(png[:33] + _chunk(b"eXIf", block) + png[33:])
        assert (image.getpixel((5, 5)), prepared.adjustments) == ((0, 0, 255), ())


def test_an_orientation_beside_a_malformed_rational_is_applied() -> None:
    # one directory: orientation 6, and an x resolution whose rational would lie behind the end
    block = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">HHHIHHHHIII", 2, 0x0112, 3, 1, 6, 0, 0x011A, 5, 1, 0xFFFFFF, 0)
    image = Image.new("RGB", (96, 160), "blue")
    image.paste("red", (0, 0, 96, 80))
    prepared, upright = _prepare(_bytes(image, "JPEG", exif=block, quality=95))
    assert prepared.adjustments == ("turned upright as its EXIF orientation says",)
    assert np.allclose(np.asarray(upright)[48, 150], (255, 0, 0), atol=6)
    assert "exif" not in upright.info


@pytest.mark.parametrize("orientation", range(10))
def test_each_orientation_is_turned_as_pillow_does(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8))
    content = _bytes(image, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(np.asarray(_prepare(content, 96, 96)[1]), np.asarray(expected))


@pytest.mark.parametrize(("format", "mode"), [("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("WEBP", "RGBA")])
def test_mutated_images_are_prepared_or_refused(format: str, mode: str) -> None:
    rng = random.Random(f"{format} {mode}")
    exif = Image.Exif()
    exif[0x0112], exif[0x011A], exif[0x010E] = 6, 72.0, "a ball"
    exif.get_ifd(0x8769)[0x829A] = 0.5
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    content = _bytes(Image.effect_noise((24, 40), 60).convert(mode), format, exif=exif, **options)
    for _ in range(400):
        mutated = bytearray(content)
        # most of them in the header, where the structure is
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(min(len(mutated), rng.choice((300, len(mutated)))))] = rng.randrange(256)
        if format == "PNG" and rng.random() < 0.8:
            mutated = _with_sums(mutated)
        if rng.random() < 0.1:
            del mutated[rng.randrange(len(mutated)) :]
        try:
            image = _prepare(bytes(mutated), 32, 16)[1]
        except (InvalidRequest, UnsupportedMedia):
            continue
        assert (image.mode, image.size) == ("RGB", (32, 16))


def _with_sums(png: bytearray) -> bytearray:
    """Give each chunk its checksum, as long as there are whole ones: what is read must be the content's mutation."""
    place = 8
    while place + 12 <= len(png):
        end = place + 8 + int.from_bytes(png[place : place + 4], "big")
        if end + 4 > len(png):
            break
        png[end : end + 4] = struct.pack(">I", zlib.crc32(png[place + 4 : end]))
        place = end + 4
    return png
