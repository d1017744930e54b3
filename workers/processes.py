"""One supervised child process: started, watched, prefixed in the log, stopped with all that it started.

Each child leads a process group of its own; the group is killed before the child is reaped, so that its id cannot
have been given to anybody else. On Linux the kernel kills the child when the supervisor itself is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from media_server.logging_setup import wrap_line

_LAUNCHER = Path(__file__).with_name("child.py")
BACKOFF_FIRST_S = 0.5
# a job whose worker died waits no longer than its lease would have lasted
BACKOFF_MAX_S = 10.0
# a child that ran this long counts as healthy: its next restart is quick again
BACKOFF_RESET_S = 30.0


@dataclass(frozen=True)
class ChildSpec:
    """What to start: `extra_env` is added to the settings' environment, `pass_fds` stay open in the child."""

    name: str
    command: tuple[str, ...]
    extra_env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    has_leases: bool = False
    is_engine: bool = False


class Child:
    """A child and its restarts; `process` is None while it waits for its next start."""

    def __init__(self, spec: ChildSpec, environment: Mapping[str, str], write: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.environment = {**environment, **spec.extra_env}
        self.write = write
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.restart_at = 0.0
        self.failures = 0
        self.reader: threading.Thread | None = None

    def start(self) -> int:
        """Start the program and the thread that copies its output; returns its process id."""
        launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()))
        self.process = subprocess.Popen(
            (*launcher, *self.spec.command),
            env=self.environment,
            pass_fds=self.spec.pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started_at = time.monotonic()
        self.reader = threading.Thread(target=self._copy_output, args=(self.process,), daemon=True)
        self.reader.start()
        return self.process.pid

    def reap(self) -> int | None:
        """Give the exit code of a child that has died (negative: the signal), after killing what it left behind."""
        if self.process is None:
            return None
        if not _has_died(self.process):
            return None
        self._kill_group()
        exit_code = self.process.wait()
        self.process = None
        return exit_code

    def plan_restart(self) -> float:
        """Choose when to start again, doubling the wait for each quick death; returns the wait in seconds."""
        now = time.monotonic()
        self.failures = 1 if now - self.started_at > BACKOFF_RESET_S else self.failures + 1
        wait_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self.failures - 1, 10))
        self.restart_at = now + wait_s
        return wait_s

    def terminate(self) -> None:
        """Ask the child, and it alone, to stop."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """Kill the child and all that it started."""
        if self.process is not None:
            self._kill_group()

    def _kill_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _copy_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                # of a progress bar that overwrites itself, its last state
                self.write(self.spec.name, line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])


def _has_died(process: subprocess.Popen[bytes]) -> bool:
    """Look without reaping, where the system can; elsewhere the process id is free once this says True."""
    if sys.platform == "darwin":
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def describe_exit(exit_code: int) -> str:
    """Say how a process ended: `exit code 1` or `killed by SIGKILL`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def write_line(name: str, line: str, *, as_json: bool) -> None:
    """Write a child's line to our standard error with its name; a line that is JSON already carries it."""
    text = wrap_line(name, line) if as_json else f"{name:<12} | {line}"
    sys.stderr.write(f"{text}\n")
