"""A line of a batch as a request: sent through the API's own application within this process, for the batch's owner.

So a line passes what each request passes, in the same code: its key and scopes, the body's rules, the model's, quotas,
budgets, admission; and its answer is word for word what a client would get.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from media_server.auth import ACTING_FOR, ActingFor
from media_server.batches.lines import request_id
from media_server.batches.store import BatchRow
from media_server.http_acceptance import BATCH_LINE
from media_server.jobs.idempotency import HeldLine

# a batch can wait for what passes; the first waits are short
_FIRST_WAIT_S = 1.0
_MAX_WAIT_S = 60.0
# what the service did not foresee may not happen again; more often it does
_MAX_TRIES = 3


@dataclass(frozen=True)
class LineAnswer:
    """What a line was answered; `retry_in_s` says when to send it again, None that this is its end."""

    status_code: int
    body: Any
    retry_in_s: float | None

    @property
    def is_success(self) -> bool:
        """Whether it was done, or its job was made."""
        return 200 <= self.status_code < 300


async def send_line(
    app: FastAPI, batch: BatchRow, worker: str, number: int, body: bytes, *, tries: int, left_s: float
) -> LineAnswer:
    """Send a line; `tries` counts this one, `left_s` is how long the batch goes on."""
    state = {
        ACTING_FOR: ActingFor(batch.owner_key_id),
        BATCH_LINE: HeldLine(batch.id, number, worker),
    }
    transport = httpx.ASGITransport(app=_Within(app, state), raise_app_exceptions=False)
    headers = {"content-type": "application/json", "x-request-id": request_id(batch.id, number)}
    if batch.traceparent is not None:
        headers["traceparent"] = batch.traceparent
    # by a loopback name: that is what a service on loopback is reached by
    request = httpx.Request("POST", f"http://127.0.0.1{batch.endpoint}", content=body, headers=headers)
    answer = await transport.handle_async_request(request)
    text = await answer.aread()
    try:
        said = json.loads(text)
    except ValueError:
        said = text.decode(errors="replace")
    return LineAnswer(answer.status_code, said, _retry_in_s(answer, tries, left_s))


class _Within:
    """The application, told what no request from outside can say of itself."""

    def __init__(self, app: ASGIApp, state: dict[str, Any]) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "state": dict(self.state)}, receive, send)


def _retry_in_s(answer: httpx.Response, tries: int, left_s: float) -> float | None:
    """Say when a refused line is worth another try: not if waiting does not help, or not before the batch's end."""
    said = answer.headers.get("retry-after", "")
    wait_s = float(said) if said.isdigit() else None
    backoff_s = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(tries - 1, 10))
    if answer.status_code == 429:
        if wait_s is not None:
            return None if wait_s >= left_s else min(wait_s, _MAX_WAIT_S)
        # a budget that comes back by nobody's waiting says so; an engine by URL says no time
        return None if answer.headers.get("x-should-retry") == "false" else backoff_s
    if answer.status_code in (503, 507):
        return max(backoff_s, min(wait_s or 0.0, _MAX_WAIT_S))
    if answer.status_code == 409 and answer.headers.get("x-should-retry") == "true":
        return backoff_s
    return backoff_s if answer.status_code == 500 and tries < _MAX_TRIES else None
