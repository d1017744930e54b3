"""The sentences of storyboards are those of the embedded video model's own canonical captions."""

import itertools

from media_server.text.caption import Choices, parse_sentence, sentence_pattern
from media_server.text.subjects import Subject
from tests.cards import SLOTS
from video.tiny.captions import canonical
from video.tiny.vocabulary import BACKDROPS, CAMERAS, COLORS, KINDS, MOTIONS, RELATIONS, SIZES
from video.tiny.world import Scene, Thing


def scenes() -> list[Scene]:
    """Every motion, place, camera move, size, kind and colour, each at least once."""
    ways = itertools.zip_longest(MOTIONS, BACKDROPS, CAMERAS, SIZES, KINDS, COLORS)
    defaults = ("left", "day", "none", "medium", "ball", "red")
    found = []
    for way in ways:
        motion, backdrop, camera, size, kind, color = (value or default for value, default in zip(way, defaults))  # noqa: B905
        thing = Thing(kind=kind, color=color, size=size, motion=motion)
        found.append(Scene(things=(thing,), backdrop=backdrop, camera=camera, relation=None, seed=0))
    return found


def test_every_canonical_caption_is_a_sentence_of_the_slots() -> None:
    for scene in scenes():
        sentence = parse_sentence(canonical(scene), SLOTS)
        assert sentence is not None, canonical(scene)
        thing = scene.things[0]
        assert (sentence.color, sentence.kind) == (thing.color, thing.kind)
        assert sentence.size == ("" if thing.size == "medium" else thing.size)
        assert (sentence.camera == "") == (scene.camera == "none")


def test_every_sentence_of_one_choice_is_the_canonical_caption() -> None:
    for scene in scenes():
        thing = scene.things[0]
        choices = Choices(
            Subject(thing.color, thing.kind), [thing.motion], [scene.backdrop], [scene.camera], sizes=[thing.size]
        )
        pattern = sentence_pattern(choices, {**SLOTS, "size": list(SIZES)})
        # with one choice for each slot the pattern is the sentence, but for its brackets
        assert pattern.replace("(?:", "").replace(")", "") == canonical(scene)


def test_relations_are_worded_alike() -> None:
    for relation in RELATIONS:
        things = (Thing("ball", "red", "medium", "left"), Thing("star", "blue", "medium", "still"))
        said = canonical(Scene(things=things, backdrop="night", camera="none", relation=relation, seed=0))
        choices = Choices(
            Subject("red", "ball"), ["left"], ["night"], [], other=Subject("blue", "star"), relations=[relation]
        )
        # a second thing at rest goes without saying so
        ours = sentence_pattern(choices, SLOTS).replace("(?:", "").replace(")", "")
        assert ours == said.replace(" standing still", "")
