"""Images and clips that a request brings: taken from an upload, a data URI or an https URL, checked, and made uniform.

Invariants: a format is recognised by its bytes, from an allow-list; the number of pixels is capped before one is
decoded; an image leaves as an upright RGB PNG of exactly the clip's size; what was changed on the way is reported;
nothing is stored here: the caller writes the result once the whole request stands.
"""

import asyncio
import base64
import binascii
import io
import re
import struct
import warnings
import zlib
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from media_server import http_fetch
from media_server.errors import InvalidRequest, TooLarge, UnsupportedMedia

MAX_IMAGE_BYTES = 32 << 20
MAX_IMAGE_PIXELS = 50_000_000
MIN_IMAGE_SIDE = 8
FETCH_TIMEOUT_S = 30.0

_FORMATS = ("PNG", "JPEG", "WEBP")
_FORMAT_RULE = "a still image in PNG, JPEG or WebP"
# what Pillow's readers raise on bytes that are not what their header says
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError,
    RuntimeError, struct.error, zlib.error,
)  # fmt: skip
# EXIF 2.32, 4.6.4 A: how to turn an image of each orientation upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DATA_URI = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*);base64,", re.ASCII)


@dataclass(frozen=True)
class PreparedImage:
    """An image fit for a clip: its PNG, and in words each thing that was done to it."""

    png: bytes
    width: int
    height: int
    source_width: int
    source_height: int
    adjustments: tuple[str, ...]


async def read_image_url(url: str, *, param: str, allow_private: bool) -> bytes:
    """Get the bytes behind an https URL or in a data URI.

    Raises InvalidRequest if the URL may not be fetched or the data URI is malformed, TooLarge past MAX_IMAGE_BYTES.
    """
    if url[:5].lower() == "data:":
        return await asyncio.to_thread(_read_data_uri, url, param)
    fetched = await http_fetch.fetch(
        url, param=param, max_bytes=MAX_IMAGE_BYTES, timeout_s=FETCH_TIMEOUT_S, allow_private=allow_private
    )
    return fetched.content


def prepare_image(content: bytes, *, param: str, width: int, height: int) -> PreparedImage:
    """Decode an image and make it `width` x `height` pixels: upright, opaque, covering the frame, centre kept.

    Blocking. Raises UnsupportedMedia for another format, InvalidRequest for one that is broken, animated, too large
    or too small.
    """
    if len(content) > MAX_IMAGE_BYTES:
        raise image_too_large(param, len(content))
    try:
        with warnings.catch_warnings():
            # threads share the filters, so that a concurrent call may leave this one in place: that is harmless
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _decode(content, param, width, height)
    except UnidentifiedImageError as error:
        raise UnsupportedMedia(f"{param}: must be {_FORMAT_RULE}.", param=param, rule=_FORMAT_RULE) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(param, None) from error
    except _BROKEN as error:
        raise InvalidRequest(
            f"{param}: the image is broken and cannot be decoded.", param=param, rule="an image that decodes"
        ) from error


def _decode(content: bytes, param: str, width: int, height: int) -> PreparedImage:
    image = Image.open(io.BytesIO(content), formats=_FORMATS)
    _check_header(image, param)
    image.load()
    done: list[str] = []
    turn = _TURNS.get(_orientation(image))
    upright = image if turn is None else image.transpose(turn)
    if upright.size != image.size:
        done.append("turned upright as its EXIF orientation says")
    flat = _to_rgb(upright, done)
    fitted = _cover(flat, width, height, done)
    png = io.BytesIO()
    fitted.save(png, "PNG")
    return PreparedImage(png.getvalue(), width, height, image.width, image.height, tuple(done))


def _check_header(image: Image.Image, param: str) -> None:
    pixels = image.width * image.height
    if pixels > MAX_IMAGE_PIXELS:
        raise _too_many_pixels(param, pixels)
    if min(image.size) < MIN_IMAGE_SIDE:
        rule = f"at least {MIN_IMAGE_SIDE} pixels on each side"
        size = f"{image.width}x{image.height}"
        raise InvalidRequest(f"{param}: {rule}, got {size}.", param=param, rule=rule, value=size)
    if getattr(image, "n_frames", 1) != 1:
        raise InvalidRequest(f"{param}: must be {_FORMAT_RULE}; this one is animated.", param=param, rule=_FORMAT_RULE)


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1 to 8; 1, as it stands, if the block is broken or says something else."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except _BROKEN:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _to_rgb(image: Image.Image, done: list[str]) -> Image.Image:
    if image.mode.startswith("I;16"):
        # convert() would clip 16 bits to 8 rather than scale them
        return image.point(lambda level: level * (1 / 257)).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    done.append("transparency laid on white")
    layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(ground, layer).convert("RGB")


def _cover(image: Image.Image, width: int, height: int, done: list[str]) -> Image.Image:
    """Scale and crop so that the whole frame is covered and the centre stays."""
    if image.size == (width, height):
        return image
    scale = max(width / image.width, height / image.height)
    kept_width, kept_height = round(width / scale), round(height / scale)
    if (kept_width, kept_height) != image.size:
        done.append(f"cover crop: the central {kept_width}x{kept_height} of {image.width}x{image.height} kept")
    done.append(f"scaled by {scale:.3g} to {width}x{height}")
    return ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS, centering=(0.5, 0.5))


def _read_data_uri(uri: str, param: str) -> bytes:
    match = _DATA_URI.match(uri[:256])
    if match is None:
        raise _bad_data_uri(param)
    # base64 is 4/3 of what it holds: refuse before decoding
    if (len(uri) - match.end()) * 3 // 4 > MAX_IMAGE_BYTES + 3:
        raise image_too_large(param, (len(uri) - match.end()) * 3 // 4)
    try:
        return base64.b64decode(uri[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad_data_uri(param) from error


def _bad_data_uri(param: str) -> InvalidRequest:
    rule = "a data URI of the form data:image/png;base64,…"
    return InvalidRequest(f"{param}: must be {rule}.", code="invalid_url", param=param, rule=rule)


def image_too_large(param: str, size_bytes: int) -> TooLarge:
    """Say that an image passes MAX_IMAGE_BYTES."""
    rule = f"an image has at most {MAX_IMAGE_BYTES} bytes"
    return TooLarge(f"{param}: {rule}, got {size_bytes}.", param=param, rule=rule, value=size_bytes)


def _too_many_pixels(param: str, pixels: int | None) -> InvalidRequest:
    rule = f"an image has at most {MAX_IMAGE_PIXELS} pixels"
    got = f", got {pixels}" if pixels else ""
    return InvalidRequest(f"{param}: {rule}{got}.", param=param, rule=rule, value=pixels)
