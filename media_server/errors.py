"""One tree of errors: what a caller did wrong or what the service lacks, in OpenAI's shape and RFC 9457's.

`MediaServerError` leaves the service by HTTP; `JobError` is written into a job's row when the job itself fails.
Invariant: a message says which field, which rule and which value, and never an internal address or path.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

# the openai package repeats a refused request by itself, but only where that may help soon
_PATIENCE_S = 60.0


class MediaServerError(Exception):
    """Anything that ends a request; the subclasses below carry the HTTP status."""

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        type: str | None = None,
        param: str | None = None,
        rule: str | None = None,
        value: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.status = status or self.status
        self.type = type or self.type
        self.param = param
        self.rule = rule
        self.value = value

    def to_body(self) -> dict[str, Any]:
        """Give the JSON answer: OpenAI's `error` object, with RFC 9457's members beside it."""
        body: dict[str, Any] = {
            "error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code},
            "type": f"urn:media-server:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.message,
        }
        for name in ("param", "rule", "value"):
            if getattr(self, name) is not None:
                body[name] = getattr(self, name)
        return body

    def headers(self) -> dict[str, str]:
        """Give the HTTP headers that belong to this error."""
        return {}


class InvalidRequest(MediaServerError):
    """The request breaks a rule that is known before any work is done."""

    status, type, code, title = 400, "invalid_request_error", "invalid_request", "Invalid request"


class Unauthorized(MediaServerError):
    """No key, or a key that is not known."""

    status, type, code, title = 401, "authentication_error", "invalid_api_key", "Unauthorized"

    def headers(self) -> dict[str, str]:
        """Say how a key is sent (RFC 6750)."""
        return {"www-authenticate": 'Bearer realm="media-server"'}


class Forbidden(MediaServerError):
    """The key is known, its scope does not reach this far."""

    status, type, code, title = 403, "permission_error", "permission_denied", "Forbidden"


class NotFound(MediaServerError):
    """Nothing of that name exists for this caller."""

    status, type, code, title = 404, "invalid_request_error", "not_found", "Not found"


class Conflict(MediaServerError):
    """The thing named is in a state that does not allow this."""

    status, type, code, title = 409, "invalid_request_error", "conflict", "Conflict"

    def headers(self) -> dict[str, str]:
        """Tell the openai package not to retry: it repeats a 409 twice unless told otherwise."""
        return {"x-should-retry": "false"}


class BodyTooSlow(MediaServerError):
    """The body did not come within its time."""

    status, type, code, title = 408, "invalid_request_error", "request_timeout", "Request timeout"

    def headers(self) -> dict[str, str]:
        """Close the connection: what is left of the body is not waited for."""
        return {"connection": "close"}


class TooLarge(MediaServerError):
    """The body or an upload passes the limit."""

    status, type, code, title = 413, "invalid_request_error", "too_large", "Content too large"


class UnsupportedMedia(MediaServerError):
    """The content type or the file's format is not one that is taken."""

    status, type, code, title = 415, "invalid_request_error", "unsupported_media", "Unsupported media type"


class Unprocessable(MediaServerError):
    """Well formed, and still not possible to do."""

    status, type, code, title = 422, "invalid_request_error", "unprocessable", "Unprocessable content"


class RateLimited(MediaServerError):
    """The caller has used its share; `retry_after_s` says when to come back, None that waiting does not help."""

    status, type, code, title = 429, "rate_limit_error", "rate_limit_exceeded", "Too many requests"

    def __init__(self, message: str, *, retry_after_s: float | None, **members: Any) -> None:
        super().__init__(message, **members)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """Give Retry-After in whole seconds, rounded up; the openai package is told not to wait for long ones."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        wait = {"retry-after": str(max(1, -int(-self.retry_after_s // 1)))}
        return wait if self.retry_after_s <= _PATIENCE_S else {**wait, "x-should-retry": "false"}


class NotReady(MediaServerError):
    """A part of the service that this request needs is not up yet."""

    status, type, code, title = 503, "server_error", "not_ready", "Service unavailable"


class ServiceStopping(NotReady):
    """The service was told to stop while it answered."""

    code = "service_stopping"

    def __init__(self) -> None:
        super().__init__("The service is stopping; try again in a moment.")

    def headers(self) -> dict[str, str]:
        """Give Retry-After: by then it is up again, if it is to be."""
        return {"retry-after": "5"}


class TooManyUploads(MediaServerError):
    """As many uploads as may come at once are under way."""

    status, type, code, title = 503, "server_error", "too_many_uploads", "Service unavailable"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} uploads are under way; try again in a moment.", rule=f"at most {limit} at once")

    def headers(self) -> dict[str, str]:
        """Give Retry-After, and close the connection rather than read the body that comes."""
        return {"retry-after": "5", "connection": "close"}


class InsufficientStorage(MediaServerError):
    """The disk is too full to take new work."""

    status, type, code, title = 507, "server_error", "insufficient_storage", "Insufficient storage"


class SchemaVersionError(MediaServerError):
    """The database or the configuration is of a version that this release does not read."""

    code, title = "schema_version", "Other schema version"


class DataDirLocked(MediaServerError):
    """Another running service owns the data folder."""

    code, title = "data_dir_locked", "Data folder in use"


class ConfigurationError(MediaServerError):
    """A setting is unknown or has a value that its rule does not allow."""

    code, title = "configuration_error", "Bad configuration"


JobErrorCode = Literal[
    "out_of_memory",
    "worker_crashed",
    "worker_lost",
    "insufficient_storage",
    "invalid_request",
    "invalid_output",
    "model_error",
    "engine_unavailable",
    "shot_failed",
    "storyboard_failed",
    "join_failed",
    "internal_error",
]
JOB_ERROR_CODES: frozenset[str] = frozenset(get_args(JobErrorCode))


@dataclass(frozen=True)
class JobError:
    """Why a job failed, as its row and its API object say it."""

    code: JobErrorCode
    message: str

    @classmethod
    def from_wire(cls, code: str, message: str) -> Self:
        """Take a code that another program sent; one that is not in the list becomes `internal_error`."""
        if code in JOB_ERROR_CODES:
            return cls(code, message)  # type: ignore[arg-type]
        return cls("internal_error", f"{code}: {message}")
