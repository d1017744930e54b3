"""Who an idea is about, in the words of a video model: coloured things, places and motions that it names.

A model of few words (its card lists them as slots) knows a "car", where the idea says "taxi": the tables below lead
common English words to the slots' own. Words that no slot has lead nowhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KIND_WORDS: dict[str, str] = {
    "ball": "balls sphere orb balloon bubble marble globe",
    "square": "squares box boxes cube cubes block blocks crate brick",
    "triangle": "triangles pyramid pyramids",
    "star": "starlet",
    "car": "cars automobile taxi cab truck van bus jeep racer",
    "boat": "boats ship ships sailboat canoe ferry raft yacht vessel barge",
    "tree": "trees oak pine fir palm willow sapling",
    "house": "houses cottage hut cabin barn lighthouse",
    "bird": "birds sparrow robin crow owl gull seagull parrot duck eagle dove swan canary penguin raven",
    "sun": "suns",
    "moon": "moons crescent",
}
COLOR_WORDS: dict[str, str] = {
    "red": "crimson scarlet ruby",
    "yellow": "golden gold lemon",
    "green": "emerald",
    "cyan": "turquoise teal aqua",
    "blue": "azure navy",
    "purple": "violet lilac",
    "pink": "rosy",
    "white": "ivory",
    "black": "ebony",
}
# first match wins, so the special stands before the general
PLACE_WORDS: dict[str, str] = {
    "nightfall": "nightfall dusk twilight sunset evening turns",
    "night": "night midnight nights starry moonlight moonlit stars darkness",
    "sea": "sea seas ocean oceans waves harbor harbour beach shore river lake",
    "snow": "snow snowy winter snowfall ice snowflakes",
    "rain": "rain rainy raining storm rainstorm thunderstorm",
    "city": "city town street streets downtown skyscrapers skyline traffic road",
    "day": "day daytime sunny meadow field garden park countryside morning afternoon hills sunshine",
}
MOTION_WORDS: dict[str, str] = {
    "left": "moves moving rolls rolling drives driving sails sailing flies flying drifts drifting runs crosses races",
    "right": "moves moving rolls rolling drives driving sails sailing flies flying drifts drifting runs crosses races",
    "up": "rises rising climbs climbing ascends soars lifts",
    "down": "falls falling sinks sinking descends drops sets",
    "growing": "grows growing swells expands bigger",
    "shrinking": "shrinks shrinking dwindles smaller",
    "bouncing": "bounces bouncing jumps jumping hops hopping",
    "spinning": "spins spinning twirls twirling whirls dances dancing turning rotates",
    "still": "rests resting sleeps sleeping waits waiting stands standing sits sitting stays",
}
SIZE_WORDS: dict[str, str] = {
    "small": "tiny little smallest",
    "large": "big huge giant enormous",
}
# where a kind is at home, if an idea does not say where it is
HOMES: dict[str, tuple[str, ...]] = {
    "boat": ("sea",),
    "sun": ("day", "sea"),
    "moon": ("night", "city"),
    "car": ("city", "day"),
    "bird": ("day", "sea"),
    "house": ("day", "snow"),
    "tree": ("day", "snow"),
    "star": ("night", "nightfall"),
}
# a companion without a kind of its own is of the kind of whom it accompanies
_COMPANIONS = frozenset(["friend", "friends", "companion", "brother", "sister", "twin", "partner", "rival", "one"])
# what may not stand between a colour and the thing it colours
_STOPS = frozenset(
    re.findall(r"\w+", "a an the and or of with in on to at its his her their into over under near is was but")
)
_COPULAS = frozenset(("is", "was", "painted", "named", "called"))
_REACH = 3


@dataclass(frozen=True)
class Subject:
    """A thing of an idea in the slots' words; None is what the idea leaves open."""

    color: str | None
    kind: str | None


def find_subjects(idea: str, slots: Mapping[str, Sequence[str]]) -> list[Subject]:
    """Find the things that an idea names, the main one first: the first with a colour, or else the first.

    An idea that names only a colour gives one subject without a kind.
    """
    kinds = _lookup(slots.get("kind", ()), KIND_WORDS)
    colors = _lookup(slots.get("color", ()), COLOR_WORDS)
    found: list[Subject] = []
    loose_colors: list[str] = []
    for clause in re.split(r"[.,;:!?()\u2014]+", idea.lower()):
        words = re.findall(r"[a-z]+", clause)
        taken: set[int] = set()
        for index, word in enumerate(words):
            is_companion = word in _COMPANIONS
            if word not in kinds and not is_companion:
                continue
            color = _color_at(words, index, colors, taken)
            if is_companion and color is None:
                continue
            if word == "stars" and color is None:
                # the sky, not a thing
                continue
            found.append(Subject(color, kinds.get(word) if not is_companion else None))
        loose_colors += [colors[word] for index, word in enumerate(words) if word in colors and index not in taken]
    main = next((subject for subject in found if subject.color and subject.kind), found[0] if found else None)
    if main is None:
        return [Subject(loose_colors[0], None)] if loose_colors else []
    rest = [subject for subject in found if subject is not main]
    others = [Subject(other.color, other.kind or main.kind) for other in rest]
    # the same thing named again is no second thing
    named = {(main.color, main.kind), (None, main.kind)}
    distinct = [other for other in dict.fromkeys(others) if (other.color, other.kind) not in named]
    return [main, *distinct]


def find_words(text: str, values: Iterable[str], words: Mapping[str, str]) -> list[str]:
    """Find the slot values that a text names, by their meaning in one of the tables above."""
    said = set(re.findall(r"[a-z]+", text.lower()))
    named = {meaning for meaning, synonyms in words.items() if said & {meaning, *synonyms.split()}}
    return [value for value in values if meaning_of(value, words) in named]


def meaning_of(value: str, words: Mapping[str, str]) -> str | None:
    """Tell which entry of a table a slot value means: "at night" is night, "as day turns to night" is nightfall."""
    said = set(re.findall(r"[a-z]+", value.lower()))
    return next((meaning for meaning, synonyms in words.items() if said & {meaning, *synonyms.split()}), None)


def _lookup(values: Iterable[str], synonyms: Mapping[str, str]) -> dict[str, str]:
    """Map each word that stands for a slot value to it."""
    words: dict[str, str] = {}
    for value in values:
        for word in (value, *synonyms.get(value, "").split()):
            words.setdefault(word, value)
            if not word.endswith("s"):
                words.setdefault(f"{word}s", value)
    return words


def _color_at(words: Sequence[str], index: int, colors: Mapping[str, str], taken: set[int]) -> str | None:
    """Find the colour of the thing at `index`: before it ("a red wooden car"), or after it ("the car is red")."""
    for place in range(index - 1, max(-1, index - 1 - _REACH), -1):
        if words[place] in colors and place not in taken:
            taken.add(place)
            return colors[words[place]]
        if words[place] in _STOPS:
            break
    after = range(index + 1, min(len(words), index + 1 + _REACH))
    for place in after:
        if words[place] in colors and any(words[between] in _COPULAS for between in range(index + 1, place)):
            taken.add(place)
            return colors[words[place]]
    return None
