"""From tokens to text, one at a time: UTF-8 is never cut, stop strings never leak.

Invariant: what is released in the end depends on the bytes alone, not on how they were cut into tokens or steps.
The stop string that is complete first ends the text; of several complete at the same character the longest does.
"""

import codecs
from collections import deque
from collections.abc import Sequence

from llm.request import TokenLogprob


class Detokenizer:
    """The text of one sequence, from its first token to its last."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self._stop = sorted(stop, key=len, reverse=True)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        # tokens not yet given out, each with the number of characters that the text had after it
        self._tokens: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._num_chars = 0
        self._num_released = 0

    def push(self, token_id: int, token_bytes: bytes, logprob: TokenLogprob | None = None) -> str:
        """Take a token and return the text that is certain now; sets `is_stopped` if a stop string is complete."""
        assert not self.is_stopped, "a stopped text takes no more tokens"
        for character in self._decoder.decode(token_bytes):
            self._held += character
            self._num_chars += 1
            for stop in self._stop:
                if self._held.endswith(stop):
                    self._held = self._held[: -len(stop)]
                    self._num_chars -= len(stop)
                    self.is_stopped = True
                    return self._release(len(self._held))
        self._tokens.append((token_id, self._num_chars, logprob))
        return self._release(len(self._held) - self._num_open())

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
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self._tokens and self._tokens[0][1] <= self._num_released:
            token_id, _, logprob = self._tokens.popleft()
            token_ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        return tuple(token_ids), tuple(logprobs)

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._num_released += count
        return text

    def _num_open(self) -> int:
        """Count the characters at the end that may be the beginning of a stop string."""
        longest = min(len(self._held), len(self._stop[0]) - 1) if self._stop else 0
        for count in range(longest, 0, -1):
            tail = self._held[-count:]
            if any(stop.startswith(tail) for stop in self._stop):
                return count
        return 0
