"""Words that a storyboard's title, names and moods are chosen from, dealt by the storyboard's seed.

A small language model that writes them letter by letter writes no words; among words it chooses well enough.
"""

import random
from collections.abc import Sequence

from media_server.text.subjects import PLACE_WORDS, Subject, meaning_of

MOODS = (
    *(
        "calm",
        "playful",
        "quiet",
        "hopeful",
        "curious",
        "gentle",
        "bright",
        "dreamy",
        "warm",
        "tense",
        "merry",
        "lonely",
    ),
    *(
        "proud",
        "tender",
        "restless",
        "solemn",
        "sunny",
        "wistful",
        "brave",
        "sleepy",
        "eager",
        "peaceful",
        "wild",
        "shy",
    ),
)
NAMES = (
    *("Ada", "Bo", "Cleo", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivo", "Juno", "Kai", "Lia", "Milo", "Nora", "Otto"),
    *("Pia", "Quinn", "Rosa", "Sami", "Tilda", "Uma", "Vito", "Wanda", "Yara", "Zeno"),
)
_PLACES = {
    "night": "at Night",
    "day": "by Day",
    "sea": "at Sea",
    "snow": "in the Snow",
    "rain": "in the Rain",
    "city": "in the City",
    "nightfall": "at Nightfall",
}
_TITLES = (
    *("The {thing}", "The {thing} {place}", "A {thing} {place}", "The Way of the {thing}", "One {thing}, One World"),
    *(
        "The {kind} Who Came {place}",
        "Follow the {thing}",
        "Hello, {thing}",
        "The Day of the {thing}",
        "A {kind}'s Tale",
    ),
    *("The Little {kind}", "Song of the {thing}", "Where the {thing} Goes", "The {thing} Returns", "The Last {thing}"),
)
_HAND = 5


def deal_moods(rng: random.Random) -> tuple[list[str], list[str]]:
    """Give two hands of moods without a common word."""
    dealt = rng.sample(MOODS, 2 * _HAND)
    return sorted(dealt[:_HAND]), sorted(dealt[_HAND:])


def deal_names(rng: random.Random, count: int) -> list[list[str]]:
    """Give a hand of names for each of `count` characters, at most five; no name is in two hands."""
    dealt = rng.sample(NAMES, _HAND * count)
    return [sorted(dealt[_HAND * index : _HAND * (index + 1)]) for index in range(count)]


def deal_titles(rng: random.Random, subject: Subject, places: Sequence[str]) -> list[str]:
    """Give a hand of titles about a thing and, where there is a word for it, one of the places it is seen in."""
    kind = (subject.kind or "Friend").title()
    thing = f"{subject.color.title()} {kind}" if subject.color else kind
    said = [_PLACES[meaning] for place in places if (meaning := meaning_of(place, PLACE_WORDS)) in _PLACES]
    where = rng.choice(said) if said else ""
    templates = [text for text in _TITLES if where or "{place}" not in text]
    return sorted(text.format(thing=thing, kind=kind, place=where) for text in rng.sample(templates, _HAND))
