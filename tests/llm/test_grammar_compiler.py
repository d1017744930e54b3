"""Grammars compiled for several threads: kept, refused once and for all, and never the end of an engine."""

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
