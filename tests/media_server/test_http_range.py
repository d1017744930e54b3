"""Ranges against Python's slices, and the validators of RFC 9110 against its own examples."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from media_server.http_range import ByteRange, parse_range, select, strong_etag

ETAG = strong_etag("ab" * 32)
MODIFIED_AT = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the RFC's example


@given(data=st.binary(max_size=300), first=st.integers(0, 400), last=st.none() | st.integers(0, 400))
def test_int_range_is_a_python_slice(data: bytes, first: int, last: int | None) -> None:
    found = parse_range(f"bytes={first}-{'' if last is None else last}", len(data))
    if last is not None and last < first:
        assert found is None
    elif first >= len(data):
        assert found == "unsatisfiable"
    else:
        assert isinstance(found, ByteRange)
        assert data[found.start : found.end] == data[first : None if last is None else last + 1] != b""


@given(data=st.binary(max_size=300), suffix=st.integers(0, 400))
def test_suffix_range_is_a_negative_python_slice(data: bytes, suffix: int) -> None:
    found = parse_range(f"bytes=-{suffix}", len(data))
    if suffix == 0 or not data:
        assert found == "unsatisfiable"
    else:
        assert isinstance(found, ByteRange)
        assert data[found.start : found.end] == data[-suffix:]


@given(header=st.text(max_size=40))
def test_any_text_is_ignored_or_lies_inside_the_file(header: str) -> None:
    found = parse_range(header, 100)
    assert found is None or found == "unsatisfiable" or 0 <= found.start < found.end <= 100


@pytest.mark.parametrize(
    "header",
    ["bytes", "bytes=", "bytes=-", "items=0-1", "bytes=0-1,5-6", "bytes=a-b", "bytes=5-2", f"bytes={'9' * 30}-"],
)
def test_malformed_or_several_ranges_are_ignored(header: str) -> None:
    assert parse_range(header, 100) is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"range": "bytes=0-9"}, 206),
        ({"range": "bytes=100-"}, 416),
        ({"range": "bytes=0-9", "if-range": ETAG}, 206),
        ({"range": "bytes=0-9", "if-range": f"W/{ETAG}"}, 200),
        ({"range": "bytes=0-9", "if-range": '"other"'}, 200),
        ({"range": "bytes=0-9", "if-range": "Sun, 06 Nov 1994 08:49:37 GMT"}, 206),
        ({"range": "bytes=0-9", "if-range": "Sun, 06 Nov 1994 08:49:38 GMT"}, 200),
        ({"range": "bytes=0-9", "if-range": "yesterday"}, 200),
        ({"range": "bytes=900-", "if-range": '"other"'}, 200),
        ({"if-none-match": ETAG}, 304),
        ({"if-none-match": f'"other", W/{ETAG}'}, 304),
        ({"if-none-match": "*"}, 304),
        ({"if-none-match": '"other"'}, 200),
        ({"if-match": ETAG}, 200),
        ({"if-match": f"W/{ETAG}"}, 412),
        ({"if-match": '"other"', "if-none-match": ETAG}, 412),
    ],
)
def test_preconditions(headers: dict[str, str], status: int) -> None:
    chosen = select(headers, size_bytes=100, etag=ETAG, modified_at=MODIFIED_AT)
    assert chosen.status == status
    assert chosen.headers["etag"] == ETAG
    assert chosen.headers["last-modified"] == "Sun, 06 Nov 1994 08:49:37 GMT"
    assert len(chosen.range) == {200: 100, 206: 10}.get(status, 0)
    assert chosen.headers.get("content-range") == {206: "bytes 0-9/100", 416: "bytes */100"}.get(status)
