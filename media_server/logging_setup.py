"""Logging of a process: one handler on standard error, plain lines or JSON objects; called by entry points only.

The supervisor puts the process's name before each plain line; a JSON line carries it as a member.
"""

import json
import logging
import sys
import time

from media_server.settings import Settings

# these write a line for each poll or request at INFO; ours say what changed
_QUIET = (
    *("httpx", "httpx2", "httpcore", "kombu", "amqp", "alembic.runtime.migration"),
    *("celery.worker.strategy", "celery.worker.request", "celery.app.trace"),
)
_OWN_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def setup_logging(settings: Settings, process: str) -> None:
    """Send this process's log to standard error in the form that the settings ask for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if settings.log_json else PlainFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    if settings.log_level != "DEBUG":
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)


class PlainFormatter(logging.Formatter):
    """`2026-11-29T12:00:00.123Z INFO media_server.jobs.claims: message`, in UTC."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a call passed as `extra` becomes members of it."""

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
        line.update({name: value for name, value in record.__dict__.items() if name not in _OWN_ATTRIBUTES})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
