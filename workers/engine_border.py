"""The border between the engine's types and the messages that travel: one function each way."""

from collections.abc import Sequence
from typing import Literal

from llguidance import LLTokenizer

from llm.request import FinishReason, Output, Request, SamplingParams
from llm.request import Grammar as EngineGrammar
from media_server.text.messages import Generate, TextEvent, TokenChoice, TokenLogprob, Usage


def to_request(message: Generate) -> Request:
    """Translate a message into the engine's request."""
    sampling = message.sampling.model_dump()
    grammar = message.grammar
    return Request(
        id=message.id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            **{**sampling, "stop": tuple(sampling["stop"]), "stop_token_ids": tuple(sampling["stop_token_ids"])}
        ),
        grammar=None if grammar is None else EngineGrammar(grammar.type, grammar.value),
        priority=-message.priority,
        cache_salt=message.cache_salt or message.meta.owner_key_id or "",
        is_kept=not message.meta.is_forgotten,
    )


def to_event(output: Output, tokenizer: LLTokenizer, usage: Usage | None) -> TextEvent:
    """Translate what a step gave one answer; `usage` is that of the whole request, with its last output."""
    return TextEvent(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        logprobs=[_logprob(tokenizer, item.token_id, item.logprob, item.top) for item in output.logprobs] or None,
        finish_reason=_finish_reason(output.finish_reason),
        stop_reason="collapse" if output.finish_reason is FinishReason.COLLAPSE else None,
        usage=usage,
        is_last=usage is not None,
    )


def _logprob(tokenizer: LLTokenizer, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
    chosen = _choice(tokenizer, token_id, logprob)
    return TokenLogprob(**chosen.model_dump(), top_logprobs=[_choice(tokenizer, *other) for other in top])


def _choice(tokenizer: LLTokenizer, token_id: int, logprob: float) -> TokenChoice:
    data = tokenizer.decode_bytes([token_id])
    return TokenChoice(token=data.decode("utf-8", "replace"), logprob=logprob, bytes=list(data))


def _finish_reason(reason: FinishReason | None) -> Literal["stop", "length"] | None:
    match reason:
        case None:
            return None
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH | FinishReason.COLLAPSE:
            return "length"
    raise AssertionError(f"{reason} is not an end that a reader sees")
