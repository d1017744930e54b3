"""From tokens to text, one at a time: UTF-8 is never cut, stop strings never leak.

Invariant: what is released in the end depends on the bytes alone, not on how they were cut into tokens or steps.
The stop string that is complete first ends the text; of several complete at the same character the longest does.
Tokens that are suspect (llm.guard) are held back with their text, and can be taken back.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from llm.request import TokenLogprob


class _Token(NamedTuple):
    """A token not yet certain: the text's characters before and after it, and the decoder's state before it."""

    id: int
    logprob: TokenLogprob | None
    start: int
    end: int
    state: tuple[bytes, int]


class Detokenizer:
    """The text of one sequence, from its first token to its last."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self._stop = sorted(stop, key=len, reverse=True)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._tokens: deque[_Token] = deque()
        # those whose text is released, since they were last taken
        self._certain: list[_Token] = []
        self._num_chars = 0
        self._num_released = 0

    def push(
        self, token_id: int, token_bytes: bytes, logprob: TokenLogprob | None = None, *, num_suspect: int = 0
    ) -> str:
        """Take a token and return the text that is certain now; sets `is_stopped` if a stop string is complete.

        `num_suspect`: so many tokens at the end, this one among them, are held back as far as they are not out yet.
        """
        assert not self.is_stopped, "a stopped text takes no more tokens"
        start, state = self._num_chars, self._decoder.getstate()
        for character in self._decoder.decode(token_bytes):
            self._held += character
            self._num_chars += 1
            for stop in self._stop:
                if self._held.endswith(stop):
                    self._held = self._held[: -len(stop)]
                    self._num_chars -= len(stop)
                    self.is_stopped = True
                    return self._release(len(self._held))
        self._tokens.append(_Token(token_id, logprob, start, self._num_chars, state))
        count = len(self._held) - self._num_open()
        if num_suspect:
            first = self._tokens[-min(num_suspect, len(self._tokens))]
            count = max(0, min(count, first.start - self._num_released))
        return self._release(count, num_suspect)

    def drop(self, num_suspect: int) -> int:
        """Take back the last `num_suspect` tokens, but for those of which text is out; returns how many."""
        num_dropped = 0
        while num_dropped < num_suspect and self._tokens and self._tokens[-1].start >= self._num_released:
            token = self._tokens.pop()
            self._held = self._held[: token.start - self._num_released]
            self._num_chars = token.start
            self._decoder.setstate(token.state)
            num_dropped += 1
        return num_dropped

    def finish(self) -> str:
        """Return what was held back, at the end of a sequence that no stop string ended."""
        if self.is_stopped:
            return ""
        rest = self._decoder.decode(b"", final=True)
        self._held += rest
        self._num_chars += len(rest)
        return self._release(len(self._held))

    def take_tokens(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Return the tokens, and their logprobs if there are any, whose text is released; each is returned once."""
        certain, self._certain = self._certain, []
        return tuple(item.id for item in certain), tuple(item.logprob for item in certain if item.logprob is not None)

    def _release(self, count: int, num_suspect: int = 0) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._num_released += count
        while len(self._tokens) > num_suspect and self._tokens[0].end <= self._num_released:
            self._certain.append(self._tokens.popleft())
        return text

    def _num_open(self) -> int:
        """Count the characters at the end that may be the beginning of a stop string."""
        longest = min(len(self._held), len(self._stop[0]) - 1) if self._stop else 0
        for count in range(longest, 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stop):
                return count
        return 0
