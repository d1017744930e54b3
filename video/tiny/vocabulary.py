"""The closed vocabulary of the tiny world: what can be drawn, said and scored.

Every tuple's order is part of the contract: class indices (`KINDS.index(kind)`) are stored in trained weights.
Colours are sRGB in 0..255, chosen at least 30 apart in CIE Lab.
"""

from typing import Literal, get_args

Kind = Literal["ball", "square", "triangle", "star", "car", "boat", "tree", "house", "bird", "sun", "moon"]
Color = Literal["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "black"]
Size = Literal["small", "medium", "large"]
Motion = Literal["left", "right", "up", "down", "growing", "shrinking", "bouncing", "spinning", "still"]
Camera = Literal["none", "pan left", "pan right", "zoom in", "zoom out"]
Relation = Literal["left of", "right of", "above", "below"]
Split = Literal["train", "unseen"]

KINDS: tuple[str, ...] = get_args(Kind)
COLORS: tuple[str, ...] = get_args(Color)
SIZES: tuple[str, ...] = get_args(Size)
MOTIONS: tuple[str, ...] = get_args(Motion)
CAMERAS: tuple[str, ...] = get_args(Camera)
RELATIONS: tuple[str, ...] = get_args(Relation)
SPLITS: tuple[str, ...] = get_args(Split)

# A plain backdrop carries the name of its colour; `nightfall` is day turning to night.
PLAINS: tuple[str, ...] = COLORS
SCENES: tuple[str, ...] = ("day", "night", "sea", "snow", "rain", "city", "nightfall")
BACKDROPS: tuple[str, ...] = PLAINS + SCENES

DIRECTIONS: tuple[str, ...] = ("left", "right", "up", "down")

RGB: dict[str, tuple[int, int, int]] = {
    "red": (218, 38, 38),
    "orange": (244, 132, 24),
    "yellow": (248, 214, 44),
    "green": (44, 158, 62),
    "cyan": (44, 204, 208),
    "blue": (30, 84, 222),
    "purple": (144, 50, 166),
    "pink": (246, 128, 184),
    "white": (246, 246, 242),
    "black": (30, 30, 36),
}

# Plain backdrops are calmer than the things in front of them, yet keep the colour's name.
PLAIN_RGB: dict[str, tuple[int, int, int]] = {
    "red": (196, 62, 58),
    "orange": (238, 150, 66),
    "yellow": (244, 216, 96),
    "green": (82, 164, 92),
    "cyan": (96, 204, 208),
    "blue": (70, 112, 208),
    "purple": (132, 76, 168),
    "pink": (242, 160, 196),
    "white": (238, 238, 236),
    "black": (36, 37, 44),
}

# Colours that a thing may not have before a backdrop, since they would not stand out.
HIDDEN_ON: dict[str, tuple[str, ...]] = {
    "red": ("red", "orange", "purple"),
    "orange": ("orange", "yellow", "red"),
    "yellow": ("yellow", "orange", "white"),
    "green": ("green",),
    "cyan": ("cyan",),
    "blue": ("blue", "purple"),
    "purple": ("purple", "blue"),
    "pink": ("pink",),
    "white": ("white", "yellow"),
    "black": ("black",),
    "day": ("green", "cyan", "white"),
    "night": ("black",),
    "sea": ("blue", "cyan", "white"),
    "snow": ("white",),
    "rain": ("black",),
    "city": ("black", "purple"),
    "nightfall": ("green", "cyan", "white", "black"),
}

# Which backdrops suit which kind; the others are drawn too, more rarely.
AT_HOME: dict[str, tuple[str, ...]] = {
    "boat": ("sea",),
    "sun": ("day", "sea", "city"),
    "moon": ("night", "city", "snow"),
    "car": ("city", "rain", "day"),
    "bird": ("day", "sea", "city"),
    "house": ("day", "snow", "night"),
    "tree": ("day", "snow", "rain"),
}


def check_word(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not of the vocabulary.

    Raises:
        ValueError: `value` is not in `allowed`; the message names the field, the rule and the value.
    """
    if value not in allowed:
        raise ValueError(f"{field}: must be one of {', '.join(allowed)}, got {value!r}")
