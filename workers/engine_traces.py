"""The span of each request for text, from its acceptance by the engine to its last token."""

import time
from dataclasses import dataclass

from media_server.text.messages import Generate, Usage
from media_server.tracing import Tracing


@dataclass
class _Open:
    """A request that has not ended."""

    parent: str | None
    began_s: float
    prompt_tokens: int
    first_token_s: float | None = None


class RequestTraces:
    """What the spans of one engine's requests are to say."""

    def __init__(self, tracing: Tracing, engine: str, model: str) -> None:
        self.tracing = tracing
        self._engine = engine
        self._model = model
        self._open: dict[str, _Open] = {}

    def begin(self, message: Generate) -> None:
        """Note that a request was accepted."""
        if self.tracing.is_on:
            self._open[message.id] = _Open(message.trace, time.time(), len(message.prompt_token_ids))

    def token(self, request_id: str) -> None:
        """Note that a request has something to show; the first time counts."""
        request = self._open.get(request_id)
        if request is not None and request.first_token_s is None:
            request.first_token_s = time.time()

    def end(self, request_id: str, *, usage: Usage | None = None, error: str | None = None) -> None:
        """Span a request that has ended, well or by an error's code."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self.tracing.record(
            "text generate",
            request.parent,
            kind="consumer",
            start_s=request.began_s,
            error=error,
            request_id=request_id,
            model=self._model,
            engine=self._engine,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            ttft_s=None if request.first_token_s is None else request.first_token_s - request.began_s,
        )
