"""What is fixed before a storyboard's first word: its things, the hand of choices of each shot, the schema of its text.

For a video model whose card has slots, a shot's prompt is a sentence of them about the idea's own thing in its own
colour; the language model chooses among a few motions, places and camera moves, dealt anew for each shot.
Invariants: every string is bounded, so that a text ends before its tokens do; the same task makes the same plan.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from media_server.models.card import CaptionStyle, VideoCard
from media_server.text.caption import Choices, name, phrase, sentence_pattern
from media_server.text.messages import Grammar
from media_server.text.subjects import (
    HOMES,
    MOTION_WORDS,
    PLACE_WORDS,
    SIZE_WORDS,
    Subject,
    find_subjects,
    find_words,
    meaning_of,
)
from media_server.text.wording import deal_moods, deal_names, deal_titles

# a clip of about this length holds one thought; a model that makes less in one piece shows one in a piece
SECONDS_PER_SHOT = 2.5
_LEAST_PIECE_S = 1.0
PACES = {"quick": 0.75, "steady": 1.0, "slow": 1.3}
TRANSITIONS = ("cut", "match cut", "smash cut", "jump cut")
CAMERAS = ("still", "pan left", "pan right", "tilt up", "tilt down", "zoom in", "zoom out", "tracking", "handheld")
TEMPERATURE = 0.9
TOP_P = 0.95
_MAX_FREE_PROMPT = 280
# a shot chooses among so many motions and places, another hand each, so that shots differ
_HAND = 4
# and a film has so many places, unless its idea names them
_PLACES = 3
_TITLE = "[A-Z][a-z]{1,11}( [A-Za-z][a-z]{0,11}){1,4}"


@dataclass(frozen=True)
class Task:
    """What a storyboard is asked for. `num_frames` is the length of the whole; `attempt` gives another text."""

    idea: str
    num_frames: int
    fps: int
    seed: int
    card: VideoCard
    num_shots: int | None = None
    style: str | None = None
    attempt: int = 0

    @property
    def shots(self) -> int:
        """How many shots: those asked for, or one for each thought."""
        if self.num_shots is not None:
            return self.num_shots
        seconds = self.num_frames / self.fps
        # a model whose clips are short needs more
        least = -(-self.num_frames // self.card.limits.max_frames(self.fps))
        piece = self.card.frames.max
        if _LEAST_PIECE_S * self.fps <= piece < SECONDS_PER_SHOT * self.fps:
            # a joint in a shot costs time, and is where things change their shape
            least = max(least, -(-self.num_frames // piece))
        return max(1, min(100, self.num_frames, max(least, round(seconds / SECONDS_PER_SHOT))))

    @property
    def longest(self) -> int:
        """Most frames of a shot: what the model makes in one piece, if all shots can be so short."""
        piece = self.card.frames.max
        return piece if piece * self.shots >= self.num_frames else self.card.limits.max_frames(self.fps)

    def derive_seed(self, purpose: str) -> int:
        """Give a seed of 63 bits for one purpose."""
        text = f"{self.seed}:{self.attempt}:{purpose}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Ask:
    """One text to be written by a language model under a grammar."""

    messages: Sequence[Mapping[str, str]]
    grammar: Grammar
    max_tokens: int
    seed: int
    temperature: float = TEMPERATURE
    top_p: float = TOP_P


class StoryboardError(Exception):
    """The language model's text cannot be made into a storyboard; another attempt may do.

    The message is stored and logged, and quotes neither the text nor the idea.
    """


Writer = Callable[[Ask], Iterator[str]]


class Plan:
    """What is fixed before the first word: things, and the hand of choices of each shot."""

    def __init__(self, task: Task, slots: dict[str, list[str]] | None, subjects: Sequence[Subject]) -> None:
        self.task = task
        self.slots = slots
        self.subjects = list(subjects)
        self._choices = [] if slots is None else _deal(task, slots, subjects)

    def ask(self, schema: dict[str, Any], written: Sequence[Mapping[str, Any]], count: int) -> Ask:
        """Put the question to the language model."""
        return Ask(
            messages=_messages(self.task, count, written),
            grammar=Grammar(type="json_schema", value=json.dumps(schema)),
            # the bounds of the strings in tokens, generously
            max_tokens=160 + count * (110 if self.slots is not None else 60 + _MAX_FREE_PROMPT),
            seed=self.task.derive_seed(f"shots from {len(written)}"),
        )

    def schema(self, first: int, count: int) -> dict[str, Any]:
        """Write the schema of a text with `count` shots; the first text has title, characters and palette too."""
        shots = [self._shot(index) for index in range(first, first + count)]
        fields: dict[str, Any] = {}
        if first == 0:
            fields |= {"title": self._title(), "characters": self._characters(), "palette": self._palette()}
        fields["shots"] = {"type": "array", "prefixItems": shots, "items": False, "minItems": count, "maxItems": count}
        return _object(fields)

    def _shot(self, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.slots is not None:
            fields["prompt"] = _text(sentence_pattern(self._choices[index], self.slots))
        else:
            longest = min(_MAX_FREE_PROMPT, self.task.card.limits.max_prompt_chars)
            fields["prompt"] = {"type": "string", "minLength": min(24, longest), "maxLength": longest}
            fields["camera"] = {"enum": list(CAMERAS)}
        # small models say the same word for ever: each shot chooses among two
        rng = random.Random(self.task.derive_seed(f"shot {index}"))
        fields["transition"] = {"enum": rng.sample(TRANSITIONS, 2)}
        fields["pace"] = {"enum": rng.sample(list(PACES), 2)}
        first, second = deal_moods(random.Random(self.task.derive_seed(f"mood {index}")))
        fields["notes"] = _text(f"Mood: ({'|'.join(first)}), ({'|'.join(second)})")
        return _object(fields)

    def _title(self) -> dict[str, Any]:
        if self.slots is None:
            return _text(_TITLE)
        places = sorted({place for choices in self._choices for place in choices.backdrops})
        return {"enum": deal_titles(random.Random(self.task.derive_seed("title")), self.subjects[0], places)}

    def _characters(self) -> dict[str, Any]:
        rng = random.Random(self.task.derive_seed("names"))
        if self.slots is not None:
            hands = deal_names(rng, len(self.subjects))
            people = [
                _object({"look": {"const": name(thing)}, "name": {"enum": hand}})
                for thing, hand in zip(self.subjects, hands, strict=True)
            ]
            return {"type": "array", "prefixItems": people, "items": False, "minItems": len(people)}
        look = {"type": "string", "minLength": 8, "maxLength": 80}
        people = [_object({"look": look, "name": {"enum": hand}}) for hand in deal_names(rng, 3)]
        return {"type": "array", "prefixItems": people, "items": False, "minItems": 1, "maxItems": 3}

    def _palette(self) -> dict[str, Any]:
        if self.slots is None:
            return {"type": "array", "items": _text("[a-z]{3,10}( [a-z]{3,10})?"), "minItems": 3, "maxItems": 3}
        main = self.subjects[0].color
        others = [color for color in self.slots["color"] if color != main]
        half = max(1, len(others) // 2)
        shuffled = random.Random(self.task.derive_seed("palette")).sample(others, len(others))
        # two hands without a common colour, so that no colour comes twice
        hands = [sorted(hand) for hand in (shuffled[:half], shuffled[half:]) if hand]
        colors = [{"const": main}, *({"enum": hand} for hand in hands)]
        return {"type": "array", "prefixItems": colors, "items": False, "minItems": len(colors)}


def choose_subjects(
    task: Task, slots: Mapping[str, Sequence[str]], write: Writer
) -> Generator[str, None, list[Subject]]:
    """Find whom the idea names; what it leaves open of the main one the language model chooses, once."""
    found = find_subjects(task.idea, slots)
    main = found[0] if found else Subject(None, None)
    if main.color is None or main.kind is None:
        colors = [main.color] if main.color else list(slots["color"])
        kinds = [main.kind] if main.kind else list(slots["kind"])
        options = {name(thing): thing for color in colors for kind in kinds for thing in [Subject(color, kind)]}
        # the same words in the same order would have the model say the first one for ever
        order = random.Random(task.derive_seed("subject")).sample(sorted(options), len(options))
        text = ""
        for delta in write(_subject_ask(task, order)):
            text += delta
            yield ""
        chosen = options.get(text)
        if chosen is None:
            raise StoryboardError("The language model chose no subject that it was offered.")
        found = [chosen, *(other for other in found[1:] if other.color and other != chosen)]
    # whom the idea names without a colour the rule gives one of its own
    rest = random.Random(task.derive_seed("colors"))
    free = [color for color in slots["color"] if color not in {thing.color for thing in found}]
    rest.shuffle(free)
    # a second thing is shown beside the first, if the style has words for that
    others = found[1:2] if slots.get("relation") else []
    return [found[0], *(_colored(other, free) for other in others)]


def _colored(thing: Subject, free: list[str]) -> Subject:
    return thing if thing.color is not None or not free else replace(thing, color=free[0])


def _subject_ask(task: Task, options: Sequence[str]) -> Ask:
    question = f"Idea: {task.idea.strip()}\nWhich thing should the film be about? Answer with its colour and name."
    return Ask(
        messages=[{"role": "system", "content": "You are a film director."}, {"role": "user", "content": question}],
        grammar=Grammar(type="choice", value=json.dumps(list(options))),
        max_tokens=16,
        seed=task.derive_seed("subject draw"),
    )


def slots_of(style: CaptionStyle | None) -> dict[str, list[str]] | None:
    """Give the slots of a style that names things by colour and kind, and says what they do where."""
    if style is None or not style.slots:
        return None
    needed = ("color", "kind", "motion", "backdrop")
    return style.slots if all(style.slots.get(slot) for slot in needed) else None


def _messages(task: Task, count: int, written: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, str]]:
    """Say what is to be written: short, since each word costs time before the first shot."""
    style = task.card.caption_style
    lines = [f"Idea: {task.idea.strip()}"]
    if task.style:
        lines.append(f"Style: {task.style.strip()}")
    if style is not None and slots_of(style) is None:
        lines.append(f"How the video model wants its prompts: {style.text.strip()}")
    if style is not None and style.examples:
        lines.append(f"Examples of prompts: {'; '.join(style.examples[:3])}.")
    if written:
        lines.append(f"The shots so far: {'; '.join(str(shot['prompt']) for shot in written[-4:])}.")
        lines.append(f"Go on with the next {count} of {task.shots} shots.")
    else:
        lines.append(f"Write a storyboard of {count} shots with a beginning, a middle and an end.")
    lines.append("Each shot has a prompt for the video model and notes on its mood in two words.")
    return [
        {"role": "system", "content": "You are a film director. You write storyboards as JSON."},
        {"role": "user", "content": "\n".join(lines)},
    ]


def _deal(task: Task, slots: Mapping[str, Sequence[str]], subjects: Sequence[Subject]) -> list[Choices]:
    """Deal each shot a hand of motions, places and camera moves; what the idea names comes before all else."""
    rng = random.Random(task.derive_seed("hands"))
    style = task.card.caption_style
    hidden = ((style.model_extra or {}).get("hidden_on") if style is not None else None) or {}
    colors = [thing.color for thing in subjects]
    # a thing before a wall of its own colour is not seen
    seen = [
        place
        for place in slots["backdrop"]
        if not any(color in hidden.get(place, (place,)) or _is_wall(place, color, slots) for color in colors)
    ]
    places = seen or list(slots["backdrop"])
    pool = find_words(task.idea, places, PLACE_WORDS) or _places(subjects[0], places, rng)
    sizes = find_words(task.idea, slots.get("size", ()), SIZE_WORDS)[:1]
    named = find_words(task.idea, slots["motion"], MOTION_WORDS)
    named_motions = _Deck(named, rng)
    others = [motion for motion in slots["motion"] if motion not in named] or slots["motion"]
    motions, wide = _Deck(others, rng), _Deck(pool, rng)
    # one motion in one place comes again nearer or farther, so that no shot repeats another
    distances = _Deck(() if sizes else slots.get("size", ()), rng)
    cameras = _Deck(slots.get("camera", ()), rng)
    other = subjects[1] if len(subjects) > 1 else None
    hands = []
    for index in range(task.shots):
        # the second thing is met in the end
        # what the idea says it does, it does in every other shot, if that shot differs from those before
        is_as_told = index % 2 == 0 and (index // 2 < len(named) or not sizes)
        has_other = other is not None and index >= max(1, task.shots - max(1, task.shots // 3))
        hands.append(
            Choices(
                subject=subjects[0],
                motions=(named_motions.draw(1) if is_as_told else []) or motions.draw(_HAND),
                backdrops=wide.draw(_HAND),
                cameras=cameras.draw(2),
                sizes=sizes or (distances.draw(1) if index > 1 else []),
                other=other if has_other else None,
                relations=slots.get("relation", ()),
            )
        )
    return hands


def _places(subject: Subject, places: Sequence[str], rng: random.Random) -> list[str]:
    """Choose a few places for a film that names none: where its main thing is at home, and others."""
    homes = HOMES.get(subject.kind or "", ())
    at_home = [place for place in places if meaning_of(place, PLACE_WORDS) in homes]
    others = [place for place in places if place not in at_home]
    return [*at_home, *rng.sample(others, min(len(others), max(1, _PLACES - len(at_home))))]


def _is_wall(place: str, color: str | None, slots: Mapping[str, Sequence[str]]) -> bool:
    return color is not None and phrase("backdrop", place, slots) == phrase("backdrop", color, slots)


class _Deck:
    """Cards dealt in a shuffled order, all of them before any comes again."""

    def __init__(self, cards: Sequence[str], rng: random.Random) -> None:
        self._cards = list(cards)
        self._rng = rng
        self._left: list[str] = []

    def draw(self, count: int) -> list[str]:
        """Take `count` different cards, or all there are."""
        hand: list[str] = []
        while len(hand) < min(count, len(self._cards)):
            if not self._left:
                self._left = self._rng.sample(self._cards, len(self._cards))
            card = self._left.pop()
            if card not in hand:
                hand.append(card)
        return hand


def _text(pattern: str) -> dict[str, Any]:
    assert re.compile(pattern), "a pattern of ours compiles"
    return {"type": "string", "pattern": f"^{pattern}$"}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
