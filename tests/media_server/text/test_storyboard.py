"""Storyboards: schemas that any writer's text keeps, exact lengths, continuation, and texts that cannot be used."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.models.card import VideoCard
from media_server.text.caption import parse_sentence
from media_server.text.storyboard import Ask, StoryboardError, Task, split_frames, write_storyboard
from media_server.text.wording import MOODS, NAMES
from tests.cards import CAPTIONED_CARD, SLOTS
from tests.media_server.text.conftest import RandomWriter

FREE_CARD = CAPTIONED_CARD.model_copy(
    update={
        "caption_style": CAPTIONED_CARD.caption_style.model_copy(  # type: ignore[union-attr]
            update={"slots": None, "text": "Describe light, lens and movement.", "examples": []}
        )
    }
)


def run(task: Task, writer: Any) -> tuple[str, dict[str, Any]]:
    steps = write_storyboard(task, writer)
    text = ""
    while True:
        try:
            text += next(steps)
        except StopIteration as end:
            return text, end.value


def task(idea: str = "A red ball meets a blue star", *, card: VideoCard = CAPTIONED_CARD, **fields: Any) -> Task:
    return Task(**{"idea": idea, "num_frames": 128, "fps": 16, "seed": 3, "card": card, "num_shots": 4, **fields})


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_model_writes_is_a_storyboard(seed: int) -> None:
    text, board = run(task(seed=seed), RandomWriter(seed))
    assert json.loads(text)["title"] == board["title"]
    assert [shot["index"] for shot in board["shots"]] == [0, 1, 2, 3]
    assert sum(shot["num_frames"] for shot in board["shots"]) == 128
    assert board["seconds"] == 8.0
    assert [person["look"] for person in board["characters"]] == ["a red ball", "a blue star"]
    assert board["palette"][0] == "red"
    assert len(set(board["palette"])) == 3
    for shot in board["shots"]:
        sentence = parse_sentence(shot["prompt"], SLOTS)
        assert sentence is not None
        assert (sentence.color, sentence.kind) == ("red", "ball")
        # neither thing may stand before a wall of its own colour
        assert sentence.backdrop not in ("on a red background", "on a blue background")
        assert set(shot) == {"index", "prompt", "seconds", "num_frames", "camera", "transition", "notes"}
        assert (shot["camera"] == "still") == (sentence.camera == "")
    assert "a blue star" in board["shots"][3]["prompt"]
    assert "a blue star" not in board["shots"][0]["prompt"]


@pytest.mark.parametrize("seed", range(20))
def test_titles_names_and_moods_are_words(seed: int) -> None:
    _, board = run(task(seed=seed), RandomWriter(seed))
    assert re.search(r"\b(Red )?Ball\b", board["title"])
    assert "  " not in board["title"]
    names = [person["name"] for person in board["characters"]]
    assert set(names) < set(NAMES)
    assert len(set(names)) == 2
    for shot in board["shots"]:
        found = re.fullmatch(r"Mood: (\w+), (\w+)", shot["notes"])
        assert found is not None
        assert set(found.groups()) < set(MOODS)
        assert len(set(found.groups())) == 2


def test_titles_differ_between_seeds() -> None:
    titles = {run(task(seed=seed), RandomWriter(seed))[1]["title"] for seed in range(12)}
    assert len(titles) > 6


@pytest.mark.parametrize("idea", ["A red ball bounces at night", "A red ball", "A small red ball spins in the snow"])
def test_no_shot_repeats_another(idea: str) -> None:
    style = CAPTIONED_CARD.caption_style.model_copy(  # type: ignore[union-attr]
        update={"slots": {slot: words for slot, words in SLOTS.items() if slot not in ("camera", "relation")}}
    )
    still = CAPTIONED_CARD.model_copy(update={"caption_style": style})
    for seed in range(20):
        _, board = run(task(idea, card=still, seed=seed, num_shots=3), RandomWriter(seed))
        assert len({shot["prompt"] for shot in board["shots"]}) == 3


def test_what_the_idea_leaves_open_is_chosen_once_and_kept() -> None:
    for idea, color, kind in (("a penguin", None, "bird"), ("something violet", "purple", None), ("hope", None, None)):
        writer = RandomWriter(1)
        _, board = run(task(idea), writer)
        sentences = [parse_sentence(shot["prompt"], SLOTS) for shot in board["shots"]]
        looks = {(sentence.color, sentence.kind) for sentence in sentences if sentence}
        assert len(looks) == 1
        assert color in (None, looks.copy().pop()[0])
        assert kind in (None, looks.copy().pop()[1])
        assert [ask.grammar.type for ask in writer.asks] == ["choice", "json_schema"]


def test_what_the_idea_names_is_said() -> None:
    _, board = run(task("A tiny red ball bounces at sea"), RandomWriter(0))
    for shot in board["shots"]:
        assert shot["prompt"].startswith("a small red ball")
        assert " at sea" in shot["prompt"]
    assert "bouncing" in board["shots"][0]["prompt"]


def test_hidden_colours_of_the_card_are_kept_apart() -> None:
    style = CAPTIONED_CARD.caption_style
    assert style is not None
    hidden = {place: ["red"] for place in SLOTS["backdrop"] if place != "snow"}
    card = CAPTIONED_CARD.model_copy(update={"caption_style": style.model_copy(update={"hidden_on": hidden})})
    _, board = run(task("a red ball", card=type(CAPTIONED_CARD).model_validate(card.model_dump())), RandomWriter(0))
    assert all(" in the snow" in shot["prompt"] for shot in board["shots"])


def test_free_prompts_are_bounded_and_told_the_style() -> None:
    writer = RandomWriter(2)
    _, board = run(task(card=FREE_CARD, style="noir"), writer)
    assert all(0 < len(shot["prompt"]) <= 280 for shot in board["shots"])
    assert "Describe light, lens and movement." in writer.asks[0].messages[-1]["content"]
    assert "Style: noir" in writer.asks[0].messages[-1]["content"]
    assert 1 <= len(board["characters"]) <= 3


@pytest.mark.parametrize("seed", range(6))
def test_no_control_character_reaches_a_storyboard(seed: int) -> None:
    """A JSON string may hold them, and a writer at random writes them."""
    text, board = run(task(card=FREE_CARD, seed=seed), RandomWriter(seed))
    assert _controls(json.loads(text))
    assert not _controls(board)


def test_line_breaks_part_words_and_other_controls_go() -> None:
    prompt = "\tA fox\r\n runs\u0085through \x1b[31mred\x00 snow\x7f, \u200dfar \N{FOX FACE} away.\n"
    board = run(task(card=FREE_CARD, num_shots=1), _writing(prompt))[1]
    assert board["shots"][0]["prompt"] == "A fox runs through [31mred snow, \u200dfar \N{FOX FACE} away."
    # a writer that keeps to no grammar is not let through elsewhere either
    assert (board["title"], board["characters"], board["palette"]) == ("A B", [{"look": "a b", "name": "Al"}], ["r d"])


@pytest.mark.parametrize(
    ("prompt", "message"), [("\x00\x1b \n\x07", "no words"), ("a fox \ud83e runs", "half a surrogate pair")]
)
def test_a_prompt_that_cannot_be_kept_is_written_again(prompt: str, message: str) -> None:
    with pytest.raises(StoryboardError, match=message):
        run(task(card=FREE_CARD, num_shots=1), _writing(prompt))


def _writing(prompt: str) -> Any:
    shot = {"prompt": prompt, "camera": "still", "transition": "cut", "pace": "slow", "notes": "Mood: a\x01, b"}
    board = {
        "title": "A\nB",
        "characters": [{"look": "a\tb", "name": "A\x02l"}],
        "palette": ["r\x0bd"],
        "shots": [shot],
    }
    return lambda ask: iter([json.dumps(board)])


def _controls(value: Any) -> set[str]:
    text = json.dumps(value, ensure_ascii=True)
    return set(re.findall(r"\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\[bfnrt]|\x7f", text))


def test_long_storyboards_are_continued() -> None:
    writer = RandomWriter(4)
    text, board = run(task(num_frames=16 * 60, num_shots=30), writer)
    assert len(board["shots"]) == 30
    assert [shot["index"] for shot in board["shots"]] == list(range(30))
    assert sum(shot["num_frames"] for shot in board["shots"]) == 960
    assert len(writer.asks) == 3
    assert board["shots"][11]["prompt"] in writer.asks[1].messages[-1]["content"]
    assert text.count('"title"') == 1


def test_the_same_seed_asks_the_same_and_another_attempt_does_not() -> None:
    def asked(**fields: Any) -> list[Ask]:
        writer = RandomWriter(0)
        run(task("hope", **fields), writer)
        return writer.asks

    assert asked() == asked()
    assert asked()[-1].grammar != asked(seed=4)[-1].grammar
    assert asked()[-1].seed != asked(attempt=1)[-1].seed


@pytest.mark.parametrize("text", ["", '{"title": "A', '{"title": "A b", "shots": []}', "[1]"])
def test_texts_that_cannot_be_used_are_told_apart(text: str) -> None:
    with pytest.raises(StoryboardError):
        run(task(), lambda ask: iter([text]))
    with pytest.raises(StoryboardError, match="chose no subject"):
        run(task("hope"), lambda ask: iter(["a dragon"]))


@given(
    total=st.integers(1, 5000),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=60),
)
def test_frames_sum_exactly_and_follow_the_weights(total: int, weights: list[float]) -> None:
    weights = weights[:total]
    counts = split_frames(total, weights, most=total)
    assert sum(counts) == total
    assert min(counts) >= 1
    spare = total - len(weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 1 - spare * weight / sum(weights)) < 1


@given(
    most=st.integers(1, 200),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=60),
    data=st.data(),
)
def test_no_shot_is_longer_than_it_may_be(most: int, weights: list[float], data: st.DataObject) -> None:
    total = data.draw(st.integers(len(weights), most * len(weights)))
    counts = split_frames(total, weights, most=most)
    assert sum(counts) == total
    assert min(counts) >= 1 and max(counts) <= most


def test_what_a_slow_shot_cannot_take_goes_to_the_others_by_their_pace() -> None:
    assert split_frames(100, [1.0, 2.0, 7.0], most=40) == [20, 40, 40]
    assert split_frames(103, [1.0, 2.0, 7.0], most=60) == [15, 28, 60]


def test_a_storyboard_keeps_to_the_clips_of_its_model() -> None:
    limits = CAPTIONED_CARD.limits.model_copy(update={"max_seconds": 2})
    card = CAPTIONED_CARD.model_copy(update={"limits": limits})
    for seed in range(3):
        _, board = run(task(card=card, num_frames=126, seed=seed), RandomWriter(seed))
        assert max(shot["num_frames"] for shot in board["shots"]) <= 32
        assert sum(shot["num_frames"] for shot in board["shots"]) == 126
    assert task(card=card, num_frames=129, num_shots=None).shots == 5
    with pytest.raises(StoryboardError, match=r"4 shots of .* hold 128 frames, not 129"):
        run(task(card=card, num_frames=129), RandomWriter(0))


def test_shots_are_made_in_one_piece_where_they_can_be() -> None:
    frames = CAPTIONED_CARD.frames.model_copy(update={"max": 33})
    card = CAPTIONED_CARD.model_copy(update={"frames": frames})
    # 8 s of 16 frames a second in pieces of 33 frames, by hand
    assert [task(card=card, num_frames=16 * seconds, num_shots=None).shots for seconds in (1, 2, 4, 8)] == [1, 1, 2, 4]
    for seed in range(3):
        _, board = run(task(card=card, num_frames=128, num_shots=None, seed=seed), RandomWriter(seed))
        assert max(shot["num_frames"] for shot in board["shots"]) <= 33
        assert sum(shot["num_frames"] for shot in board["shots"]) == 128
    # who asks for fewer shots has longer ones
    _, board = run(task(card=card, num_frames=128, num_shots=3), RandomWriter(0))
    assert sum(shot["num_frames"] for shot in board["shots"]) == 128
    # pieces of less than a second are no shots
    assert task(card=card, num_frames=480, fps=60, num_shots=None).shots == 3


@pytest.mark.parametrize(("seconds", "shots"), [(1, 1), (5, 2), (8, 3), (10, 4), (60, 24), (600, 100)])
def test_shots_by_length(seconds: int, shots: int) -> None:
    assert task(num_frames=seconds * 16, num_shots=None).shots == shots
