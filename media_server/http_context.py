"""Who asked: the request's id and trace (W3C Trace Context), carried into jobs and back in each answer.

Invariant: the outermost middleware of ours, so that every answer carries `x-request-id`, the errors among them.
"""

import logging
import re
import secrets
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from media_server.ids import new_id

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
# what a later version of the standard adds is not passed on
_TRACEPARENT_CHARS = 55


@dataclass(frozen=True)
class RequestContext:
    """The names under which one request is found in logs, rows and traces."""

    request_id: str
    traceparent: str


def request_context(connection: HTTPConnection) -> RequestContext:
    """Give the context that the middleware set for this request."""
    context = connection.scope["state"]["context"]
    assert isinstance(context, RequestContext)
    return context


class RequestContextMiddleware:
    """Take or make a request id and a traceparent, log the answer, and send the id back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = _read_context(Headers(scope=scope))
        scope.setdefault("state", {})["context"] = context
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.request_id
                headers["x-content-type-options"] = "nosniff"
                logger.debug(
                    "%s %s -> %d in %.1f ms",
                    scope["method"],
                    scope["path"],
                    message["status"],
                    (time.perf_counter() - started) * 1000,
                    extra={"request_id": context.request_id},
                )
            await send(message)

        await self.app(scope, receive, send_with_id)


def _read_context(headers: Headers) -> RequestContext:
    request_id = headers.get("x-request-id", "")
    traceparent = headers.get("traceparent", "").strip().lower()
    return RequestContext(
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else new_id("req"),
        traceparent=traceparent[:_TRACEPARENT_CHARS] if _TRACEPARENT.fullmatch(traceparent) else _new_traceparent(),
    )


def _new_traceparent() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
