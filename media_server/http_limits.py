"""Limits of request bodies: their size, by Content-Length before a byte is read and by counting while it streams; how
slowly they may come; and how many uploads may come at once.

Uploads (multipart) have the larger limit; every other body has the smaller one. What is refused is refused with the
same problem document as any other error; the handler never sees a byte past the limit.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from media_server.errors import (
    BodyTooSlow,
    InvalidRequest,
    MediaServerError,
    TooLarge,
    TooManyUploads,
    UnsupportedMedia,
)
from media_server.http_errors import problem_response

# a refused body is read to its end up to here, so that a client that sends first and reads later gets the answer
# rather than a reset connection
_DRAIN_BYTES = 32 << 20
# a body may take this long, and longer by what it brings: whoever trickles bytes holds a connection, but not for ever
BODY_S = 30.0
BODY_BYTES_A_SECOND = 4096
# uploads of one API process: their files lie on its disk until they are read
MAX_UPLOADS = 64
_HINT = " Images and files are uploaded as multipart/form-data, which may be larger."


class BodyLimitMiddleware:
    """Refuse bodies larger than `max_body_bytes`, or `max_upload_bytes` if they are multipart."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_upload_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes
        self.num_uploads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
        limit = self.max_upload_bytes if is_upload else self.max_body_bytes
        hint = "" if is_upload else _HINT
        try:
            _refuse_encoded(headers)
            declared = _content_length(headers)
            if declared is not None and declared > limit:
                raise too_large(limit, declared, hint)
        except MediaServerError as error:
            await _drain(receive, headers)
            await problem_response(error)(scope, receive, send)
            return
        if not is_upload:
            await self.app(scope, _Body(receive, limit, hint).receive, send)
            return
        if self.num_uploads >= MAX_UPLOADS:
            await problem_response(TooManyUploads(MAX_UPLOADS))(scope, receive, send)
            return
        self.num_uploads += 1
        try:
            await self.app(scope, _Body(receive, limit, hint).receive, send)
        finally:
            self.num_uploads -= 1


class _Body:
    """One body on its way to the application: counted, and timed until its last byte."""

    def __init__(self, receive: Receive, limit: int, hint: str) -> None:
        self._receive = receive
        self._limit = limit
        self._hint = hint
        self._received = 0
        self._has_ended = False
        self._began_at: float | None = None

    async def receive(self) -> Message:
        """Give the next message. Raises TooLarge past the limit, BodyTooSlow past the time."""
        if self._has_ended:
            # what comes now is the client's leaving
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._began_at = self._began_at or loop.time()
        try:
            async with asyncio.timeout_at(self._began_at + BODY_S + self._received / BODY_BYTES_A_SECOND):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"The body came too slowly: {self._received} bytes in {loop.time() - self._began_at:.0f} s.",
                rule=f"{BODY_S:.0f} s, and a second for every {BODY_BYTES_A_SECOND} bytes",
            ) from None
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._limit:
                raise too_large(self._limit, self._received, self._hint)
            self._has_ended = not message.get("more_body", False)
        return message


def too_large(limit: int, got: int, hint: str = "") -> TooLarge:
    """Say that a body passes its limit; `hint`: what has a larger one."""
    return TooLarge(
        f"The body may have at most {limit} bytes, got {got} or more.{hint}",
        rule=f"at most {limit} bytes",
        value=got,
    )


def _refuse_encoded(headers: Headers) -> None:
    # what a few bytes unpack to, their number does not bound
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(
            f"The body must be sent as it is, got content-encoding {encoding[:100]}.",
            param="content-encoding",
            rule="absent or identity",
            value=encoding[:100],
        )


def _content_length(headers: Headers) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InvalidRequest("Content-Length must be a number of bytes.", param="content-length", value=text[:40])
    return int(text)


async def _drain(receive: Receive, headers: Headers) -> None:
    if headers.get("expect", "").lower() == "100-continue":
        return
    read = 0
    while read <= _DRAIN_BYTES:
        message = await receive()
        read += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
