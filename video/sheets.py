"""Small pictures of a clip: a thumbnail, a spritesheet with its WebVTT index, the last frame.

Source: WebVTT (W3C), with `#xywh=` media fragments, as video players read thumbnail tracks.
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

THUMBNAIL_SIDE = 512
TILE_WIDTH, MAX_COLUMNS, MAX_TILES = 160, 5, 25


def write_thumbnail(path: Path, frame: Tensor) -> None:
    """Write a frame `[H, W, 3]` uint8 as a JPEG whose longer side is at most 512 pixels."""
    picture = Image.fromarray(frame.numpy())
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    picture.save(path, "JPEG", quality=88)


def write_last_frame(path: Path, frame: Tensor) -> None:
    """Write a frame `[H, W, 3]` uint8 as a PNG of its own size, bit for bit."""
    Image.fromarray(frame.numpy()).save(path, "PNG")


def tile_indices(num_frames: int) -> list[int]:
    """Choose the frames of a spritesheet: at most 25, evenly spread, the first one always."""
    tiles = min(num_frames, MAX_TILES)
    return [index * num_frames // tiles for index in range(tiles)]


def write_spritesheet(path: Path, frames: Sequence[Tensor]) -> dict[str, int]:
    """Write frames, each `[H, W, 3]` uint8, as one JPEG of equal tiles.

    Returns:
        Columns, rows, tiles, tile_width and tile_height in pixels.
    """
    height, width, _ = frames[0].shape
    tile_width = min(width, TILE_WIDTH)
    tile_height = max(1, round(height * tile_width / width))
    columns = min(MAX_COLUMNS, len(frames))
    rows = -(-len(frames) // columns)
    sheet = torch.zeros(rows * tile_height, columns * tile_width, 3, dtype=torch.uint8)
    picture = Image.fromarray(sheet.numpy())
    for index, frame in enumerate(frames):
        tile = Image.fromarray(frame.numpy()).resize((tile_width, tile_height), Image.Resampling.LANCZOS)
        picture.paste(tile, (index % columns * tile_width, index // columns * tile_height))
    picture.save(path, "JPEG", quality=85)
    return {
        "columns": columns,
        "rows": rows,
        "tiles": len(frames),
        "tile_width": tile_width,
        "tile_height": tile_height,
    }


def format_webvtt(indices: Sequence[int], num_frames: int, fps: Fraction, sheet: dict[str, int], name: str) -> str:
    """Write the index of a spritesheet: one cue a tile, from its frame to the next tile's."""
    lines = ["WEBVTT", ""]
    for tile, (start, end) in enumerate(zip(indices, [*indices[1:], num_frames], strict=True)):
        x = tile % sheet["columns"] * sheet["tile_width"]
        y = tile // sheet["columns"] * sheet["tile_height"]
        lines += [
            f"{_timestamp(start / fps)} --> {_timestamp(end / fps)}",
            f"{name}#xywh={x},{y},{sheet['tile_width']},{sheet['tile_height']}",
            "",
        ]
    return "\n".join(lines)


def _timestamp(seconds: Fraction) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}"
