"""Range requests and validators for immutable files (RFC 9110, sections 8.8, 13 and 14).

Invariants: ETags are strong, since an artifact's key never changes its bytes; a malformed Range is ignored as the
RFC asks; several ranges at once are answered with the whole file, which the RFC allows and every client accepts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Literal

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*", re.IGNORECASE | re.ASCII)
# a number longer than this is larger than any file; int() of unbounded digits is a way to burn a CPU
_MAX_DIGITS = 19


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, end) of a file."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Selection:
    """What to answer: the status, the bytes to send, and the headers that say so."""

    status: Literal[200, 206, 304, 412, 416]
    range: ByteRange
    headers: dict[str, str]


def strong_etag(sha256: str) -> str:
    """Make the strong ETag of a file from its digest in hex."""
    return f'"sha256-{sha256}"'


def select(request_headers: Mapping[str, str], *, size_bytes: int, etag: str, modified_at: float) -> Selection:
    """Decide what part of a file a GET or HEAD asks for.

    `modified_at` is in unix seconds. The preconditions are tried in the order of RFC 9110, section 13.2.2.
    """
    headers = {
        "accept-ranges": "bytes",
        "etag": etag,
        "last-modified": formatdate(int(modified_at), usegmt=True),
    }
    nothing = ByteRange(0, 0)
    if (wanted := request_headers.get("if-match")) is not None and not _names(wanted, etag, weak_matches=False):
        return Selection(412, nothing, headers)
    if (known := request_headers.get("if-none-match")) is not None and _names(known, etag, weak_matches=True):
        return Selection(304, nothing, headers)
    whole = ByteRange(0, size_bytes)
    asked = request_headers.get("range")
    if asked is None or not _if_range_holds(request_headers.get("if-range"), etag, modified_at):
        return Selection(200, whole, headers)
    part = parse_range(asked, size_bytes)
    if part is None:
        return Selection(200, whole, headers)
    if part == "unsatisfiable":
        return Selection(416, nothing, {**headers, "content-range": f"bytes */{size_bytes}"})
    return Selection(206, part, {**headers, "content-range": f"bytes {part.start}-{part.end - 1}/{size_bytes}"})


def parse_range(header: str, size_bytes: int) -> ByteRange | Literal["unsatisfiable"] | None:
    """Read a Range header against a file of `size_bytes`; None means that it is to be ignored."""
    match = _RANGE.fullmatch(header)
    if match is None:
        return None
    first, last = match[1], match[2]
    if len(first) > _MAX_DIGITS or len(last) > _MAX_DIGITS or (not first and not last):
        return None
    if not first:
        length = min(int(last), size_bytes)
        return ByteRange(size_bytes - length, size_bytes) if length else "unsatisfiable"
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size_bytes:
        return "unsatisfiable"
    return ByteRange(start, min(int(last) + 1, size_bytes) if last else size_bytes)


def _names(header: str, etag: str, *, weak_matches: bool) -> bool:
    if header.strip() == "*":
        return True
    tags = [tag.strip() for tag in header.split(",")]
    if weak_matches:
        tags = [tag.removeprefix("W/") for tag in tags]
    return etag in tags


def _if_range_holds(header: str | None, etag: str, modified_at: float) -> bool:
    if header is None:
        return True
    header = header.strip()
    if header.startswith(('"', "W/")):
        # the comparison is the strong one: a weak tag never holds
        return header == etag
    try:
        return int(parsedate_to_datetime(header).timestamp()) == int(modified_at)
    except (ValueError, TypeError, OverflowError):
        return False
