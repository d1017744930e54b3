"""Prompts in a video model's caption style: one sentence of its slots, said as a pattern that a grammar holds.

The sentence, in the order that the slots are named in: a [size] colour kind, motion, [relation to another thing],
backdrop[, camera]. A slot value that is a bare word of the small vocabulary below is put into a phrase; any other is
taken as the phrase itself. Invariant: what `sentence_pattern` allows, `parse_sentence` reads back.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from media_server.text.subjects import Subject

_PHRASES: dict[str, dict[str, str]] = {
    "motion": {
        "left": "moving left",
        "right": "moving right",
        "up": "moving up",
        "down": "moving down",
        "still": "standing still",
    },
    "backdrop": {
        "day": "on a sunny day",
        "night": "at night",
        "sea": "at sea",
        "snow": "in the snow",
        "rain": "in the rain",
        "city": "in the city",
        "nightfall": "as day turns to night",
    },
    "camera": {
        "none": "",
        "pan left": "the camera pans left",
        "pan right": "the camera pans right",
        "zoom in": "the camera zooms in",
        "zoom out": "the camera zooms out",
    },
    "relation": {"left of": "to the left of", "right of": "to the right of"},
    # what is not worth saying
    "size": {"medium": ""},
}


@dataclass(frozen=True)
class Choices:
    """What one shot's sentence may say: its things, and the slot values that are open to the writer.

    Sizes are said if there are any: a thing that is small in one shot is small in the next.
    """

    subject: Subject
    motions: Sequence[str]
    backdrops: Sequence[str]
    cameras: Sequence[str]
    sizes: Sequence[str] = ()
    other: Subject | None = None
    relations: Sequence[str] = ()


@dataclass(frozen=True)
class Sentence:
    """A prompt taken apart into its slots, each as the sentence has it."""

    size: str
    color: str
    kind: str
    motion: str
    backdrop: str
    camera: str
    other: str


def phrase(slot: str, value: str, slots: Mapping[str, Sequence[str]]) -> str:
    """Say a slot value as it stands in a sentence."""
    if slot == "backdrop" and value in slots.get("color", ()):
        return f"on {article(value)} {value} background"
    return _PHRASES.get(slot, {}).get(value, value)


def article(word: str) -> str:
    """Choose a or an."""
    return "an" if word[:1] in "aeio" else "a"


def name(subject: Subject) -> str:
    """Name a thing: a red ball."""
    return f"{article(subject.color or 'a')} {subject.color} {subject.kind}"


def sentence_pattern(choices: Choices, slots: Mapping[str, Sequence[str]]) -> str:
    """Write the regex of one shot's prompt."""
    sizes = [said for value in choices.sizes if (said := phrase("size", value, slots))]
    named = [f"{article(size)} {size} {choices.subject.color} {choices.subject.kind}" for size in sizes]
    names = named or [name(choices.subject)]
    parts = [_any(names), _any(phrase("motion", value, slots) for value in choices.motions)]
    if choices.other is not None:
        parts += [_any(phrase("relation", value, slots) for value in choices.relations), _any([name(choices.other)])]
    parts.append(_any(phrase("backdrop", value, slots) for value in choices.backdrops))
    cameras = [phrase("camera", value, slots) for value in choices.cameras]
    pattern = " ".join(part for part in parts if part)
    ending = _any(f", {camera}" for camera in cameras if camera)
    if not ending:
        return pattern
    return f"{pattern}{ending}" if all(cameras) else f"{pattern}({ending})?"


def parse_sentence(text: str, slots: Mapping[str, Sequence[str]]) -> Sentence | None:
    """Take a prompt apart; None if it is not a sentence of these slots."""
    said = {
        slot: [worded for value in slots.get(slot, ()) if (worded := phrase(slot, value, slots))]
        for slot in ("size", "color", "kind", "motion", "backdrop", "camera", "relation")
    }
    thing = rf"an? (?:{_any(said['size'])} )?{_any(said['color'])} {_any(said['kind'])}"
    other = rf"(?: (?P<other>{_any(said['relation'])} {thing}))?" if said["relation"] else "(?P<other>(?!))?"
    camera = rf"(?:, (?P<camera>{_any(said['camera'])}))?" if said["camera"] else "(?P<camera>(?!))?"
    size = rf"(?:(?P<size>{_any(said['size'])}) )?" if said["size"] else "(?P<size>(?!))?"
    match = re.fullmatch(
        rf"an? {size}(?P<color>{_any(said['color'])}) (?P<kind>{_any(said['kind'])}) (?P<motion>{_any(said['motion'])})"
        rf"{other} (?P<backdrop>{_any(said['backdrop'])}){camera}",
        text,
    )
    return None if match is None else Sentence(**{key: value or "" for key, value in match.groupdict().items()})


def _any(texts: Iterable[str]) -> str:
    """Write an alternative of plain texts, the longest first so that a prefix does not win."""
    unique = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return f"(?:{'|'.join(_escape(text) for text in unique)})" if unique else ""


def _escape(text: str) -> str:
    """Escape what a regex would read otherwise; llguidance's dialect knows no escaped spaces."""
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", text)
