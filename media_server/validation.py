"""Reads a request's fields into a pydantic model, with our error where pydantic has its own."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from media_server.errors import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)

_RULES = {"extra_forbidden": "is not a field of this request", "missing": "is required"}


def parse_request(model: type[Model], values: dict[str, Any]) -> Model:
    """Read a request's fields. Raises InvalidRequest that names the first bad field, its rule and the value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        rule = _RULES.get(first["type"], first["msg"])
        value = None if first["type"] == "missing" else first["input"]
        got = "" if value is None else f", got {value!r}"
        raise InvalidRequest(f"{param or 'body'}: {rule}{got}.", param=param, rule=rule, value=value) from error
