"""Thumbnail, spritesheet and its index."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from video.sheets import format_webvtt, tile_indices, write_last_frame, write_spritesheet, write_thumbnail


def test_tiles_are_spread_over_the_clip() -> None:
    assert tile_indices(1) == [0]
    assert tile_indices(4) == [0, 1, 2, 3]
    indices = tile_indices(100)
    assert indices == list(range(0, 100, 4))


def test_spritesheet_and_index_agree(tmp_path: Path) -> None:
    levels = [10, 60, 110, 160, 210, 250, 40]
    frames = [torch.full((96, 160, 3), level, dtype=torch.uint8) for level in levels]
    sheet = write_spritesheet(tmp_path / "sheet.jpg", frames)
    assert sheet == {"columns": 5, "rows": 2, "tiles": 7, "tile_width": 160, "tile_height": 96}
    picture = np.array(Image.open(tmp_path / "sheet.jpg"))
    assert picture.shape == (192, 800, 3)
    text = format_webvtt(range(7), 9, Fraction(2), sheet, "sheet.jpg")
    cues = text.strip().split("\n\n")[1:]
    assert text.startswith("WEBVTT\n\n")
    assert cues[0].splitlines()[0] == "00:00:00.000 --> 00:00:00.500"
    # the last tile lasts to the clip's end
    assert cues[6].splitlines()[0] == "00:00:03.000 --> 00:00:04.500"
    for level, cue in zip(levels, cues, strict=True):
        x, y, width, height = (int(part) for part in cue.split("xywh=")[1].split(","))
        assert abs(picture[y : y + height, x : x + width].mean() - level) < 2


def test_thumbnail_is_bounded_and_the_last_frame_exact(tmp_path: Path) -> None:
    frame = torch.randint(0, 256, (300, 1200, 3), dtype=torch.uint8)
    write_thumbnail(tmp_path / "t.jpg", frame)
    assert Image.open(tmp_path / "t.jpg").size == (512, 128)
    write_last_frame(tmp_path / "l.png", frame)
    assert np.array_equal(np.array(Image.open(tmp_path / "l.png")), frame.numpy())
