"""What a text may be, held by llguidance: JSON schema, any JSON object, regex, Lark, choice.

JSON is written with one space after each comma and colon and none elsewhere: a model cannot loop on whitespace, and all
punctuation is forced, so that it costs no draw. Schemas with parts that are not supported are refused with the reason.
"""

import json
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer

from llm.errors import RequestRefused
from llm.request import Grammar

_MAX_CACHED = 32


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in any thread; the latest are kept, refusals too: requests repeat them."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, LLMatcher | RequestRefused] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Make a matcher at the beginning of the text.

        Raises RequestRefused with llguidance's reason if the grammar is malformed, not supported, or past llguidance's
        limits where the text begins; further on it may be past them yet.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            try:
                found = self._compile_safely(grammar)
            except RequestRefused as refused:
                found = refused
            with self._lock:
                self._compiled[grammar] = found
                self._compiled.move_to_end(grammar)
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        if isinstance(found, RequestRefused):
            # another request's refusal, whose trace is its own
            raise RequestRefused(found.message, param=found.param, code=found.code)
        return found.deep_copy()

    def _compile_safely(self, grammar: Grammar) -> LLMatcher:
        try:
            return self._compile(grammar)
        except (RequestRefused, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # a panic of llguidance is no Exception
            raise RequestRefused(
                f"{grammar.param}: the {grammar.type} is too complex: llguidance gives up on it",
                param=grammar.param,
                code="grammar_too_complex",
            ) from error

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            source = _source(grammar)
        except ValueError as error:
            raise RequestRefused(
                f"{grammar.param}: the {grammar.type} is malformed: {error}", param=grammar.param
            ) from error
        matcher = LLMatcher(self.tokenizer, source, log_level=0)
        if matcher.is_error():
            reason = _reason(matcher)
            raise RequestRefused(f"{grammar.param}: the {grammar.type} is not supported: {reason}", param=grammar.param)
        # a lexer is built as it is used: begin a text, so that most of what is too complex is known before any work
        begun = matcher.deep_copy()
        for token_id in begun.compute_ff_tokens():
            if not begun.consume_token(token_id):
                break
        if not begun.is_stopped():
            begun.compute_bitmask()
        if begun.is_error():
            raise too_complex(grammar, begun)
        return matcher


def too_complex(grammar: Grammar, matcher: LLMatcher) -> RequestRefused:
    """Say which of llguidance's limits a grammar passed; the parser's state, which may quote the text, is left out."""
    message = f"{grammar.param}: the {grammar.type} is too complex: {_reason(matcher)}"
    return RequestRefused(message, param=grammar.param, code="grammar_too_complex")


def _reason(matcher: LLMatcher) -> str:
    """Give the first line of an error, with what it announces: between them the text is quoted."""
    lines = [line.strip() for line in matcher.get_error().strip().splitlines()]
    first = next(iter(lines), "no reason is given")
    cause = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return f"{first} {cause}" if cause is not None and first.endswith(":") else first


def _source(grammar: Grammar) -> str:
    match grammar.type:
        case "json_schema":
            return _json(grammar.value)
        case "json_object":
            return _json('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.value)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.value)
        case "choice":
            choices = json.loads(grammar.value)
            if not choices or not all(isinstance(choice, str) and choice for choice in choices):
                raise ValueError("a list of at least one non-empty string is needed")
            # a terminal: of a rule's alternatives the parser takes two thousand at most
            any_of = " | ".join(json.dumps(choice) for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {any_of}")


def _json(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
