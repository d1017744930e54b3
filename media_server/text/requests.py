"""What callers of the text routes send: OpenAI's fields and ours beside them; each is done or refused by name.

Fields of OpenAI's API that are not done here are known, so that the refusal can say so rather than "unknown field".
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from media_server.errors import InvalidRequest
from media_server.text.messages import Grammar, Sampling
from media_server.validation import RequestModel

MAX_MESSAGES = 2000
MAX_CHOICES = 16
# larger grammars cost an engine seconds of a core before the first token, and can pass its parser's limits later
MAX_GRAMMAR_CHARS = 100_000
MAX_GRAMMAR_CHOICES = 10_000
# each part of an intersection multiplies what the others cost: sixty took minutes and all of a machine's memory
MAX_INTERSECTIONS = 8
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
# what OpenAI takes; values that ask for nothing beyond what is done are let through
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class _Body(RequestModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(_Body):
    """A part of a message; text is the only kind that a language model takes here."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, description="Handed to the chat template.", max_length=64)

    def flat(self) -> dict[str, str]:
        """Give the message as templates know it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name is not None else {})


class StreamOptions(_Body):
    """How a stream is written."""

    include_usage: bool = Field(False, description="A last chunk with the usage.")
    include_obfuscation: Literal[False] | None = None


class JsonSchema(_Body):
    """A schema that the answer obeys, always; what is not supported of a schema is refused with the reason."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The answer is held to the schema either way.")

    @field_validator("json_schema")
    @classmethod
    def _is_bounded(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_grammar_chars(len(json.dumps(value, ensure_ascii=False)))
        return value


class ResponseFormat(_Body):
    """What the answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given if, and only if, type is json_schema")
        return self


class GrammarFormat(_Body):
    """A grammar of ours for the answer: a regex, a Lark grammar (llguidance's dialect), or a list of choices."""

    type: Literal["regex", "lark", "choice"]
    value: str | list[str]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.type == "choice") != isinstance(self.value, list):
            raise ValueError("value is a list of strings for choice, and a string otherwise")
        if isinstance(self.value, list) and len(self.value) > MAX_GRAMMAR_CHOICES:
            raise ValueError(f"at most {MAX_GRAMMAR_CHOICES} choices, got {len(self.value)}")
        if self.type == "lark" and (count := _LITERAL.sub("", str(self.value)).count("&")) > MAX_INTERSECTIONS:
            raise ValueError(f"at most {MAX_INTERSECTIONS} intersections (&), got {count}")
        _check_grammar_chars(len(self.value) if isinstance(self.value, str) else sum(map(len, self.value)))
        return self


def _check_grammar_chars(got: int) -> None:
    if got > MAX_GRAMMAR_CHARS:
        raise ValueError(f"at most {MAX_GRAMMAR_CHARS} characters, got {got}")


class SamplingFields(_Body):
    """Fields that chat and plain completions share."""

    model: str | None = Field(None, max_length=200, description="The first text model if left out.")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="The same seed draws the same answer, on any replica."
    )
    stop: str | list[str] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Your name for your user; it changes nothing here.")
    safety_identifier: str | None = Field(None, max_length=512, description="As `user`; it changes nothing here.")
    prompt_cache_key: str | None = Field(
        None,
        max_length=512,
        description="A hint that nothing here needs: beginnings are found by their tokens, among those of your key.",
    )
    # ours
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field([], max_length=64)
    ignore_eos: bool = False
    collapse_guard: bool = Field(
        True,
        description="Try a second time, from where it was clean, if the answer repeats itself without end; if it does "
        "so again, end it with finish_reason length and stop_reason collapse.",
    )
    grammar: GrammarFormat | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(0, description="Higher starts earlier.")
    label: Annotated[str, Field(max_length=128)] | None = Field(None, description="Project label of the usage ledger.")
    resume_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Go on if the client leaves, and keep the stream for so many seconds after its end, to be taken "
        "up again at /v1/chat/completions/{id}/events.",
    )

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self

    def stops(self) -> list[str]:
        """Give the stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(SamplingFields):
    """A conversation to be answered."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 50}]
        }
    )

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16, description="Checked, and kept nowhere, since answers are not stored; `label` is counted."
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one number")
        if self.grammar is not None and self.response_format not in (None, ResponseFormat(type="text")):
            raise ValueError("an answer obeys one of grammar and response_format")
        return self

    @property
    def longest(self) -> int | None:
        """How many tokens were asked for, under either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside each token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    """A text to be continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 50}]})

    prompt: str | list[Annotated[int, Field(ge=0, lt=2**31)]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def longest(self) -> int | None:
        """How many tokens were asked for; OpenAI's 16 if nothing was said."""
        return 16 if self.max_tokens is None else self.max_tokens


def refuse_unsupported(values: Mapping[str, Any]) -> dict[str, Any]:
    """Take out OpenAI's fields that ask for nothing. Raises InvalidRequest for one that asks for what is not done."""
    kept = dict(values)
    for name, harmless in _UNSUPPORTED.items():
        if name not in kept:
            continue
        value = kept.pop(name)
        if value is not None and value not in harmless:
            raise InvalidRequest(
                f"{name}: this service does not do this yet, and does not ignore it either.",
                code="unsupported_parameter",
                param=name,
                rule="leave it out",
                value=value if isinstance(value, str | int | float) else None,
            )
    return kept


def sampling_of(
    body: SamplingFields, *, longest: int | None, num_logprobs: int | None, seed: int, defaults: Mapping[str, float]
) -> Sampling:
    """Fill in what the caller left to the model."""
    return Sampling(
        max_tokens=longest,
        min_tokens=body.min_tokens,
        temperature=defaults["temperature"] if body.temperature is None else body.temperature,
        top_k=body.top_k,
        top_p=defaults["top_p"] if body.top_p is None else body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        # negative seeds are allowed by OpenAI
        seed=(body.seed if body.seed is not None else seed) % 2**64,
        n=body.n,
        stop=body.stops(),
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias or {},
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logprobs=num_logprobs,
        collapse_guard=body.collapse_guard,
    )


def grammar_of(body: SamplingFields) -> Grammar | None:
    """Say what the answer must obey."""
    if body.grammar is not None:
        value = body.grammar.value
        return Grammar(type=body.grammar.type, value=value if isinstance(value, str) else json.dumps(value))
    form = body.response_format if isinstance(body, ChatRequest) else None
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return Grammar(type="json_object")
    return Grammar(type="json_schema", value=json.dumps(form.json_schema.json_schema))
