"""The collapse guard: tells a text that has begun to repeat itself without end from one that draws a line.

A runtime that goes wrong (a kernel, a cache, a quantised layer) shows it as one token again and again, or as a few in
a circle. What is suspect is held back from the stream until another token clears it; what has gone on for too long is
a collapse, of which nothing was sent but its beginning, before it was suspect: of a word the first one.

How long is too long depends on what is repeated:

    a word                                  RUN times the same token; a circle of LOOP tokens and LOOP_TIMES times
    pieces of one character, and marks      LETTERS tokens (AAAA, !!!!, the end of a nested expression)
    digits                                  DIGITS tokens; as many as a ruler may have within a grammar
    rulers, lines of tables, white space    RULER tokens: even those end

The figures were chosen on 10,000 pieces of Python's own library and of packages' descriptions, of 256 tokens each
(tests/llm/test_guard.py): none is cut.

Invariant: a verdict depends on the tokens since the start of the answer alone, not on how they came in steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

RUN = 4
LOOP, LOOP_TIMES, LONGEST_LOOP = 192, 4, 16
LETTERS = 24
DIGITS = 48
RULER = 192
# a run of this many words or letters is suspect: it is held back, as a rule for one token
SUSPECT = 2
SUSPECT_LOOP = 48

Kind = Literal["word", "letter", "digits", "ruler"]

_RULES = frozenset("-=_*#~.+|:/\\<>^`'\"(),;[]{}&%$@·•…—─━│┃┄┅═║╌▁█░▒▓")


@dataclass(frozen=True)
class Verdict:
    """num_suspect: tokens at the end that are to be held back; is_collapsed: they are a collapse."""

    num_suspect: int = 0
    is_collapsed: bool = False


_CLEAR = Verdict()


def kind_of(text: str) -> Kind:
    """Say what a repeated piece of text is."""
    inked = [character for character in text if not character.isspace()]
    if all(character in _RULES for character in inked):
        return "ruler"
    if all(character in _RULES or character.isdigit() for character in inked):
        return "digits"
    if not any(character.isalnum() for character in inked):
        return "letter"
    return "letter" if len(set(inked)) == 1 and not text[:1].isspace() else "word"


class Guard:
    """Watches one answer; `in_grammar`: a grammar rules it, which counts digits itself."""

    def __init__(self, *, in_grammar: bool = False) -> None:
        self.in_grammar = in_grammar
        self._tokens: list[int] = []
        self._bytes: list[bytes] = []
        # for each period, how many tokens in a row were the same as the one a period before
        self._same = [0] * (LONGEST_LOOP + 1)

    def push(self, token_id: int, token_bytes: bytes) -> Verdict:
        """Take the next token."""
        if len(self._tokens) > 8 * LONGEST_LOOP:
            del self._tokens[:-LONGEST_LOOP], self._bytes[:-LONGEST_LOOP]
        tokens, same = self._tokens, self._same
        count = len(tokens)
        longest = 0
        if token_id not in tokens[-LONGEST_LOOP:]:
            self._same = [0] * (LONGEST_LOOP + 1)
            tokens.append(token_id)
            self._bytes.append(token_bytes)
            return _CLEAR
        for period in range(1, min(LONGEST_LOOP, count) + 1):
            same[period] = same[period] + 1 if tokens[count - period] == token_id else 0
            longest = max(longest, same[period])
        tokens.append(token_id)
        self._bytes.append(token_bytes)
        return _CLEAR if longest + 1 < SUSPECT else self._judge()

    def _judge(self) -> Verdict:
        """Find the shortest circle that is too long, or the longest stretch that may become one."""
        num_suspect = 0
        for period in range(1, LONGEST_LOOP + 1):
            if not self._same[period]:
                continue
            stretch = self._same[period] + period
            limit, suspect = self._limits(period)
            if stretch >= limit:
                return Verdict(stretch, True)
            if stretch >= suspect:
                num_suspect = max(num_suspect, stretch)
        return Verdict(num_suspect) if num_suspect else _CLEAR

    def _limits(self, period: int) -> tuple[int, int]:
        """Say from how many tokens on a circle of this period is a collapse, and from how many on it is suspect."""
        kind = kind_of(b"".join(self._bytes[-period:]).decode("utf-8", "replace"))
        if kind == "ruler" or (kind == "digits" and self.in_grammar):
            return RULER, RULER
        if kind == "digits":
            return DIGITS, DIGITS
        if kind == "letter":
            return (LETTERS, SUSPECT) if period == 1 else (LOOP, SUSPECT_LOOP)
        if period == 1:
            return RUN, SUSPECT
        return max(LOOP, LOOP_TIMES * period), SUSPECT_LOOP


def first_collapse(tokens: Iterable[tuple[int, bytes]], *, in_grammar: bool = False) -> int | None:
    """Give the number of tokens after which a whole answer is found to have collapsed, or None."""
    guard = Guard(in_grammar=in_grammar)
    for count, (token_id, token_bytes) in enumerate(tokens, start=1):
        if guard.push(token_id, token_bytes).is_collapsed:
            return count
    return None
