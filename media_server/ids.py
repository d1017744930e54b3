"""Identifiers: a prefix that says what is named, and a UUIDv7 (RFC 9562) that sorts by the time of creation.

Invariant: an id is `<prefix>_<32 lower-case hex digits>`, so it is safe in a path, a URL and an artifact key.
"""

import re
from typing import Final, Literal, get_args

import uuid_utils

Prefix = Literal["video", "film", "storyboard", "join", "art", "evt", "req", "whe", "key", "chatcmpl", "file", "batch"]
PREFIXES: Final[frozenset[str]] = frozenset(get_args(Prefix))
_ID = re.compile(r"([a-z]+)_[0-9a-f]{32}")


def new_id(prefix: Prefix) -> str:
    """Make a fresh id such as `video_0190f3c2…`; later ids sort after earlier ones of the same prefix."""
    return f"{prefix}_{uuid_utils.uuid7().hex}"


def prefix_of(id: str) -> str | None:
    """Say what an id names; `None` if it is not an id of ours."""
    match = _ID.fullmatch(id)
    return match[1] if match and match[1] in PREFIXES else None
