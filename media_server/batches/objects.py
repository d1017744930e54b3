"""Files and batches as the API takes and gives them: OpenAI's objects.

Times are whole unix seconds.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from media_server.batches.files import FilePurpose, FileRow
from media_server.batches.lines import BatchLine
from media_server.batches.store import BatchRow, BatchStatus
from media_server.http_requests import ID_PATTERN, Metadata
from media_server.validation import RequestModel

_ID = "0192f0c1a5b07cc2a3f44b6f1d2e3c4d"
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_WINDOW = re.compile(r"(?P<amount>[1-9][0-9]{0,3})(?P<unit>[mhd])")
MAX_WINDOW_S = 30 * 86400.0
Endpoint = Literal["/v1/videos", "/v1/films", "/v1/storyboards", "/v1/chat/completions", "/v1/completions"]


def read_window(text: str) -> float:
    """Give the seconds of a completion window such as `24h`.

    Raises ValueError if it is none, or longer than MAX_WINDOW_S.
    """
    found = _WINDOW.fullmatch(text)
    window_s = 0.0 if found is None else int(found["amount"]) * _UNITS[found["unit"]]
    if not 0 < window_s <= MAX_WINDOW_S:
        raise ValueError("a whole number of minutes, hours or days, such as 24h, at most 30d")
    return window_s


def _window(value: str) -> str:
    if isinstance(value, str):
        read_window(value)
    return value


class Lifetime(RequestModel):
    """How long a file is kept."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"] = Field(description="The file's creation.")
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class FileBody(RequestModel):
    """A file to be kept: JSON lines, each a request of a batch (`BatchLine`)."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch"]
    expires_after: Lifetime | None = Field(None, description="30 days if left out, or what the service keeps at most.")


class BatchBody(RequestModel):
    """Requests to be run from a file, while the service has room, within a time."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": f"file_{_ID}",
                    "endpoint": "/v1/videos",
                    "completion_window": "24h",
                    "metadata": {"project": "demo"},
                }
            ]
        },
    )

    input_file_id: str = Field(pattern=ID_PATTERN, description="A file of the purpose `batch`.")
    endpoint: Endpoint = Field(description="What each line asks for.")
    completion_window: Annotated[str, BeforeValidator(_window)] = Field(
        max_length=5,
        # what `read_window` takes, for those who read the schema
        pattern=r"^(?:[1-9][0-9]{0,3}m|(?:[1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h|(?:[1-9]|[12][0-9]|30)d)$",
        description="Lines that have not ended by then end as expired. OpenAI has `24h` alone.",
        examples=["24h"],
    )
    metadata: Metadata
    output_expires_after: Lifetime | None = Field(None, description="How long the output and error files are kept.")


class File(BaseModel):
    """OpenAI's file object."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": f"file_{_ID}",
                    "object": "file",
                    "bytes": 320,
                    "created_at": 1764400000,
                    "expires_at": 1766992000,
                    "filename": "shots.jsonl",
                    "purpose": "batch",
                    "status": "processed",
                    "status_details": None,
                }
            ]
        }
    )

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None = Field(description="When it is removed.")
    filename: str
    purpose: FilePurpose
    status: Literal["processed"]
    status_details: None


class BatchError(BaseModel):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    """What is wrong with a batch's file."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    """How many lines there are, and how they have ended so far."""

    total: int
    completed: int
    failed: int


class InputTokens(BaseModel):
    """Details of what was read."""

    cached_tokens: int


class OutputTokens(BaseModel):
    """Details of what was written."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens that the lines of text have taken so far."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Batch(BaseModel):
    """OpenAI's batch object."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": f"batch_{_ID}",
                    "object": "batch",
                    "endpoint": "/v1/videos",
                    "errors": None,
                    "input_file_id": f"file_{_ID}",
                    "completion_window": "24h",
                    "status": "in_progress",
                    "model": "tiny-wan",
                    "output_file_id": None,
                    "error_file_id": None,
                    "created_at": 1764400000,
                    "in_progress_at": 1764400002,
                    "expires_at": 1764486400,
                    "finalizing_at": None,
                    "completed_at": None,
                    "failed_at": None,
                    "expired_at": None,
                    "cancelling_at": None,
                    "cancelled_at": None,
                    "request_counts": {"total": 40, "completed": 12, "failed": 1},
                    "usage": {
                        "input_tokens": 0,
                        "input_tokens_details": {"cached_tokens": 0},
                        "output_tokens": 0,
                        "output_tokens_details": {"reasoning_tokens": 0},
                        "total_tokens": 0,
                    },
                    "metadata": {"project": "demo"},
                }
            ]
        }
    )

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrors | None = Field(description="Why it failed as a whole; what single lines did is in their file.")
    input_file_id: str
    completion_window: str
    status: BatchStatus
    model: str | None = Field(description="The model, if every line names the same one.")
    output_file_id: str | None = Field(description="The lines that ended well, once the batch has ended.")
    error_file_id: str | None = Field(description="The other lines; each says which field, which rule, which value.")
    created_at: int
    in_progress_at: int | None
    expires_at: int = Field(description="When lines that have not ended are given up.")
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str]


BODIES: list[type[BaseModel]] = [BatchBody, BatchLine]


def file_object(row: FileRow) -> File:
    """Describe a file."""
    return File(
        id=row.id,
        object="file",
        bytes=row.size_bytes,
        created_at=int(row.created_at),
        expires_at=_whole(row.expires_at),
        filename=row.filename,
        purpose=row.purpose,
        status="processed",
        status_details=None,
    )


def batch_object(row: BatchRow) -> Batch:
    """Describe a batch."""
    ends: dict[str, Any] = {
        f"{status}_at": _whole(row.ended_at) if row.status == status else None
        for status in ("completed", "failed", "expired", "cancelled")
    }
    errors = row.errors and BatchErrors(object="list", data=[BatchError(**error) for error in row.errors])
    return Batch(
        id=row.id,
        object="batch",
        endpoint=row.endpoint,  # type: ignore[arg-type]
        errors=errors or None,
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        status=row.status,
        model=row.model,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        created_at=int(row.created_at),
        in_progress_at=_whole(row.in_progress_at),
        expires_at=int(row.expires_at),
        finalizing_at=_whole(row.finalizing_at),
        cancelling_at=_whole(row.cancelling_at),
        request_counts=RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
        usage=BatchUsage(
            input_tokens=row.input_tokens,
            input_tokens_details=InputTokens(cached_tokens=0),
            output_tokens=row.output_tokens,
            output_tokens_details=OutputTokens(reasoning_tokens=0),
            total_tokens=row.input_tokens + row.output_tokens,
        ),
        metadata=row.metadata,
        **ends,
    )


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)
