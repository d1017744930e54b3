"""The bracket form against the openai package's own serialiser, and malformed bodies."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from openai._qs import Querystring

from media_server.errors import InvalidRequest
from media_server.http_body import nest, parse_json

_words = st.text("abcxyz_", min_size=1, max_size=6)
_leaves = st.text(max_size=10) | st.integers(-5, 5).map(str)
# what the SDK's form can carry: it has no way to write an empty list or object
_trees = st.recursive(
    _leaves,
    lambda inner: st.dictionaries(_words, inner, min_size=1, max_size=3) | st.lists(_leaves, min_size=1, max_size=3),
    max_leaves=8,
)


@given(body=st.dictionaries(_words, _trees, max_size=4))
def test_reads_back_what_the_openai_package_writes(body: dict[str, Any]) -> None:
    items = Querystring().stringify_items(body, array_format="brackets")
    assert nest(list(items)) == body


@pytest.mark.parametrize(
    ("items", "tree"),
    [
        ([("input_reference[image_url]", "https://a/b.png")], {"input_reference": {"image_url": "https://a/b.png"}}),
        ([("loras[]", "a"), ("loras[]", "b")], {"loras": ["a", "b"]}),
        ([("a[][x]", "1"), ("a[][y]", "2"), ("a[][x]", "3")], {"a": [{"x": "1", "y": "2"}, {"x": "3"}]}),
        ([("a[0][x]", "1"), ("a[1][x]", "2")], {"a": [{"x": "1"}, {"x": "2"}]}),
        ([("a", "1"), ("a", "2")], {"a": ["1", "2"]}),
        ([], {}),
    ],
)
def test_forms(items: list[tuple[str, str]], tree: dict[str, Any]) -> None:
    assert nest(list(items)) == tree


@pytest.mark.parametrize(
    "items",
    [
        [("a", "1"), ("a[b]", "2")],
        [("a[b]", "2"), ("a", "1")],
        [("a[]", "1"), ("a[b]", "2")],
        [("[a]", "1")],
        [("a[b", "1")],
        [("a" + "[b]" * 40, "1")],
    ],
)
def test_contradictory_names_are_refused(items: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        nest(list(items))
    assert caught.value.code == "malformed_form"
    assert caught.value.param and caught.value.rule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"prompt": "a"', "line 1 column 15"),
        (b'{"prompt": "a",\n oops}', "line 2 column 2"),
        (b'{"seconds": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": "\xff"}', "byte 7"),
        (b"[1]", "an array"),
        (b"true", "a boolean"),
        (b'{"a":' + b"[" * 80 + b"]" * 80 + b"}", "64 levels"),
        (b"[" * 100_000, "levels"),
    ],
)
def test_malformed_json_says_where(text: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        parse_json(text)
    assert caught.value.code == "malformed_json"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b'{"stop": ["a", "\\ud800"]}', "stop.1"),
        (b'{"prompt": "a\\u0000"}', "prompt"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages.0.content"),
        (b'{"metadata": {"\\u0000": "x"}}', "metadata.?"),
    ],
)
def test_text_that_cannot_be_stored_is_refused_by_its_field(text: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest, match="neither NUL nor half a surrogate pair") as caught:
        parse_json(text)
    assert (caught.value.param, caught.value.code) == (param, "invalid_request")
