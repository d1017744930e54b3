"""Request bodies as one tree, however they were sent: JSON, multipart or urlencoded, with the bracket form of the SDK.

`input_reference[image_url]=…` becomes a nested object, `loras[]=…` a list, `frames[0][id]=…` a list by index; files are
leaves of the tree. Values of forms stay strings: the models of http_requests.py read "true" and "4" by their types.
"""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from media_server.errors import InvalidRequest, UnsupportedMedia

MAX_FORM_FIELDS = 500
MAX_FORM_FILES = 4
MAX_DEPTH = 16
# of JSON: a schema for an answer takes two levels for each of its own
MAX_JSON_DEPTH = 64
BODY_TYPES = ("application/json", "multipart/form-data", "application/x-www-form-urlencoded")

_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_KEY = re.compile(r"\[([^\[\]]*)\]")


@asynccontextmanager
async def read_body(request: Request, *, max_part_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """Read the body into a tree; its files live until the block ends.

    Raises InvalidRequest (malformed), UnsupportedMedia (another content type), TooLarge (by the body limit).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json" or content_type.endswith("+json"):
        yield parse_json(await request.body())
    elif content_type in BODY_TYPES:
        try:
            form = await request.form(
                max_files=MAX_FORM_FILES, max_fields=MAX_FORM_FIELDS, max_part_size=max_part_bytes
            )
        except (MultiPartException, HTTPException) as error:
            reason = error.message if isinstance(error, MultiPartException) else str(error.detail)
            raise InvalidRequest(
                f"The form could not be read: {reason}", code="malformed_form", rule="a well-formed multipart body"
            ) from error
        try:
            yield check_text(nest(form.multi_items()))
        finally:
            await form.close()
    elif not content_type and not await request.body():
        yield {}
    else:
        raise UnsupportedMedia(
            f"The body must be one of {', '.join(BODY_TYPES)}, got {content_type or 'no content type'}.",
            rule=f"content-type is one of {', '.join(BODY_TYPES)}",
            value=content_type[:100],
        )


async def read_json(request: Request) -> dict[str, Any]:
    """Read a body that is JSON whatever its content type says, but for a form: those may be larger.

    Raises InvalidRequest as `parse_json` does.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data":
        raise InvalidRequest("The body must be JSON, got a form.", code="malformed_json", rule="a JSON body")
    return parse_json(await request.body())


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no NaN, no infinity, no repeated names, no more than MAX_JSON_DEPTH levels.

    Raises InvalidRequest that says where it broke, or which field holds text that cannot be stored.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_names)
    except json.JSONDecodeError as error:
        raise _malformed(f"line {error.lineno} column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise _malformed(f"nested deeper than {MAX_JSON_DEPTH} levels") from error
    except ValueError as error:
        # Python reads no integer of more than some thousand digits
        raise _malformed("a number is too long") from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The body must be a JSON object, got {_json_kind(value)}.",
            code="malformed_json",
            rule="the body is a JSON object",
        )
    if _depth(value) > MAX_JSON_DEPTH:
        raise _malformed(f"nested deeper than {MAX_JSON_DEPTH} levels")
    return check_text(value)


def check_text(tree: dict[str, Any]) -> dict[str, Any]:
    """Give the tree back if its texts can be stored: UTF-8 has no half surrogate pair, PostgreSQL no NUL.

    Raises InvalidRequest that names the field.
    """
    nodes: list[tuple[str, Any]] = list(tree.items())
    while nodes:
        path, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{path}.{name}", child) for name, child in node.items()]
        elif isinstance(node, list):
            nodes += [(f"{path}.{index}", child) for index, child in enumerate(node)]
        for text in (path.rpartition(".")[2], node):
            if isinstance(text, str) and (bad := _UNSTORABLE.search(text)):
                param = _UNSTORABLE.sub("?", path)[:200]
                rule, value = "neither NUL nor half a surrogate pair", f"U+{ord(bad[0]):04X} at {bad.start()}"
                raise InvalidRequest(f"{param}: must hold {rule}, got {value}.", param=param, rule=rule, value=value)
    return tree


def nest(items: list[tuple[str, str | UploadFile]]) -> dict[str, Any]:
    """Build the tree that form fields in bracket form describe; a plain name that repeats becomes a list.

    Raises InvalidRequest for a malformed name, or for one that is used both as a value and as an object.
    """
    tree: dict[str, Any] = {}
    for name, value in items:
        match = _NAME.fullmatch(name)
        if match is None:
            raise _bad_name(name, "a name, then keys in brackets")
        keys = [match[1], *_KEY.findall(match[2])]
        if len(keys) > MAX_DEPTH:
            raise _bad_name(name, f"at most {MAX_DEPTH} levels")
        _put(tree, keys, value, name)
    return {key: _lists(value) for key, value in tree.items()}


def _put(node: Any, keys: list[str], value: str | UploadFile, name: str) -> None:
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if key != "":
            raise _bad_name(name, "one field is either a list or an object")
        if not rest:
            node.append(value)
            return
        # `a[][x]=1&a[][y]=2` fills one object until a name of it repeats
        if not node or not isinstance(node[-1], dict) or rest[0] in node[-1]:
            node.append([] if rest[0] == "" else {})
        _put(node[-1], rest, value, name)
        return
    if not isinstance(node, dict) or key == "":
        raise _bad_name(name, "one field is either a list or an object")
    if not rest:
        if key in node and isinstance(node[key], dict):
            raise _bad_name(name, "one field is either a value or an object")
        if key not in node:
            node[key] = value
        elif isinstance(node[key], list):
            node[key].append(value)
        else:
            node[key] = [node[key], value]
        return
    _put(node.setdefault(key, [] if rest[0] == "" else {}), rest, value, name)


def _lists(node: Any) -> Any:
    """Turn objects whose names are 0, 1, … n-1 into lists."""
    if isinstance(node, list):
        return [_lists(item) for item in node]
    if not isinstance(node, dict):
        return node
    values = {key: _lists(value) for key, value in node.items()}
    if values and set(values) == {str(index) for index in range(len(values))}:
        return [values[str(index)] for index in range(len(values))]
    return values


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return depth


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _malformed(f"the name {repeated[:60]!r} stands twice in one object")
    return values


def _refuse_constant(text: str) -> Any:
    raise _malformed(f"{text} is not JSON")


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The body is not valid JSON: {reason}.", code="malformed_json", rule="RFC 8259 JSON", value=reason
    )


def _bad_name(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(
        f"The form field {name[:100]!r} breaks the rule: {rule}.",
        code="malformed_form",
        param=name[:100],
        rule=rule,
        value=name[:100],
    )


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "a number"
