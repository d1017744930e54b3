"""What the text routes answer with: OpenAI's objects, whole or in chunks, made from an engine's events.

A collapse ends an answer with `length`, OpenAI's only word for a text that is cut short: clients do not take what there
is for whole (the openai package's `parse` refuses it); `stop_reason` beside it says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from media_server.text.messages import TextEvent, TokenLogprob, Usage

Kind = Literal["chat", "completion"]
_STOP_REASON = "collapse: cut, since it repeated itself without end. Left out otherwise."
_OBJECTS: dict[tuple[Kind, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens the engine had read before and did not compute again."""

    cached_tokens: int


class UsageObject(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobContent(BaseModel):
    """A token with its log-probability, before temperature."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[dict[str, Any]]


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens; tokens that a grammar forced are drawn too where they are asked for."""

    content: list[LogprobContent] | None
    refusal: None = None


class AnswerMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: Literal["collapse"] | None = Field(None, description=_STOP_REASON)


class ChatCompletion(BaseModel):
    """OpenAI's chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str = Field(description="The engine and the weights that answered.")
    service_tier: None = None


class CompletionChoice(BaseModel):
    """One of n continuations."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: Literal["collapse"] | None = Field(None, description=_STOP_REASON)


class Completion(BaseModel):
    """OpenAI's plain completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    system_fingerprint: str


@dataclass(frozen=True)
class Answer:
    """The fields that every chunk of one answer has; it travels with the stream, for whoever takes it up again."""

    id: str
    created: int
    model: str
    fingerprint: str
    kind: Kind = "chat"
    num_choices: int = 1
    include_usage: bool = False
    has_logprobs: bool = False
    is_resumable: bool = False

    def chunks(self, event: TextEvent) -> list[dict[str, Any]]:
        """Turn an event into the chunks of a stream."""
        if event.is_accepted:
            return [self._delta(index, {"role": "assistant", "content": ""}) for index in self._first()]
        chunks = []
        if event.text or event.logprobs:
            chunks.append(self._delta(event.index, {"content": event.text}, logprobs=event.logprobs))
        if event.finish_reason is not None:
            end = self._delta(event.index, {}, finish_reason=event.finish_reason)
            if event.stop_reason is not None:
                end["choices"][0]["stop_reason"] = event.stop_reason
            chunks.append(end)
        if event.usage is not None and self.include_usage:
            chunks.append(self._chunk([], usage=_usage(event.usage)))
        return chunks

    def _first(self) -> range:
        return range(self.num_choices if self.kind == "chat" else 0)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        if self.kind == "chat":
            choice = {"index": index, "delta": delta, "logprobs": _chat_logprobs(logprobs)}
        else:
            choice = {"index": index, "text": delta.get("content", ""), "logprobs": _plain_logprobs(logprobs)}
        return self._chunk([{**choice, "finish_reason": finish_reason}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {
            "id": self.id,
            "object": _OBJECTS[self.kind, True],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return {**chunk, "usage": usage} if self.include_usage else chunk


@dataclass
class Whole:
    """An answer as it is gathered."""

    answer: Answer
    texts: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    reasons: dict[int, dict[str, str]] = field(default_factory=dict)
    usage: Usage | None = None

    def take(self, event: TextEvent) -> None:
        """Add an event."""
        self.texts.setdefault(event.index, []).append(event.text)
        self.logprobs.setdefault(event.index, []).extend(event.logprobs or ())
        if event.finish_reason is not None:
            reasons: dict[str, str] = {"finish_reason": event.finish_reason}
            self.reasons[event.index] = reasons | ({"stop_reason": event.stop_reason} if event.stop_reason else {})
        self.usage = event.usage or self.usage

    def body(self) -> dict[str, Any]:
        """Give the whole answer."""
        assert self.usage is not None
        answer = self.answer
        return {
            "id": answer.id,
            "object": _OBJECTS[answer.kind, False],
            "created": answer.created,
            "model": answer.model,
            "choices": [self._choice(index) for index in range(answer.num_choices)],
            "usage": _usage(self.usage),
            "system_fingerprint": answer.fingerprint,
        } | ({"service_tier": None} if answer.kind == "chat" else {})

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self.texts.get(index, ()))
        logprobs = self.logprobs.get(index, []) if self.answer.has_logprobs else None
        if self.answer.kind == "completion":
            content: dict[str, Any] = {"text": text, "logprobs": _plain_logprobs(logprobs)}
        else:
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message, "logprobs": _chat_logprobs(logprobs)}
        return {"index": index, **content, **self.reasons[index]}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [item.model_dump() for item in logprobs], "refusal": None}


def _plain_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {
        "tokens": [item.token for item in logprobs],
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [{other.token: other.logprob for other in item.top_logprobs} for item in logprobs],
        "text_offset": None,
    }
