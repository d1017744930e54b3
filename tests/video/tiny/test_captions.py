"""Captions: closed vocabulary, labels that mean what the words say, the documented style."""

import re
from collections import defaultdict

import pytest

from video.tiny import lexicon
from video.tiny.captions import (
    ATTRIBUTES,
    CLASSES,
    EXAMPLES,
    FILLER,
    STYLE,
    WORDS,
    Labels,
    canonical,
    caption,
    phrases,
    split,
)
from video.tiny.tokenizer import split_words
from video.tiny.vocabulary import BACKDROPS, CAMERAS, COLORS, KINDS, MOTIONS, PLAINS, RELATIONS, SCENES, SIZES
from video.tiny.world import compose, sample_scene

SCENES_SAID = [(sample_scene(seed, "train"), seed) for seed in range(4_000)]


def test_a_caption_is_a_function_of_scene_and_seed() -> None:
    scene = sample_scene(3, "train")
    assert caption(scene, 5) == caption(scene, 5) == phrases(scene, 5)[0]
    assert len({caption(scene, seed) for seed in range(50)}) > 40


def test_every_word_is_in_the_closed_list_and_captions_fit_the_tokenizer() -> None:
    known = set(WORDS)
    lengths = []
    for scene, seed in SCENES_SAID:
        text = caption(scene, seed)
        words = split(text)
        assert words == split_words(text)
        assert set(words) <= known and set(split(canonical(scene))) <= known, text
        assert re.fullmatch(r"[a-z ,.]+", text) and "  " not in text and not text.startswith(" ")
        lengths.append(len(words))
    assert max(lengths) <= 63
    assert min(lengths) <= 6 and max(lengths) >= 25
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS) and len(set(WORDS)) == len(WORDS) == len(sorted(WORDS))


def test_captions_use_the_whole_lexicon() -> None:
    said = {word for scene, seed in SCENES_SAID for word in split(caption(scene, seed))}
    tables = (
        lexicon.KIND_WORDS,
        lexicon.COLOR_WORDS,
        lexicon.SIZE_WORDS,
        lexicon.MOTION_WORDS,
        lexicon.SCENE_PHRASES,
        lexicon.SCENE_SENTENCES,
        lexicon.CAMERA_PHRASES,
        lexicon.RELATION_PHRASES,
        lexicon.SIDE_TAILS,
    )
    words = {word for table in tables for texts in table.values() for text in texts for word in split(text)}
    assert words <= said
    for word in (*KINDS, *COLORS, "background", "camera", "video"):
        assert word in said


def test_labels_stand_by_their_words() -> None:
    meant: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for scene, seed in SCENES_SAID:
        text, labels = phrases(scene, seed)
        words = split(text)
        assert len(labels) == len(words)
        for word, label in zip(words, labels, strict=True):
            assert isinstance(label, Labels)
            for attribute in ATTRIBUTES:
                value = getattr(label, attribute)
                assert -1 <= value < len(CLASSES[attribute])
                meant[word][attribute].add(value)
    for kind in KINDS:
        assert meant[kind]["kind"] == {KINDS.index(kind)}
    assert meant["crimson"]["color"] | meant["crimson"]["backdrop"] <= {0, -1}
    assert meant["golden"]["color"] <= {COLORS.index("yellow"), -1}
    assert meant["tiny"]["size"] == {SIZES.index("small")}
    assert meant["huge"]["size"] == {SIZES.index("large")}
    assert meant["bounces"]["motion"] == {MOTIONS.index("bouncing")}
    assert meant["leftward"]["motion"] == {MOTIONS.index("left")}
    assert meant["skyscrapers"]["backdrop"] == {BACKDROPS.index("city")}
    assert meant["zooms"]["camera"] == {CAMERAS.index("zoom in"), CAMERAS.index("zoom out")}
    assert meant["beneath"]["relation"] == {RELATIONS.index("below")}


def test_labels_say_all_that_the_scene_holds() -> None:
    for scene, seed in SCENES_SAID[:1000]:
        _, labels = phrases(scene, seed)
        for thing in scene.things:
            said = (COLORS.index(thing.color), KINDS.index(thing.kind), MOTIONS.index(thing.motion))
            assert any((label.color, label.kind, label.motion) == said for label in labels)
        assert BACKDROPS.index(scene.backdrop) in {label.backdrop for label in labels}
        if scene.camera != "none":
            assert CAMERAS.index(scene.camera) in {label.camera for label in labels}
        assert (scene.relation is not None) == any(label.relation >= 0 for label in labels)


def test_the_relation_said_is_the_relation_meant() -> None:
    scene = compose(
        [("ball", "red", "small", "still"), ("star", "blue", "small", "still")], "white", "none", "left of", 1
    )
    for seed in range(200):
        text = caption(scene, seed)
        first = min(text.find(w) for w in ("ball", "sphere") if w in text)
        second = text.find("star")
        assert (" left of" in text) == (first < second), text


def test_filler_means_nothing_and_keeps_labels_aligned() -> None:
    meaning = {w for table in (lexicon.KIND_WORDS, lexicon.COLOR_WORDS) for texts in table.values() for w in texts}
    assert not meaning & set(FILLER) and set(FILLER) < set(WORDS)
    longer = 0
    for scene, seed in SCENES_SAID[:500]:
        text, labels = phrases(scene, seed, filler=1.0)
        assert len(split(text)) == len(labels)
        longer += len(split(text)) > len(split(caption(scene, seed)))
    assert longer == 500
    with pytest.raises(ValueError, match=r"filler must be in 0\.\.1, got 2"):
        phrases(SCENES_SAID[0][0], 0, filler=2.0)


def test_the_canonical_caption() -> None:
    scene = compose([("ball", "orange", "medium", "bouncing")], "blue")
    assert canonical(scene) == "an orange ball bouncing on a blue background"
    scene = compose([("boat", "white", "large", "right")], "sea", "none")
    assert canonical(scene) == "a large white boat moving right at sea"
    scene = compose([("tree", "red", "small", "still")], "snow", "zoom in")
    assert canonical(scene) == "a small red tree standing still in the snow, the camera zooms in"
    pair = [("house", "pink", "medium", "still"), ("bird", "blue", "small", "up")]
    expected = "a pink house standing still to the left of a small blue bird moving up on an orange background"
    assert canonical(compose(pair, "orange", "none", "left of")) == expected


def test_the_style_names_every_word_and_the_examples_follow_it() -> None:
    known = set(WORDS)
    for word in (*KINDS, *COLORS):
        assert word in split(STYLE)
    for text in EXAMPLES:
        assert set(split(text)) <= known
    assert set(split(STYLE)) <= known
    assert len(SCENES) + len(PLAINS) == len(BACKDROPS)
