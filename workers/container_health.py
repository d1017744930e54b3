"""A container's health check: where the API runs, alone or with the whole service, it must answer.

Exit code 0 is healthy. Any other process of the service is healthy while it runs: its end is its container's.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import httpx

from media_server.settings import load_settings

_TIMEOUT_S = 8.0
_ANSWERING = ("up", "api")


def main() -> int:
    """Look at the container's first process; with --init the command is its only child's, and its own line too."""
    return check([part.decode() for part in Path("/proc/1/cmdline").read_bytes().split(b"\0")])


def check(command: Sequence[str]) -> int:
    """Ask the service that a command has started; returns the exit code."""
    if not any(name in command for name in _ANSWERING):
        return 0
    settings = load_settings(host=_option(command, "--host"), port=_option(command, "--port"))
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    try:
        answer = httpx.get(f"http://{host}:{settings.port}/health/live", timeout=_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        print(f"unhealthy: {type(error).__name__}", file=sys.stderr)
        return 1
    return 0 if answer.status_code == 200 else 1


def _option(command: Sequence[str], name: str) -> str | None:
    values = [value for option, value in pairwise(command) if option == name]
    return values[-1] if values else None


if __name__ == "__main__":
    sys.exit(main())
