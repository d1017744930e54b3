"""What the engine is asked and what it answers: requests in, one output for each sequence that a step moved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from llm.errors import RequestRefused

GrammarType = Literal["json_schema", "json_object", "regex", "lark", "choice"]
MAX_SEED = 2**64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    # it went on repeating itself, by the reference path too (llm.guard); nothing of what was held back was given out
    COLLAPSE = "collapse"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Grammar:
    """What the text must obey: `value` is a schema as JSON text, a regex, a Lark grammar or a JSON list of choices."""

    type: GrammarType
    value: str

    @property
    def param(self) -> str:
        """Field of a request that it is given by."""
        return "response_format" if self.type in ("json_schema", "json_object") else "grammar"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Order: penalties and bias, grammar, temperature, typical-p, top-k, top-p, min-p, draw.

    A draw depends on `seed` and the position alone, so that any replica draws the same. `max_tokens` None: as many as
    the context holds. `logprobs` is the number of alternatives beside each token, None for no logprobs at all.
    With `collapse_guard` a text that repeats itself without end is tried a second time, then ended (llm.guard); any
    other text is the same with it and without.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    collapse_guard: bool = False

    def check(self, vocab_size: int) -> None:
        """Raise RequestRefused, naming field, rule and value, if a parameter is out of its range."""
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= (self.max_tokens or math.inf), "0 to max_tokens")
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p < 1, "0 to below 1")
        _check("typical_p", self.typical_p, 0 < self.typical_p <= 1, "above 0, at most 1")
        _check("seed", self.seed, 0 <= self.seed < MAX_SEED, "0 to below 2^64")
        _check("n", self.n, 1 <= self.n <= 128, "1 to 128")
        _check("stop", len(self.stop), len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        _check("stop", self.stop, all(self.stop), "no empty string")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "-2 to 2")
        _check("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 10, "above 0, at most 10")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, 0 <= token < vocab_size, f"token ids from 0 to {vocab_size - 1}")
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token, 0 <= token < vocab_size, f"token ids from 0 to {vocab_size - 1}")
            _check("logit_bias", bias, -100 <= bias <= 100, "values from -100 to 100")
        is_counted = self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS
        _check("logprobs", self.logprobs, is_counted, f"0 to {MAX_TOP_LOGPROBS}")


def _check(param: str, value: object, is_allowed: bool, rule: str) -> None:
    if not is_allowed:
        raise RequestRefused(f"{param} must be {rule}, got {value!r}", param=param)


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it; smaller `priority` numbers go first.

    Requests of another `cache_salt` share no cached beginning, so none can tell by its speed what others have asked.
    What is not `is_kept` leaves nothing in the prefix cache.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    is_kept: bool = True


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a drawn token before temperature, and of the likeliest others, the best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """Tokens of one sequence: all that were drawn count, also those of a stop string.

    `cached_tokens` of the prompt came from the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class OutputError:
    """Why a sequence ended with FinishReason.ERROR; `param` names the field if the request is what is wrong."""

    message: str
    code: Literal["model_error", "grammar_too_complex"] = "model_error"
    param: str | None = None


@dataclass(frozen=True)
class Output:
    """What one step gave one sequence: released text and tokens; the last one carries finish_reason and usage.

    Text that may yet turn out to be a stop string, or half a character, is held back with its tokens.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: OutputError | None = None
