"""Who an idea is about, and sentences of a caption style that read back as they were written."""

import itertools
import re

import pytest

from media_server.text.caption import Choices, parse_sentence, phrase, sentence_pattern
from media_server.text.subjects import MOTION_WORDS, PLACE_WORDS, Subject, find_subjects, find_words
from tests.cards import SLOTS


@pytest.mark.parametrize(
    ("idea", "subjects"),
    [
        ("A red ball rolls away.", [("red", "ball")]),
        ("a small red wooden ball", [("red", "ball")]),
        ("The taxi is golden and fast", [("yellow", "car")]),
        ("A red ball finds a blue friend.", [("red", "ball"), ("blue", "ball")]),
        ("A bird meets a yellow star", [("yellow", "star"), (None, "bird")]),
        ("a penguin crosses the ice", [(None, "bird")]),
        ("Something violet grows.", [("purple", None)]),
        ("Under a blue sky, a bird flies", [(None, "bird")]),
        ("a boat under the stars", [(None, "boat")]),
        ("A red car and a blue car race; the red car wins", [("red", "car"), ("blue", "car")]),
        ("the white house and the house", [("white", "house")]),
        ("Waiting for someone", []),
        ("", []),
        ("RED BALL", [("red", "ball")]),
    ],
)
def test_things_and_their_colours(idea: str, subjects: list[tuple[str | None, str | None]]) -> None:
    assert find_subjects(idea, SLOTS) == [Subject(*subject) for subject in subjects]


def test_words_that_no_slot_has_lead_nowhere() -> None:
    assert find_subjects("a red ball", {"kind": ["car"], "color": ["red"]}) == [Subject("red", None)]
    assert find_subjects("a red ball", {}) == []


def test_places_and_motions_by_meaning() -> None:
    assert find_words("it rains over the ocean at midnight", SLOTS["backdrop"], PLACE_WORDS) == ["night", "sea"]
    phrases = ["at night", "as day turns to night", "on a sunny day"]
    assert find_words("at dusk", phrases, PLACE_WORDS) == ["as day turns to night"]
    assert find_words("a sunny morning", phrases, PLACE_WORDS) == ["on a sunny day"]
    assert find_words("the ball bounces and falls", SLOTS["motion"], MOTION_WORDS) == ["down", "bouncing"]


def test_every_sentence_of_a_pattern_reads_back() -> None:
    choices = Choices(
        Subject("orange", "car"),
        motions=["left", "still"],
        backdrops=["orange", "blue", "nightfall"],
        cameras=["none", "zoom in"],
        sizes=["small"],
        other=Subject("blue", "tree"),
        relations=["left of", "above"],
    )
    pattern = sentence_pattern(choices, SLOTS)
    ways = itertools.product(
        ["moving left", "standing still"],
        ["to the left of", "above"],
        ["on an orange background", "on a blue background", "as day turns to night"],
        ["", ", the camera zooms in"],
    )
    for motion, relation, place, camera in ways:
        text = f"a small orange car {motion} {relation} a blue tree {place}{camera}"
        assert re.fullmatch(pattern, text), text
        sentence = parse_sentence(text, SLOTS)
        assert sentence is not None
        assert (sentence.size, sentence.color, sentence.kind) == ("small", "orange", "car")
        assert (sentence.motion, sentence.backdrop) == (motion, place)
        assert sentence.other == f"{relation} a blue tree"
        assert sentence.camera == camera.removeprefix(", ")
    for wrong in ("a small red car moving left above a blue tree at night", "a small orange car moving left"):
        assert not re.fullmatch(pattern, wrong)


def test_articles_and_phrases_of_the_cards_own() -> None:
    own = {**SLOTS, "motion": ["hops (twice)"], "backdrop": ["in space."], "camera": ["the view shakes"]}
    pattern = sentence_pattern(Choices(Subject("orange", "ball"), own["motion"], own["backdrop"], own["camera"]), own)
    text = "an orange ball hops (twice) in space., the view shakes"
    assert re.fullmatch(pattern, text)
    sentence = parse_sentence(text, own)
    assert sentence is not None
    assert sentence.motion == "hops (twice)"
    assert phrase("backdrop", "orange", SLOTS) == "on an orange background"
    assert parse_sentence("a ball rolls", SLOTS) is None
