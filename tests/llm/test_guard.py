"""The collapse guard: nothing clean is cut, everything planted is caught, and what is caught was held back."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llm.guard import DIGITS, LETTERS, LOOP, RULER, RUN, SUSPECT, Guard, first_collapse, kind_of
from tests.llm.embedded import embedded_model

__all__ = ["embedded_model"]

PIECE = 256
SEED = 20261201


def clean_texts() -> Iterator[str]:
    """Give texts that people wrote, tables, rulers, code and data among them, but not the library's own tests."""
    metadata = sorted(Path(sysconfig.get_path("purelib")).rglob("METADATA"))
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(library.rglob("*.py")) if not {"test", "tests", "site-packages"} & {*path.parts}]
    random.Random(SEED).shuffle(modules)
    for path in [*metadata, *modules]:
        yield path.read_text(encoding="utf-8", errors="replace")


def tokens_of(text: str) -> list[tuple[int, bytes]]:
    """Cut a text into words with the space before them, as a tokenizer does; equal words are equal tokens."""
    words = [f" {word}" for word in text.split(" ")]
    return [(hash(word), word.encode()) for word in words]


@pytest.fixture
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json"))


@pytest.mark.parametrize("pieces", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.slow
@pytest.mark.spread
def test_no_clean_text_is_cut(pieces: int, tokenizer: Tokenizer) -> None:
    spelled = {token: tokenizer.decode([token]).encode() for token in range(tokenizer.get_vocab_size())}
    count = 0
    for text in clean_texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids) - PIECE // 4, PIECE):
            piece = ids[start : start + PIECE]
            cut = first_collapse((token, spelled[token]) for token in piece)
            assert cut is None, tokenizer.decode(piece[max(0, cut - 40) : cut])
            count += 1
            if count == pieces:
                return
    # a library without its sources has fewer
    assert count > pieces // 4


def test_every_planted_collapse_is_caught_in_time(tokenizer: Tokenizer) -> None:
    """One token, or a circle of a few, at a place drawn at random in a clean text."""
    draw = random.Random(SEED)
    text = tokenizer.encode(Path(random.__file__).read_text(), add_special_tokens=False).ids
    vocabulary = tokenizer.get_vocab_size()
    for _ in range(1000):
        begin = draw.randrange(len(text) - 200)
        before = text[begin : begin + draw.randrange(1, 100)]
        circle = [draw.randrange(20, vocabulary) for _ in range(draw.choice((1, 1, 1, 2, 3, 5, 8)))]
        broken = before + circle * (300 // len(circle))
        cut = first_collapse((token, tokenizer.decode([token]).encode()) for token in broken)
        assert cut is not None, tokenizer.decode(circle)
        assert cut - len(before) <= max(RULER, LOOP) + len(circle)
        kind = kind_of(tokenizer.decode(circle))
        if len(set(circle)) == 1 and kind == "word":
            assert cut - len(before) <= RUN, tokenizer.decode(circle)


@pytest.mark.parametrize(
    ("text", "count", "limit"),
    [
        (" the", 40, RUN),
        ("A", 40, LETTERS),
        ("!", 40, LETTERS),
        ("0", 100, DIGITS),
        ("-", 300, RULER),
        ("    ", 300, RULER),
        ("| ", 300, RULER),
        ("\n", 300, RULER),
    ],
)
def test_how_long_is_too_long(text: str, count: int, limit: int) -> None:
    assert first_collapse([(7, text.encode())] * count) == limit
    assert first_collapse([(7, text.encode())] * (limit - 1)) is None


def test_digits_are_a_grammars_own_affair_for_as_long_as_a_ruler() -> None:
    digits = [(7, b"3")] * (RULER - 1)
    assert first_collapse(digits) == DIGITS
    assert first_collapse(digits, in_grammar=True) is None
    assert first_collapse([*digits, (7, b"3")], in_grammar=True) == RULER


def test_a_circle_of_words_is_caught_and_a_refrain_is_not() -> None:
    line = tokens_of("the wheels on the bus go round and round")
    assert first_collapse(line * 8) is None
    cut = first_collapse(line * 40)
    assert cut is not None
    assert LOOP <= cut <= LOOP + len(line)


def test_what_is_cut_was_held_back_from_where_it_began_to_repeat() -> None:
    guard = Guard()
    for token, said in tokens_of("it was a very"):
        assert guard.push(token, said).num_suspect == 0
    verdicts = [guard.push(*tokens_of("very")[0]) for _ in range(RUN - 1)]
    # the first " very" was sent before anything was suspect, the second in a row is
    assert [verdict.num_suspect for verdict in verdicts] == [SUSPECT, SUSPECT + 1, RUN]
    assert [verdict.is_collapsed for verdict in verdicts] == [False, False, True]


def test_a_suspect_is_cleared_by_another_token() -> None:
    guard = Guard()
    very = tokens_of("very")[0]
    assert [guard.push(*very).num_suspect for _ in range(3)] == [0, SUSPECT, SUSPECT + 1]
    assert guard.push(*tokens_of("long")[0]).num_suspect == 0
    assert not guard.push(*very).is_collapsed


def test_verdicts_do_not_depend_on_how_much_came_before() -> None:
    prose = [(index, f" w{index}".encode()) for index in range(1000)]
    for before in (0, 1, 31, 127, 128, 129, 500):
        assert first_collapse([*prose[:before], *[(5000, b" again")] * 10]) == before + RUN
        circle = [(6000, b" on"), (6001, b" and")]
        cut = first_collapse([*prose[:before], *circle * 200])
        assert cut == before + LOOP
