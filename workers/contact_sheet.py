"""A film on one page: a row a shot, with its time, its caption and a few of its frames."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

FRAMES_A_SHOT = 4

_BACKGROUND = (20, 20, 23)
_TITLE_COLOR = (245, 245, 245)
_TEXT_COLOR = (205, 205, 210)
_QUIET_COLOR = (140, 140, 150)
_MARGIN = 28
_GAP = 8
_TEXT_WIDTH = 300
_FRAME_WIDTH = 240
_LINE = 22

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class SheetShot:
    """One row: the shot's frames in the film and what it shows."""

    first_frame: int
    num_frames: int
    caption: str


def frames_to_show(shot: SheetShot) -> list[int]:
    """Choose evenly spaced frames of a shot, its first and last among them; fewer if the shot has fewer."""
    count = min(FRAMES_A_SHOT, shot.num_frames)
    if count == 1:
        return [shot.first_frame]
    return [shot.first_frame + round(index * (shot.num_frames - 1) / (count - 1)) for index in range(count)]


def draw_contact_sheet(
    title: str, subtitle: str, shots: Sequence[SheetShot], pictures: Mapping[int, Image.Image], *, fps: float
) -> Image.Image:
    """Draw the page; `pictures` holds each frame that `frames_to_show` names, all of one size."""
    width, height = next(iter(pictures.values())).size
    frame_height = round(_FRAME_WIDTH * height / width)
    sheet_width = 2 * _MARGIN + _TEXT_WIDTH + FRAMES_A_SHOT * (_FRAME_WIDTH + _GAP)
    title_font, text_font, quiet_font = (ImageFont.load_default(size) for size in (30, 16, 14))
    captions = [wrap(legible(shot.caption), text_font, _TEXT_WIDTH - 2 * _GAP) for shot in shots]
    subtitle_lines = wrap(legible(subtitle), text_font, sheet_width - 2 * _MARGIN)
    row_heights = [max(frame_height, (len(caption) + 1) * _LINE) + 2 * _GAP for caption in captions]
    top = _MARGIN + 44 + len(subtitle_lines) * _LINE + _GAP
    sheet = Image.new("RGB", (sheet_width, top + sum(row_heights) + _MARGIN), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN), legible(title), fill=_TITLE_COLOR, font=title_font)
    for index, line in enumerate(subtitle_lines):
        draw.text((_MARGIN, _MARGIN + 44 + index * _LINE), line, fill=_TEXT_COLOR, font=text_font)
    for number, (shot, caption, row_height) in enumerate(zip(shots, captions, row_heights, strict=True), start=1):
        times = f"{number}   {_clock(shot.first_frame / fps)} to {_clock((shot.first_frame + shot.num_frames) / fps)}"
        draw.text((_MARGIN, top), times, fill=_QUIET_COLOR, font=quiet_font)
        for index, line in enumerate(caption, start=1):
            draw.text((_MARGIN, top + index * _LINE), line, fill=_TEXT_COLOR, font=text_font)
        for column, frame in enumerate(frames_to_show(shot)):
            picture = pictures[frame].resize((_FRAME_WIDTH, frame_height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (_MARGIN + _TEXT_WIDTH + column * (_FRAME_WIDTH + _GAP), top))
        top += row_height
    return sheet


def legible(text: str) -> str:
    """Give text as Pillow's own font can draw it: without accents and control characters, which it shows as boxes."""
    apart = unicodedata.normalize("NFKD", text)
    return "".join(char for char in apart if char.isprintable() and not unicodedata.combining(char))


def wrap(text: str, font: Font, width: float) -> list[str]:
    """Break text into lines of at most `width` pixels; a word that is wider alone is cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        while font.getlength(word) > width and len(word) > 1:
            fitting = max(1, int(len(word) * width / font.getlength(word)) - 1)
            lines.extend(part for part in (line, word[:fitting]) if part)
            line, word = "", word[fitting:]
        candidate = f"{line} {word}" if line else word
        if font.getlength(candidate) <= width:
            line = candidate
        else:
            lines.append(line)
            line = word
    return [*lines, line] if line else lines


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}:{rest:04.1f}"
