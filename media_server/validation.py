"""Reads a request's fields into a pydantic model, with our error where pydantic has its own; and refuses values."""

from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from media_server.errors import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)

# characters of a refused value that the answer repeats
_MAX_ECHO = 200
_RULES = {"extra_forbidden": "is not a field of this request", "missing": "is required"}


def parse_request(model: type[Model], values: dict[str, Any]) -> Model:
    """Read a request's fields. Raises InvalidRequest that names the first bad field, its rule and the value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        rule = _RULES.get(first["type"], first["msg"])
        value = None if first["type"] == "missing" else _short(first["input"])
        got = "" if value is None else f", got {value!r}"
        raise InvalidRequest(f"{param or 'body'}: {rule}{got}.", param=param, rule=rule, value=value) from error


def refuse(param: str, rule: str, value: object) -> NoReturn:
    """Raise InvalidRequest that names the field, the rule and the value."""
    raise InvalidRequest(f"{param}: {rule}, got {value!r}.", param=param, rule=rule, value=value)


def _short(value: Any) -> Any:
    """Give a value as an answer can hold it: not at any length, and only what JSON and UTF-8 can say."""
    if value is None or isinstance(value, (bool, int)):
        return value
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}…"
