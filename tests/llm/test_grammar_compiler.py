"""Grammars compiled for several threads: kept, refused once and for all, and never the end of an engine."""

import json
import threading

import pytest
from llguidance import LLTokenizer

from llm import grammar as grammars
from llm.errors import RequestRefused
from llm.grammar import GrammarCompiler
from llm.request import Grammar


def byte(tokenizer: LLTokenizer, letter: str) -> int:
    (token_id,) = tokenizer.tokenize_str(letter)
    return token_id


CHOICE = Grammar("choice", '["left", "right"]')


def test_what_was_compiled_or_refused_is_not_compiled_again(
    ll_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(ll_tokenizer)
    bad = Grammar("regex", "(")
    first = compiler.compile(CHOICE)
    with pytest.raises(RequestRefused, match="the regex is"):
        compiler.compile(bad)
    again: list[Grammar] = []
    monkeypatch.setattr(compiler, "_compile", again.append)
    # each request has a matcher of its own
    assert first.consume_token(byte(ll_tokenizer, "l"))
    assert compiler.compile(CHOICE).consume_token(byte(ll_tokenizer, "r"))
    with pytest.raises(RequestRefused, match="the regex is") as refused:
        compiler.compile(bad)
    assert refused.value.param == "grammar"
    assert again == []


def test_a_panic_is_a_refusal_and_an_interrupt_is_not(
    ll_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As pyo3 has it."""

    compiler = GrammarCompiler(ll_tokenizer)

    def fail(error: BaseException) -> None:
        def raise_it(_: Grammar) -> None:
            raise error

        monkeypatch.setattr(compiler, "_compile", raise_it)

    fail(Panic())
    with pytest.raises(RequestRefused, match="llguidance gives up on it") as refused:
        compiler.compile(CHOICE)
    assert refused.value.code == "grammar_too_complex"
    fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(Grammar("choice", '["another"]'))


def test_many_threads_share_a_cache_that_stays_small(ll_tokenizer: LLTokenizer) -> None:
    compiler = GrammarCompiler(ll_tokenizer)
    wrong: list[str] = []

    def work(thread: int) -> None:
        for number in range(60):
            word = chr(ord("a") + (thread * 7 + number) % 26)
            matcher = compiler.compile(Grammar("choice", f'["{word}{number % 40}"]'))
            if not matcher.consume_token(byte(ll_tokenizer, word)):
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(compiler._compiled) <= grammars._MAX_CACHED


def test_ten_thousand_choices_are_held_to(ll_tokenizer: LLTokenizer) -> None:
    choices = [f"{number:05d} \"quoted\" {number * 7919 % 10_007}\n" for number in range(10_000)]
    matcher = GrammarCompiler(ll_tokenizer).compile(Grammar("choice", json.dumps(choices)))
    for token_id in ll_tokenizer.tokenize_str(choices[4711]):
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()
    other = matcher.deep_copy()
    other.reset()
    assert not all(other.consume_token(token_id) for token_id in ll_tokenizer.tokenize_str("00001 quoted"))


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        (Grammar("json_schema", '{"patternProperties": {"^(?=a)": {}}}'), "look-around"),
        (Grammar("regex", "("), "unclosed group"),
    ],
)
def test_a_refusal_says_why(ll_tokenizer: LLTokenizer, grammar: Grammar, cause: str) -> None:
    with pytest.raises(RequestRefused, match=cause):
        GrammarCompiler(ll_tokenizer).compile(grammar)
