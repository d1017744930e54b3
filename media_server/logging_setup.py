"""Logging of a process: one handler on standard error, plain lines or JSON objects; called by entry points only.

The supervisor puts the process's name before each plain line; a JSON line carries it as a member.

Invariant: what an exception says is not logged, since it may quote a prompt, a model's text or a row of the database:
a traceback has types, places, and the codes that the operating system and the database give. That holds for what
nobody caught too.
"""

import copy
import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from media_server.settings import Settings

# these write a line for each poll or request at INFO; ours say what changed
_QUIET = (
    *("httpx", "httpx2", "httpcore", "kombu", "amqp", "alembic.runtime.migration"),
    *("celery.worker.strategy", "celery.worker.request", "celery.app.trace"),
)
# what the operating system, SQLite, PostgreSQL and we give beside an error's words
_CODES = ("errno", "sqlite_errorname", "sqlstate", "code")
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
# the ids of what a line is about, where its text names them
_JOB_ID = re.compile(r"\b(?:video|film|storyboard|join)_[0-9a-f]{32}\b")
_REQUEST_ID = re.compile(r"\b(?:req|chatcmpl)_[0-9a-f]{32}\b")
_ABOUT: ContextVar[dict[str, str | int]] = ContextVar("about", default={})  # noqa: B039
_OWN_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def setup_logging(settings: Settings, process: str) -> None:
    """Send this process's log to standard error in the form that the settings ask for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if settings.log_json else PlainFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda seen: _log_uncaught(seen.exc_type, seen.exc_value, seen.exc_traceback)
    if settings.log_level != "DEBUG":
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def log_context(**ids: str | int) -> Iterator[None]:
    """Have the JSON lines of this thread or task carry ids, such as `job_id`, until the block ends."""
    token = _ABOUT.set({**_ABOUT.get(), **ids})
    try:
        yield
    finally:
        _ABOUT.reset(token)


class PlainFormatter(logging.Formatter):
    """`2026-11-29T12:00:00.123Z INFO media_server.jobs.claims: message`, in UTC."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Write the record, and below it where its exception came from."""
        # a handler of another library may have left its own traceback in the record
        own = copy.copy(record)
        own.exc_text = None
        return super().format(own)

    def formatException(self, ei: _ExcInfo) -> str:
        """Write a traceback without the exceptions' own words."""
        return describe_exception(ei[1])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, ids where they are known, and a call's `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as one line of JSON."""
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_ids(str(line["message"])))
        line.update({name: value for name, value in record.__dict__.items() if name not in _OWN_ATTRIBUTES})
        if record.exc_info:
            line["exception"] = describe_exception(record.exc_info[1])
        return json.dumps(line, default=str, ensure_ascii=False)


def wrap_line(process: str, text: str) -> str:
    """Give a line that a process has written as a JSON line: as it is if it is one, else as its message."""
    if text.startswith("{"):
        try:
            if isinstance(json.loads(text), dict):
                return text
        except ValueError:
            # a line that only looks like one
            pass
    line = {"time": time.time(), "level": "INFO", "process": process, "logger": "output", "message": text}
    return json.dumps(line | _ids(text), ensure_ascii=False)


def _ids(text: str) -> dict[str, object]:
    """Give the ids of what a line is about: those of its context, or the first that it names."""
    found: dict[str, object] = dict(_ABOUT.get())
    for name, form in (("job_id", _JOB_ID), ("request_id", _REQUEST_ID)):
        if name not in found and (named := form.search(text)) is not None:
            found[name] = named[0]
    return found


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logging.getLogger("uncaught").critical("%s was not caught", kind.__name__, exc_info=error)


def describe_exception(error: BaseException | None) -> str:
    """Write an exception and those that led to it: traceback, type and codes, without what they say."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{_name(error)}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\nwhich led to\n\n".join(reversed(parts))


def _name(error: BaseException) -> str:
    said = {name: value for name in _CODES if isinstance(value := getattr(error, name, None), str | int)}
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    inner = ", ".join(_name(each) for each in error.exceptions) if isinstance(error, BaseExceptionGroup) else ""
    return name + "".join(f" {key}={value}" for key, value in said.items()) + (f" of {inner}" if inner else "")
