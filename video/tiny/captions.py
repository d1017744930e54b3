"""Captions of the tiny world: one scene said in varied natural words, with the meaning of each word.

A caption is lower case; its words are runs of letters, as the tokenizer splits them (punctuation says nothing).
Invariants: a caption is a function of (scene, seed); each of its words is in `WORDS`; it has at most 63 words; kind,
colour and motion of the first thing and the backdrop are always said (stillness may be left unsaid).
"""

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from video.tiny import lexicon
from video.tiny.vocabulary import BACKDROPS, CAMERAS, COLORS, KINDS, MOTIONS, PLAINS, RELATIONS, SIZES
from video.tiny.world import Scene, Thing, pick

STYLE = """\
One short sentence in plain lower-case words: a or an, an optional size (small, large), a colour, a thing, what it does,
and where. Things: ball, square, triangle, star, car, boat, tree, house, bird, sun, moon. Colours: red, orange, yellow,
green, cyan, blue, purple, pink, white, black. It is moving left, moving right, moving up, moving down, growing,
shrinking, bouncing, spinning or standing still. Where: on a <colour> background, on a sunny day, at night, at sea,
in the snow, in the rain, in the city, or as day turns to night. A second thing may be to the left of, to the right of,
above or below the first. It may end with: the camera pans left, pans right, zooms in or zooms out.\
"""
EXAMPLES = (
    "a red ball bouncing on a blue background",
    "a small yellow bird moving left on a sunny day",
    "a large white boat moving right at sea",
    "a green tree standing still in the snow, the camera zooms in",
    "a purple star spinning at night",
    "a pink house to the left of a blue tree in the rain",
    "an orange car moving left in the city",
    "a yellow moon moving up as day turns to night",
)


class Labels(NamedTuple):
    """What a word's phrase says: indices into KINDS, COLORS and so on, or -1 where it says nothing of that.

    The words of a thing's phrase and of its motion carry all that is said of that thing.
    """

    color: int = -1
    kind: int = -1
    size: int = -1
    motion: int = -1
    backdrop: int = -1
    camera: int = -1
    relation: int = -1


ATTRIBUTES: tuple[str, ...] = Labels._fields
CLASSES: dict[str, tuple[str, ...]] = {
    "color": COLORS,
    "kind": KINDS,
    "size": SIZES,
    "motion": MOTIONS,
    "backdrop": BACKDROPS,
    "camera": CAMERAS,
    "relation": RELATIONS,
}
_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

Phrase = tuple[str, Labels]


def caption(scene: Scene, seed: int) -> str:
    """Say a scene in words drawn from `seed`: "a little crimson ball hops up and down, it is night"."""
    return phrases(scene, seed)[0]


def phrases(scene: Scene, seed: int, filler: float = 0.0) -> tuple[str, tuple[Labels, ...]]:
    """Say a scene and label each word.

    Args:
        scene: what to say.
        seed: draws the words; the same seed gives the same caption.
        filler: chance, 0..1, that one to three meaningless common words are strewn in, so that a text encoder
            learns to look past words it has no use for; a fifth of them are not in `WORDS`.

    Returns: the caption, and the labels of word i of `split(caption)`.

    Raises:
        ValueError: `filler` is outside 0..1.
    """
    if not 0 <= filler <= 1:
        raise ValueError(f"phrases: filler must be in 0..1, got {filler}")
    rng = random.Random(f"caption {seed}")
    said = _one_thing(rng, scene) if scene.relation is None else _two_things(rng, scene, scene.relation)
    said = _with_camera(rng, said, scene.camera)
    words = [(word, labels) for text, labels in said for word in text.split()]
    if rng.random() < filler:
        for _ in range(1 + int(3 * rng.random())):
            place = int(len(words) * rng.random())
            word = pick(rng, FILLER) if rng.random() < 0.8 else "thingamabob"
            words.insert(place, (word, words[place][1]))
    text = re.sub(r" ([,.])", r"\1", _with_articles(" ".join(word for word, _ in words)))
    return text, tuple(labels for word, labels in words if word not in ",.")


def canonical(scene: Scene) -> str:
    """Say a scene in the one caption of the documented style (`STYLE`)."""

    def name(thing: Thing) -> str:
        size = "" if thing.size == "medium" else f"{thing.size} "
        return f"a {size}{thing.color} {thing.kind}"

    def does(thing: Thing) -> str:
        if thing.motion in lexicon.SIDE_TAILS:
            return f"moving {thing.motion}"
        return lexicon.MOTION_WORDS[thing.motion][0].split("|")[0]

    text = f"{name(scene.things[0])} {does(scene.things[0])}"
    if scene.relation is not None:
        text += f" {lexicon.RELATION_PHRASES[scene.relation][0]} {name(scene.things[1])} {does(scene.things[1])}"
    text = _with_articles(f"{text} {_backdrop_phrases(scene.backdrop)[0].format(scene.backdrop)}")
    return text if scene.camera == "none" else f"{text}, {lexicon.CAMERA_PHRASES[scene.camera][0]}"


def _with_articles(text: str) -> str:
    return re.sub(r"\b(a|an)(?= (\w))", lambda m: "an" if m[2] in "aeio" else "a", text)


def split(text: str) -> list[str]:
    """Split a text into its words: runs of lower-case letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def _one_thing(rng: random.Random, scene: Scene) -> list[Phrase]:
    thing = scene.things[0]
    name, labels = _name(rng, thing)
    where, where_labels = _where(rng, scene.backdrop)
    place: Phrase = (where, where_labels)
    gerund, finite = _verbs(rng, thing)
    draw = rng.random()
    if thing.motion == "still" and draw < 0.25:
        return _opened(rng, [(name, labels), place])
    if draw < 0.40:
        return _opened(rng, [(f"{name} {gerund}", labels), place])
    if draw < 0.60:
        return [(f"{name} {finite}", labels), place]
    if draw < 0.72:
        return [place, (f", {name} {finite}", labels)]
    if draw < 0.80:
        return [(name, labels), place, (f", it is {gerund}" if thing.motion != "still" else f", it {finite}", labels)]
    if draw < 0.86:
        return _opened(rng, [(f"{name} that {finite}", labels), place])
    return [(f"{name} {finite} .", labels), _sentence(rng, scene.backdrop)]


def _two_things(rng: random.Random, scene: Scene, relation: str) -> list[Phrase]:
    first, second = scene.things
    if rng.random() < 0.3:
        first, second, relation = second, first, _INVERSE[relation]
    (name, labels), (other, other_labels) = _name(rng, first), _name(rng, second)
    (gerund, finite), (other_gerund, other_finite) = _verbs(rng, first), _verbs(rng, second)
    side: Phrase = (pick(rng, lexicon.RELATION_PHRASES[relation]), Labels(relation=RELATIONS.index(relation)))
    place = _where(rng, scene.backdrop)
    draw = rng.random()
    first_rests = first.motion == "still" and rng.random() < 0.6
    second_rests = second.motion == "still" and rng.random() < 0.7
    if draw < 0.55:
        said = [(name if first_rests else f"{name} {gerund if draw < 0.35 else finite}", labels), side]
        said.append((other if second_rests else f"{other} {other_gerund}", other_labels))
        return [place, (",", place[1]), *said] if draw % 0.1 < 0.02 else [*said, place]
    if draw < 0.8:
        shown = [(name, labels), side, (other, other_labels), place]
        shown.append((f", the {_bare(rng, first)} {finite}", labels))
        return shown if second_rests else [*shown, (f"and the {_bare(rng, second)} {other_finite}", other_labels)]
    said = [(f"{name} {finite}", labels), side, (f"{other} .", other_labels)]
    if not second_rests:
        said.append((f"the {_bare(rng, second)} {other_finite} .", other_labels))
    return [*said, _sentence(rng, scene.backdrop)]


def _opened(rng: random.Random, said: list[Phrase]) -> list[Phrase]:
    return said if rng.random() > 0.25 else [(pick(rng, lexicon.OPENINGS), said[0][1]), *said]


def _with_camera(rng: random.Random, said: list[Phrase], camera: str) -> list[Phrase]:
    if camera == "none" and rng.random() > 0.03:
        return said
    text, labels = pick(rng, lexicon.CAMERA_PHRASES[camera]), Labels(camera=CAMERAS.index(camera))
    joint = pick(rng, (",", ",", ".", "while" if text.startswith("the") else ","))
    if rng.random() < 0.15:
        return [(f"{text} ,", labels), *said]
    return [*said, (f"{joint} {text}", labels)]


def _name(rng: random.Random, thing: Thing) -> Phrase:
    """Name a thing with its colour, and mostly its size where that is out of the ordinary."""
    says_size = rng.random() < (0.15 if thing.size == "medium" else 0.65)
    words = [pick(rng, ("a", "a", "a", "a", "a", "a", "a", "the", "one"))]
    if says_size:
        words.append(pick(rng, lexicon.SIZE_WORDS[thing.size]))
    if rng.random() < 0.1:
        words.append(pick(rng, lexicon.ADJECTIVES))
    words += [pick(rng, lexicon.COLOR_WORDS[thing.color]), pick(rng, lexicon.KIND_WORDS[thing.kind])]
    labels = Labels(
        color=COLORS.index(thing.color),
        kind=KINDS.index(thing.kind),
        size=SIZES.index(thing.size) if says_size else -1,
        motion=MOTIONS.index(thing.motion),
    )
    return " ".join(words), labels


def _bare(rng: random.Random, thing: Thing) -> str:
    return thing.kind if rng.random() < 0.7 else f"{thing.color} {thing.kind}"


def _verbs(rng: random.Random, thing: Thing) -> tuple[str, str]:
    """Choose one verb phrase: (gerund, finite), such as ("slowly rolling left", "slowly rolls left")."""
    tail = ""
    if thing.motion in lexicon.SIDE_TAILS:
        own = lexicon.KIND_MOVES.get(thing.kind, ())
        verb = pick(rng, own if own and rng.random() < 0.5 else lexicon.ANY_MOVE)
        tail = " " + pick(rng, lexicon.SIDE_TAILS[thing.motion])
    else:
        verb = pick(rng, lexicon.MOTION_WORDS[thing.motion])
    gerund, finite = (form + tail for form in verb.split("|"))
    if thing.motion != "still" and rng.random() < 0.12:
        adverb = pick(rng, lexicon.ADVERBS)
        return f"{adverb} {gerund}", f"{adverb} {finite}"
    return gerund, finite


def _backdrop_phrases(backdrop: str) -> tuple[str, ...]:
    return lexicon.PLAIN_PHRASES if backdrop in PLAINS else lexicon.SCENE_PHRASES[backdrop]


def _where(rng: random.Random, backdrop: str) -> Phrase:
    return _in_color(rng, pick(rng, _backdrop_phrases(backdrop)), backdrop)


def _sentence(rng: random.Random, backdrop: str) -> Phrase:
    """Say the backdrop in a sentence of its own."""
    sentences = lexicon.PLAIN_SENTENCES if backdrop in PLAINS else lexicon.SCENE_SENTENCES[backdrop]
    return _in_color(rng, pick(rng, sentences), backdrop)


def _in_color(rng: random.Random, text: str, backdrop: str) -> Phrase:
    color = pick(rng, lexicon.COLOR_WORDS[backdrop]) if backdrop in PLAINS else ""
    return text.format(color), Labels(backdrop=BACKDROPS.index(backdrop))


def _words(texts: Iterable[Sequence[str]]) -> set[str]:
    return {word for group in texts for text in group for word in split(text)}


def _meaning() -> set[str]:
    """Collect the words that carry meaning in some caption."""
    tables = (
        lexicon.KIND_WORDS, lexicon.COLOR_WORDS, lexicon.SIZE_WORDS, lexicon.KIND_MOVES, lexicon.SIDE_TAILS,
        lexicon.MOTION_WORDS, lexicon.SCENE_PHRASES, lexicon.SCENE_SENTENCES, lexicon.CAMERA_PHRASES,
        lexicon.RELATION_PHRASES,
    )  # fmt: skip
    lists = (lexicon.ANY_MOVE, lexicon.PLAIN_PHRASES, lexicon.PLAIN_SENTENCES, KINDS, COLORS, EXAMPLES, (STYLE,))
    return _words(group for table in tables for group in table.values()) | _words(lists)


_GLUE = ("a an the one that it is and while",)
FILLER: tuple[str, ...] = tuple(sorted(_words([lexicon.COMMON]) - _meaning() - _words([_GLUE])))
WORDS: tuple[str, ...] = tuple(
    sorted(_meaning() | _words([lexicon.COMMON, lexicon.ADVERBS, lexicon.OPENINGS, lexicon.ADJECTIVES, _GLUE]))
)
