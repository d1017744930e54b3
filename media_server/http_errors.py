"""Every error leaves as `application/problem+json`: OpenAI's error object with RFC 9457's members beside it.

Covers our own tree, FastAPI's validation, Starlette's routing (404, 405), the database's refusals, and the unforeseen.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.exc import OperationalError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from media_server.errors import InsufficientStorage, InvalidRequest, MediaServerError, NotFound, NotReady
from media_server.http_context import RequestContext
from media_server.jobs.database import is_disk_full

logger = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
_MAX_VALUE_CHARS = 200


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str = Field(description="Which field, which rule, which value.")
    type: str = Field(description="invalid_request_error, authentication_error, rate_limit_error, server_error, …")
    param: str | None = Field(description="The field, with dots for nested ones.")
    code: str = Field(description="Stable name of the reason, for programs.")


class Problem(BaseModel):
    """Every error of this API: OpenAI's `error` with RFC 9457's members beside it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "message": "size: width and height are multiples of 16; got '161x96'.",
                        "type": "invalid_request_error",
                        "param": "size",
                        "code": "invalid_request",
                    },
                    "type": "urn:media-server:error:invalid_request",
                    "title": "Invalid request",
                    "status": 400,
                    "detail": "size: width and height are multiples of 16; got '161x96'.",
                    "param": "size",
                    "rule": "width and height are multiples of 16",
                    "value": "161x96",
                }
            ]
        }
    )

    error: ErrorDetail
    type: str = Field(description="A URN that names the code.")
    title: str
    status: int
    detail: str
    param: str | None = None
    rule: str | None = Field(None, description="The rule that the request breaks.")
    value: Any = Field(None, description="The value that broke it, shortened.")


class MethodNotAllowed(MediaServerError):
    """The path exists, this method on it does not."""

    status, type, code, title = 405, "invalid_request_error", "method_not_allowed", "Method not allowed"


class PreconditionFailed(MediaServerError):
    """If-Match names another version of the file."""

    status, type, code, title = 412, "invalid_request_error", "precondition_failed", "Precondition failed"


class RangeNotSatisfiable(MediaServerError):
    """The range asked for lies past the end of the file."""

    status, type, code, title = 416, "invalid_request_error", "range_not_satisfiable", "Range not satisfiable"


class ProblemResponse(JSONResponse):
    """An error as it leaves."""

    media_type = PROBLEM_TYPE

    def render(self, content: Any) -> bytes:
        """Write JSON whatever a caller sent: half a surrogate pair stays an escape, which JSON allows."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def problem_response(error: MediaServerError, headers: Mapping[str, str] | None = None) -> ProblemResponse:
    """Turn an error into its answer; a value that a caller sent is shortened."""
    body = error.to_body()
    if "value" in body:
        body["value"] = shown(body["value"])
    return ProblemResponse(body, status_code=error.status, headers={**error.headers(), **(headers or {})})


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of `app` with a problem document."""
    app.add_exception_handler(MediaServerError, _on_media_server_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(OperationalError, _on_database_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unforeseen)


def invalid_from(error: ValidationError, *, noun: str = "") -> InvalidRequest:
    """Turn pydantic's errors about a request body into ours: the first one's field, rule and value, and how many more.

    `noun` names the outer field when only a part of the body was validated.
    """
    return _invalid([dict(item) for item in error.errors(include_url=False)], outer=noun)


def shown(value: Any) -> Any:
    """Make a value fit for an error: short, JSON, and never the bytes of a file."""
    if value is None or (isinstance(value, bool | float) and math.isfinite(value)):
        return value
    if isinstance(value, int) and abs(value) <= 2**64:
        return value
    if isinstance(value, UploadFile):
        return "(a file)"
    text = value if isinstance(value, str) else repr(_without_files(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}… ({len(text)} characters)"


def _without_files(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_files(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_files(item) for name, item in value.items()}
    return "(a file)" if isinstance(value, UploadFile) else value


def _invalid(errors: Sequence[Mapping[str, Any]], *, outer: str = "") -> InvalidRequest:
    first = errors[0]
    # the first part of FastAPI's location is where the value stood (query, path, header, body)
    path = [str(part) for part in first["loc"] if part not in ("query", "path", "header", "body", "cookie")]
    param = ".".join([outer, *path] if outer else path) or None
    rule = _rule(first)
    is_missing = first["type"] == "missing"
    value = None if is_missing else shown(first.get("input"))
    got = "it is missing" if is_missing else f"got {value!r}"
    more = f" ({len(errors) - 1} more fields are invalid)" if len(errors) > 1 else ""
    return InvalidRequest(
        f"{param or 'The body'}: {rule}; {got}.{more}",
        code="unknown_parameter" if first["type"] == "extra_forbidden" else None,
        param=param,
        rule=rule,
        value=value,
    )


def _rule(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "this field is required"
    if error["type"] == "extra_forbidden":
        return "this field is not known here"
    message = str(error["msg"])
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")


async def _on_media_server_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MediaServerError)
    if error.status >= 500:
        # its message may be an engine's, and quote a prompt or an answer
        logger.warning("%s (%s)", error.code, type(error).__name__, extra=_ids(request))
    return problem_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = str(errors[0].get("ctx", {}).get("error", errors[0]["msg"]))
        return problem_response(
            InvalidRequest(
                f"The body is not valid JSON: {reason}.", code="malformed_json", rule="RFC 8259 JSON", value=reason
            )
        )
    return problem_response(_invalid(errors))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        found: MediaServerError = NotFound(f"Nothing is at {shown(request.url.path)}.", code="unknown_url")
    elif error.status_code == 405:
        # Starlette names the methods of the first route of this path only
        allowed = headers["Allow"] = _methods(request) or headers.get("Allow", "")
        found = MethodNotAllowed(
            f"{shown(request.url.path)} does not take {request.method}; it takes {allowed}.",
            rule=allowed,
            value=request.method,
        )
    elif error.status_code < 500:
        found = InvalidRequest(str(error.detail), status=error.status_code)
    else:
        found = MediaServerError(str(error.detail), status=error.status_code)
    return problem_response(found, headers)


async def _on_database_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OperationalError)
    if is_disk_full(error):
        # each refused request says this; a trace of each would fill what disk is left for the log
        logger.error("the database's disk is full", extra=_ids(request))
        return problem_response(InsufficientStorage("The database's disk is full; nothing was written."))
    logger.error("the database refused", exc_info=error, extra=_ids(request))
    return problem_response(
        NotReady("The database does not answer at the moment; try again.", code="database_unavailable"),
        {"retry-after": "1"},
    )


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Note a caller that was gone before its request was whole; nobody hears the answer."""
    logger.info("the request broke off before its end", extra=_ids(request))
    return problem_response(InvalidRequest("The request broke off before its end."))


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    """Answer 500 without the reason: Starlette raises the exception again afterwards, and the log has it."""
    ids = _ids(request)
    return problem_response(
        MediaServerError("The service failed in a way that it did not foresee; its log has the reason."),
        # this answer leaves outside our middleware, so it adds the id itself
        {"x-request-id": ids["request_id"]},
    )


def _methods(request: Request) -> str | None:
    """List the methods that the path of a request takes, as the OpenAPI document has them."""
    for template, operations in request.app.openapi()["paths"].items():
        if compile_path(template)[0].match(request.url.path):
            return ", ".join(sorted(method.upper() for method in operations))
    return None


def _ids(request: Request) -> dict[str, str]:
    context = request.scope.get("state", {}).get("context")
    return {"request_id": context.request_id if isinstance(context, RequestContext) else ""}
