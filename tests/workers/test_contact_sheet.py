"""The contact sheet: every frame where it belongs, captions inside their column."""

import numpy as np
from PIL import Image, ImageFont

from workers.contact_sheet import SheetShot, draw_contact_sheet, frames_to_show, legible, wrap


def test_frames_are_spread_from_first_to_last() -> None:
    assert frames_to_show(SheetShot(10, 31, "")) == [10, 20, 30, 40]
    assert frames_to_show(SheetShot(5, 2, "")) == [5, 6]
    assert frames_to_show(SheetShot(5, 1, "")) == [5]


def test_each_frame_is_drawn_in_its_shots_row() -> None:
    shots = [SheetShot(0, 8, "a red ball"), SheetShot(8, 4, "a blue square " * 20)]
    shown = [frame for shot in shots for frame in frames_to_show(shot)]
    colors = {frame: (10 + 15 * index, 200 - 15 * index, 90) for index, frame in enumerate(shown)}
    pictures = {frame: Image.new("RGB", (160, 96), color) for frame, color in colors.items()}
    sheet = np.asarray(draw_contact_sheet("Title", "an idea", shots, pictures, fps=16))
    centers = {}
    for frame, color in colors.items():
        rows, columns = np.nonzero((sheet == color).all(axis=2))
        assert rows.size == 240 * 144
        centers[frame] = (rows.mean(), columns.mean())
    for shot in shots:
        row = [centers[frame] for frame in frames_to_show(shot)]
        assert len({y for y, _ in row}) == 1
        assert [x for _, x in row] == sorted(x for _, x in row)
    assert centers[0][0] < centers[8][0]


def test_text_is_wrapped_to_the_width_and_none_is_lost() -> None:
    font = ImageFont.load_default(16)
    text = "a red ball rolls over a very green field " + "x" * 120
    lines = wrap(text, font, 200)
    assert all(font.getlength(line) <= 200 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert wrap("", font, 200) == []


def test_text_is_drawn_without_boxes() -> None:
    assert legible("Zwei B\u00e4lle \u2013 caf\u00e9\x1f") == "Zwei Balle \u2013 cafe"
