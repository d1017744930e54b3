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

from media_server.figures import HTTP_SECONDS
from media_server.ids import new_id
from media_server.logging_setup import log_context
from media_server.tracing import Tracing

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
# what a later version of the standard adds is not passed on
_TRACEPARENT_CHARS = 55
# what a proxy's log calls a client that did not wait
CLIENT_LEFT = 499
_NOT_TRACED = ("/health/", "/metrics")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


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
    """Take or make a request id and a traceparent, log the answer and send the id back; span and time the request.

    What was asked for is named by the template of its route alone: paths hold ids.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope["app"].state
        # who asks every few seconds is of no interest in traces
        tracing = Tracing() if scope["path"].startswith(_NOT_TRACED) else state.tracing
        asked = _read_context(Headers(scope=scope))
        method = scope["method"] if scope["method"] in _METHODS else "other"
        started = time.perf_counter()
        status: int | None = None

        def begin(code: int) -> None:
            """Note that the answer begins."""
            nonlocal status
            status = code
            seconds = time.perf_counter() - started
            state.recorder.observe(HTTP_SECONDS, _route(scope), method, str(code), seconds=seconds)

        with (
            log_context(request_id=asked.request_id),
            tracing.span(method, asked.parent, kind="server", http__request__method=method) as span,
        ):
            context = RequestContext(asked.request_id, span.traceparent or _new_traceparent())
            scope.setdefault("state", {})["context"] = context

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    headers["x-request-id"] = context.request_id
                    headers["x-content-type-options"] = "nosniff"
                    begin(message["status"])
                    logger.debug(
                        "%s %s -> %d in %.1f ms",
                        scope["method"],
                        scope["path"],
                        message["status"],
                        (time.perf_counter() - started) * 1000,
                    )
                await send(message)

            try:
                await self.app(scope, receive, send_with_id)
            except Exception:
                # the answer is made outside of us, by whoever catches this
                if status is None:
                    begin(500)
                raise
            finally:
                if status is None:
                    begin(CLIENT_LEFT)
                span.rename(f"{method} {_route(scope)}")
                span.set(http__route=_route(scope), http__response__status_code=status, request_id=context.request_id)
                if status is not None and status >= 500:
                    span.fail(str(status))


def _route(scope: Scope) -> str:
    """Give the template of the route that a request has found."""
    return getattr(scope.get("route"), "path", None) or "none"


@dataclass(frozen=True)
class _Asked:
    """What a request says of itself; `parent` is its caller's traceparent."""

    request_id: str
    parent: str | None


def _read_context(headers: Headers) -> _Asked:
    request_id = headers.get("x-request-id", "")
    traceparent = headers.get("traceparent", "").strip().lower()
    return _Asked(
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else new_id("req"),
        parent=traceparent[:_TRACEPARENT_CHARS] if _TRACEPARENT.fullmatch(traceparent) else None,
    )


def _new_traceparent() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
