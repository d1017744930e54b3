"""The OpenAPI document: complete and exact, errors included.

FastAPI writes the paths; here each operation gets the errors that the handlers of http_errors.py can answer with, and
the bodies that are read by hand (multipart or JSON) get their schemas.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from media_server import http_objects, key_objects
from media_server.batches import objects as batch_objects
from media_server.http_admission import MAKES_JOBS, MAKES_TEXT
from media_server.http_errors import PROBLEM_TYPE, Problem
from media_server.http_objects import JobEvent
from media_server.webhooks import objects as webhook_objects

TITLE = "media-server"
DESCRIPTION = (
    "Clips, films and text from a self-hosted media server. The shapes are OpenAI's where OpenAI has them, "
    "so that the unmodified `openai` package works; films, storyboards and jobs are resources of our own."
)
TAGS = [
    {"name": "videos", "description": "Clips: OpenAI's Videos API, and more."},
    {"name": "films", "description": "From an idea to a film: storyboard, shots, joining."},
    {"name": "storyboards", "description": "From an idea to a list of shots."},
    {"name": "chat", "description": "Text."},
    {"name": "batches", "description": "Files of requests, run while the service has room: OpenAI's Batch API."},
    {"name": "webhooks", "description": "Who is told when a job has ended: OpenAI's endpoints, and the delivery log."},
    {"name": "jobs", "description": "Any job: state, cancelling, events."},
    {"name": "usage", "description": "What was used, by key, film, shot and project label."},
    {"name": "keys", "description": "API keys and what each may use; for the scope `admin`."},
    {"name": "models", "description": "What is loaded, and its rules."},
    {"name": "health", "description": "Whether the service is up."},
]

_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The request breaks a rule: the problem says which field, which rule and which value.",
    401: "The key is missing or not known.",
    403: "The key does not reach this far, or a page of another origin asks.",
    404: "Nothing of that name exists for this caller.",
    405: "The path does not take this method.",
    408: "The body came too slowly.",
    409: "The state of the thing named does not allow this.",
    412: "If-Match names another version.",
    413: "The body passes the size limit.",
    415: "The content type, its encoding or the format of a file is not one that is taken.",
    416: "The range lies past the end of the file.",
    422: "Well formed, and still not possible to do.",
    429: "The caller has used its share.",
    500: "The service failed in a way that it did not foresee.",
    503: "A part of the service that this needs is not up.",
    507: "The disk is too full to take new work.",
}
_KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "msk_…",
    "description": "An API key, made by `media-server keys create`. GET needs the scope `read`, everything else "
    "`submit`; `admin` reaches what belongs to other keys. A service for which no key was ever made listens on "
    "loopback only and takes requests without one.",
}
_QUOTA_HEADERS = {
    f"x-ratelimit-{field}-{name}": {"description": f"{text} {noun}, if the key has that quota.", "schema": schema}
    for name, noun in {
        "jobs": "jobs that may wait at a time",
        "work": "steps x pixels x frames of today (UTC)",
        "storage": "bytes of files that may be kept",
        "streams": "text requests at a time",
    }.items()
    for field, text, schema in (
        ("limit", "The most", {"type": "integer"}),
        ("remaining", "What is left of the", {"type": "integer"}),
        *(
            (("reset", "Seconds until a new day begins for the", {"type": "string", "examples": ["3600s"]}),)
            if name == "work"
            else ()
        ),
    )
}
# any operation may meet these
_EVERYWHERE = (400, 403, 500, 503)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declare the errors of an operation, beside those that every operation may meet."""
    return {status: _problem(status) for status in statuses}


def body_of(model: type[BaseModel], *, files: tuple[str, ...] = (), is_required: bool = True) -> dict[str, Any]:
    """Declare a body that is read by hand: `model` as JSON, or as a form in which `files` may be uploads.

    The model itself must stand in `describe`'s list. Forms write nested objects in bracket form or as JSON.
    """
    form = model.model_json_schema(ref_template=_REF)
    form.pop("$defs", None)
    form.pop("examples", None)
    for name in files:
        known = form["properties"][name]
        upload = {"type": "string", "contentMediaType": "application/octet-stream"}
        form["properties"][name] = {**known, "anyOf": [upload, *known.get("anyOf", [])]}
    content = {
        "application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": is_required, "content": content}}


def event_stream(model: type[BaseModel]) -> dict[str, Any]:
    """Declare the content of a stream of server-sent events whose `data` is `model` as JSON.

    OpenAPI 3.1 has no word for a stream: the schema is that of one event, its fields as they stand in the stream.
    """
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=model.__name__)},
    }
    text = {"type": "string"}
    fields = {"id": text, "event": text, "data": data, "retry": {"type": "integer"}}
    return {"text/event-stream": {"schema": {"type": "object", "properties": fields}}}


def describe(app: FastAPI, *, bodies: list[type[BaseModel]]) -> None:
    """Make `app.openapi` write the document, once; `bodies` are the models that `body_of` names."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _write(app, bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _write(app: FastAPI, bodies: list[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    models: list[type[BaseModel]] = [Problem, JobEvent, *bodies]
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for model in _with_examples():
        if model.__name__ in schemas:
            # FastAPI drops what is null from them, and with it the fields
            schemas[model.__name__]["examples"] = _examples(model)
    document["components"]["securitySchemes"] = {"key": _KEY_SCHEME}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _declare_errors(operation, is_open=path.startswith("/health/"))
    # FastAPI's own shape of a validation error is never sent
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


_OBJECTS = (http_objects, webhook_objects, batch_objects, key_objects)


def _with_examples() -> list[type[BaseModel]]:
    items = [item for module in _OBJECTS for item in vars(module).values()]
    found = [item for item in items if isinstance(item, type) and issubclass(item, BaseModel)]
    return [model for model in found if _examples(model)]


def _examples(model: type[BaseModel]) -> list[Any]:
    extra = model.model_config.get("json_schema_extra")
    return list(extra.get("examples", [])) if isinstance(extra, dict) else []  # type: ignore[arg-type]


def _declare_errors(operation: dict[str, Any], *, is_open: bool) -> None:
    """Declare what every operation may answer with, and what those that bring work may; all but health takes a key."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    statuses = {*_EVERYWHERE, *((408, 413, 415) if "requestBody" in operation else ())}
    if not is_open:
        statuses.add(401)
        # without any key made, the service takes requests without one
        operation["security"] = [{"key": []}, {}]
    if operation["operationId"] in MAKES_JOBS | MAKES_TEXT:
        statuses.add(429)
        for status, response in responses.items():
            if status.startswith("2"):
                response.setdefault("headers", {}).update(_QUOTA_HEADERS)
    if operation["operationId"] in MAKES_JOBS:
        statuses.add(507)
    for status in sorted(statuses):
        responses.setdefault(str(status), _problem(status))
    operation["responses"] = dict(sorted(responses.items()))


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Problem")}
    return {"description": _REASONS[status], "content": {PROBLEM_TYPE: {"schema": schema}}}
