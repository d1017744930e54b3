"""The lines of a batch's input file, and what becomes of each: a record of the output file or of the error file.

Source: OpenAI's Batch API. A line is `{"custom_id", "method": "POST", "url", "body"}`, a record is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`; ours also has `line`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from media_server.errors import InvalidRequest, MediaServerError
from media_server.http_body import parse_json
from media_server.http_errors import shown
from media_server.http_requests import parse_body
from media_server.ids import new_id
from media_server.validation import RequestModel

MAX_CUSTOM_ID = 256
# of all jobs of an owner, those of batches come last
PRIORITY = -50
# what each batch's endpoint makes: a job, or text at once
ENDPOINTS: Mapping[str, Literal["job", "text"]] = {
    "/v1/videos": "job",
    "/v1/films": "job",
    "/v1/storyboards": "job",
    "/v1/chat/completions": "text",
    "/v1/completions": "text",
}
# beside the body: custom_id, method, url
_ENVELOPE_BYTES = 4096


class BatchLine(RequestModel):
    """One request of a batch's input file."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "custom_id": "shot-1",
                    "method": "POST",
                    "url": "/v1/videos",
                    "body": {"prompt": "a red ball rolls over a green field", "seconds": "2"},
                }
            ]
        },
    )

    custom_id: str = Field(min_length=1, max_length=MAX_CUSTOM_ID, description="Another one for each line.")
    method: Literal["POST"]
    url: str = Field(description="The endpoint of the batch.")
    body: dict[str, Any] = Field(description="The request, as that endpoint takes it as JSON; nothing is streamed.")


@dataclass(frozen=True)
class LineSpec:
    """Where a line stands, and whose it is; a line that breaks a rule has its error record already."""

    number: int
    start: int
    length: int
    custom_id: str | None
    model: str | None = None
    record: str | None = None


def split(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Give each line of a file with the byte that it starts at, without its end."""
    start, parts = 0, list[bytes]()
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join((*parts, end))
            parts.clear()
            yield start, line
            start += len(line) + 1
        parts.append(rest)
    if line := b"".join(parts):
        yield start, line


def read_lines(chunks: Iterator[bytes], endpoint: str, *, max_body_bytes: int) -> Iterator[LineSpec]:
    """Read a batch's input file; empty lines are passed over."""
    seen: dict[str, int] = {}
    for number, (start, text) in enumerate(split(chunks), 1):
        if not text.strip():
            continue
        custom_id = None
        try:
            if len(text) > max_body_bytes + _ENVELOPE_BYTES:
                refuse("line", f"at most {max_body_bytes + _ENVELOPE_BYTES} bytes", len(text))
            values = parse_json(text)
            known = values.get("custom_id")
            custom_id = known if isinstance(known, str) and 1 <= len(known) <= MAX_CUSTOM_ID else None
            # a field of this name would be taken for the place that it stands in
            if not isinstance(values.get("body"), dict):
                refuse("body", "the request, a JSON object", values.get("body"))
            line = parse_body(BatchLine, values)
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                refuse("custom_id", f"another one for each line; line {first} has it too", line.custom_id)
            check(line, endpoint)
        except MediaServerError as error:
            yield LineSpec(number, start, len(text), custom_id, record=refusal(number, custom_id, error))
            continue
        model = line.body.get("model")
        yield LineSpec(number, start, len(text), line.custom_id, model if isinstance(model, str) else None)


def check(line: BatchLine, endpoint: str) -> None:
    """Raise InvalidRequest for what no line of a batch may ask for."""
    if line.url != endpoint:
        refuse("url", f"the batch's endpoint, {endpoint}", line.url)
    for name in ("stream", "resume_s"):
        if line.body.get(name):
            refuse(f"body.{name}", "not in a batch: an answer comes whole, in the output file", line.body[name])
    priority = line.body.get("priority")
    if isinstance(priority, int) and priority >= 0:
        rule = f"below 0 in a batch ({PRIORITY} if left out): requests that somebody waits for go first"
        refuse("body.priority", rule, priority)


def request_body(text: bytes, *, priority: int | None = PRIORITY) -> bytes:
    """Give the body of a line that was checked, as it is sent: with this priority if it names none of its own."""
    body: dict[str, Any] = json.loads(text)["body"]
    if body.get("priority") is None and priority is not None:
        body["priority"] = priority
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def request_id(batch_id: str, number: int) -> str:
    """Name a line's request, in logs too."""
    return f"{batch_id}:{number}"


def answered(batch_id: str, number: int, custom_id: str | None, status_code: int, body: Any) -> str:
    """Write the record of a line that was answered."""
    response = {"status_code": status_code, "request_id": request_id(batch_id, number), "body": body}
    return _record(number, custom_id, response, None)


def failed(
    batch_id: str, number: int, custom_id: str | None, body: BaseModel | None, code: str, message: str
) -> str:
    """Write the record of a line whose job did not end well, or that was never run; `body` is the job, if any."""
    response = None
    if body is not None:
        said = body.model_dump(mode="json")
        response = {"status_code": 200, "request_id": request_id(batch_id, number), "body": said}
    return _record(number, custom_id, response, {"code": code, "message": message})


def refusal(number: int, custom_id: str | None, error: MediaServerError) -> str:
    """Write the record of a line that is no request: which field, which rule, which value."""
    said: dict[str, Any] = {"code": error.code, "message": f"Line {number}: {error.message}", "line": number}
    for name in ("param", "rule", "value"):
        said[name] = shown(getattr(error, name))
    return _record(number, custom_id, None, said)


def refuse(param: str, rule: str, value: object) -> None:
    """Raise InvalidRequest for a field of a line."""
    raise InvalidRequest(f"{param}: {rule}; got {shown(value)!r}.", param=param, rule=rule, value=value)


def _record(number: int, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> str:
    record = {
        "id": f"batch_{new_id('req')}",
        "custom_id": custom_id,
        "line": number,
        "response": response,
        "error": error,
    }
    # a value that a caller sent may hold half a surrogate pair: it stays an escape
    return json.dumps(record, ensure_ascii=True, separators=(",", ":"))
