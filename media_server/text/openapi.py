"""OpenAPI parts of the text routes, whose bodies are read by hand."""

from typing import Any

from pydantic import BaseModel

from media_server.text.sse import MEDIA_TYPE


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Declare a JSON body; nested models stand where they are used."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, schema)}}}}


def stream_response(description: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Declare that an operation may also answer with server-sent events.

    As for jobs (http_openapi.event_stream) the schema is that of one event; `data` is a chunk as JSON, or `[DONE]`.
    """
    fields = {name: {"type": "string"} for name in ("id", "event", "data")}
    schema = {"type": "object", "properties": fields}
    return {status: {"description": description, "content": {MEDIA_TYPE: {"schema": schema}}}}


def _inline(node: Any, root: dict[str, Any]) -> Any:
    """Put each definition in the place of its references; none of these models contains itself."""
    if isinstance(node, list):
        return [_inline(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inline(root["$defs"][name], root), **siblings}
    return {key: _inline(value, root) for key, value in node.items() if key != "$defs"}
