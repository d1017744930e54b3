"""Reads a request's fields into a pydantic model, with our error where pydantic has its own; and refuses values."""

from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from media_server.errors import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)

# characters of a refused value that the answer repeats
_MAX_ECHO = 200
_RULES = {"extra_forbidden": "is not a field of this request", "missing": "is required"}


class RequestModel(BaseModel):
    """A part of a request. A number may be text, as forms have it, but not true, which pydantic takes for 1, nor is 1
    true."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_mixed_kinds(cls, value: object, info: ValidationInfo) -> object:
        inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
        given = {type(item) for item in inner} & {bool, int, float}
        if given:
            kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
            if bool in given and kinds & {int, float} and bool not in kinds:
                raise ValueError("a number, not true or false")
            if given & {int, float} and bool in kinds and not kinds & {int, float}:
                raise ValueError("true or false, not a number")
        return value


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


def _kinds(annotation: Any) -> set[Any]:
    """Gather the types that an annotation is made of."""
    # what stands beside a type in Annotated is none
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return {annotation} if not inner else set[Any]().union(*map(_kinds, inner))


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
