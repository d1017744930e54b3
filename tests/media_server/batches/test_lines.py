"""The lines of a batch's file: where each stands, and what each rule says of the line that breaks it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.batches.lines import PRIORITY, LineSpec, read_lines, request_body, split
from media_server.batches.objects import BatchBody, read_window

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/videos", "body": {"prompt": "p"}}


def read(text: bytes, max_body_bytes: int = 1000) -> list[LineSpec]:
    return list(read_lines(iter([text]), "/v1/videos", max_body_bytes=max_body_bytes))


def encode(*lines: Any) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"


@given(st.binary(max_size=200), st.lists(st.integers(1, 7), max_size=60))
def test_lines_are_the_same_however_the_file_is_cut(content: bytes, sizes: list[int]) -> None:
    def cut() -> Iterator[bytes]:
        rest = content
        for size in sizes:
            part, rest = rest[:size], rest[size:]
            yield part
        yield rest

    found = list(split(cut()))
    assert found == list(split(iter([content])))
    assert all(content[start : start + len(line)] == line for start, line in found)
    assert [line for _, line in found] == (content.removesuffix(b"\n").split(b"\n") if content else [])


def test_a_file_is_read_line_by_line() -> None:
    second = {**LINE, "custom_id": "b", "body": {"prompt": "é", "model": "tiny-wan"}}
    text = encode(LINE, b"  \r", json.dumps(second).encode() + b"\r")
    found = read(text)
    assert [(line.number, line.custom_id, line.model, line.record) for line in found] == [
        (1, "a", None, None),
        (3, "b", "tiny-wan", None),
    ]
    last = found[1]
    assert json.loads(text[last.start : last.start + last.length]) == second
    assert json.loads(request_body(text[last.start : last.start + last.length])) == {
        "prompt": "é",
        "model": "tiny-wan",
        "priority": PRIORITY,
    }
    kept = request_body(json.dumps({**LINE, "body": {"priority": -7}}).encode())
    assert json.loads(kept) == {"priority": -7}


@pytest.mark.parametrize(
    ("line", "param", "rule", "value"),
    [
        (b"{", None, "RFC 8259 JSON", "line 1 column 2: Expecting property name enclosed in double quotes"),
        (b'{"custom_id": "\xff"}', None, "RFC 8259 JSON", "byte 15 is not UTF-8"),
        (b"[]", None, "the body is a JSON object", None),
        ({**LINE, "custom_id": ""}, "custom_id", "String should have at least 1 character", ""),
        ({k: v for k, v in LINE.items() if k != "custom_id"}, "custom_id", "this field is required", None),
        ({**LINE, "method": "GET"}, "method", "Input should be 'POST'", "GET"),
        ({**LINE, "url": "/v1/films"}, "url", "the batch's endpoint, /v1/videos", "/v1/films"),
        ({**LINE, "body": "x"}, "body", "the request, a JSON object", "x"),
        ({**LINE, "boddy": {}}, "boddy", "this field is not known here", "{}"),
        ({**LINE, "body": {"stream": True}}, "body.stream", "not in a batch", True),
        ({**LINE, "body": {"resume_s": 5}}, "body.resume_s", "not in a batch", 5),
        ({**LINE, "body": {"priority": 0}}, "body.priority", "below 0 in a batch", 0),
        (b'{"custom_id": "\\ud800"}', "custom_id", "neither NUL nor half a surrogate pair", "U+D800 at 0"),
        (json.dumps({**LINE, "body": {"prompt": "x" * 6000}}).encode(), "line", "at most 5096 bytes", 6081),
    ],
)
def test_a_line_that_breaks_a_rule_says_which(line: Any, param: str | None, rule: str, value: Any) -> None:
    good, bad, after = read(encode({**LINE, "custom_id": "z"}, line, {**LINE, "custom_id": "y"}))
    assert good.record is None and after.record is None and bad.number == 2
    record = json.loads(bad.record or "")
    assert record["response"] is None and record["line"] == 2 and record["id"].startswith("batch_req_")
    error = record["error"]
    assert error["param"] == param and error["rule"].startswith(rule) and error["value"] == value
    assert error["line"] == 2 and error["message"].startswith("Line 2: ") and error["code"]
    assert param is None or param in error["message"]


def test_a_custom_id_stands_once() -> None:
    *_, second = read(encode(LINE, {**LINE, "custom_id": "b"}, LINE))
    record = json.loads(second.record or "")
    assert (record["custom_id"], record["line"]) == ("a", 3)
    assert record["error"]["rule"] == "another one for each line; line 1 has it too"


@pytest.mark.parametrize("unit", ["m", "h", "d", "s", ""])
def test_a_window_s_schema_says_what_is_taken(unit: str) -> None:
    pattern = BatchBody.model_json_schema()["properties"]["completion_window"]["pattern"]
    for text in (f"{amount}{unit}" for amount in ("0", "01", "-1", "1.5", "10000", "", *map(str, range(1, 10000)))):
        try:
            seconds = read_window(text)
        except ValueError:
            assert re.search(pattern, text) is None, text
            continue
        assert re.search(pattern, text) is not None, text
        assert seconds == int(text[:-1]) * {"m": 60, "h": 3600, "d": 86400}[unit] <= 30 * 86400
