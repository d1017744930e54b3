"""Size limits of request bodies, by Content-Length before a byte is read and by counting while it streams.

Uploads (multipart) have the larger limit; every other body has the smaller one. What is refused is refused with the
same problem document as any other error; the handler never sees a byte past the limit.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from media_server.errors import InvalidRequest, MediaServerError, TooLarge
from media_server.http_errors import problem_response

# a refused body is read to its end up to here, so that a client that sends first and reads later gets the answer
# rather than a reset connection
_DRAIN_BYTES = 32 << 20


class BodyLimitMiddleware:
    """Refuse bodies larger than `max_body_bytes`, or `max_upload_bytes` if they are multipart."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_upload_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
        limit = self.max_upload_bytes if is_upload else self.max_body_bytes
        try:
            declared = _content_length(headers)
            if declared is not None and declared > limit:
                raise too_large(limit, declared)
        except MediaServerError as error:
            await _drain(receive, headers)
            await problem_response(error)(scope, receive, send)
            return

        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise too_large(limit, received)
            return message

        await self.app(scope, receive_counted, send)


def too_large(limit: int, got: int) -> TooLarge:
    """Say that a body passes its limit."""
    return TooLarge(
        f"The body may have at most {limit} bytes, got {got} or more.",
        rule=f"at most {limit} bytes",
        value=got,
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
