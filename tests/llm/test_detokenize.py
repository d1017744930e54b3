"""Text from tokens: any cut of the same bytes gives the same text; stop strings never leak."""

import random

from hypothesis import given
from hypothesis import strategies as st

from llm.detokenize import Detokenizer

PIECES = st.text(alphabet="abcé한🎬 \n", max_size=24)
STOPS = st.lists(st.text(alphabet="abc한🎬", min_size=1, max_size=4), max_size=3)


def run(chunks: list[bytes], stop: list[str]) -> tuple[str, bool, list[int]]:
    """Give the text, whether a stop string ended it, and the tokens that were given out."""
    detokenizer = Detokenizer(stop)
    text = ""
    tokens: list[int] = []
    for token_id, chunk in enumerate(chunks):
        text += detokenizer.push(token_id, chunk)
        tokens += detokenizer.take_tokens()[0]
        if detokenizer.is_stopped:
            break
    text += detokenizer.finish()
    tokens += detokenizer.take_tokens()[0]
    return text, detokenizer.is_stopped, tokens


def reference(text: str, stop: list[str]) -> tuple[str, bool]:
    """Cut at the stop string whose last character comes first, the longest if several end there."""
    for end in range(1, len(text) + 1):
        if found := [word for word in stop if text[:end].endswith(word)]:
            return text[: end - len(max(found, key=len))], True
    return text, False


def cut(data: bytes, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    chunks = []
    while data:
        size = rng.choice((0, 1, 1, 2, 3, 5, 8))
        chunks.append(data[:size])
        data = data[size:]
    return chunks


@given(text=PIECES, stop=STOPS, seed=st.integers(0, 999))
def test_any_chunks_give_the_text_of_the_whole(text: str, stop: list[str], seed: int) -> None:
    got, is_stopped, _ = run(cut(text.encode(), seed), stop)
    assert (got, is_stopped) == reference(text, stop)


@given(text=PIECES, stop=STOPS, seed=st.integers(0, 999))
def test_nothing_of_a_stop_string_is_ever_released(text: str, stop: list[str], seed: int) -> None:
    wanted, _ = reference(text, stop)
    detokenizer = Detokenizer(stop)
    released = ""
    for token_id, chunk in enumerate(cut(text.encode(), seed)):
        released += detokenizer.push(token_id, chunk)
        assert wanted.startswith(released)
        if detokenizer.is_stopped:
            break


def test_cut_characters_wait_and_a_broken_end_is_marked() -> None:
    film = "🎬".encode()
    assert run([film[:1], film[1:3], film[3:]], [])[0] == "🎬"
    detokenizer = Detokenizer()
    assert detokenizer.push(0, film[:3]) == ""
    assert detokenizer.finish() == "�"


def test_tokens_are_held_with_their_text_and_dropped_with_it() -> None:
    detokenizer = Detokenizer(["END"])
    assert detokenizer.push(1, b"a") == "a"
    assert detokenizer.take_tokens()[0] == (1,)
    assert detokenizer.push(2, b"E") == ""
    assert detokenizer.push(3, b"N") == ""
    assert detokenizer.take_tokens()[0] == ()
    # not a stop string after all
    assert detokenizer.push(4, b"x") == "ENx"
    assert detokenizer.take_tokens()[0] == (2, 3, 4)
    assert detokenizer.push(5, b"bE") == "b"
    assert detokenizer.push(6, b"ND!") == ""
    assert detokenizer.is_stopped
    assert detokenizer.take_tokens()[0] == ()
