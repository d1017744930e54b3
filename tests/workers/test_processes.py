"""Supervised processes: output with a name, death seen, group killed, back-off, no orphan after a SIGKILL."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.leases import is_alive, worker_id
from workers.processes import BACKOFF_MAX_S, Child, ChildSpec, describe_exit


def wait_until(is_there: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_there():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def child_of(code: str, lines: list[tuple[str, str]] | None = None) -> Child:
    said = [] if lines is None else lines
    spec = ChildSpec("child", (sys.executable, "-c", code), extra_env={"ADDED": "yes"})
    return Child(spec, {"PATH": os.environ["PATH"]}, lambda name, line: said.append((name, line)))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has reaped yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_output_carries_the_name_and_the_environment_is_what_was_given() -> None:
    lines: list[tuple[str, str]] = []
    child = child_of("import os,sys; print(sorted(os.environ)); print('err', file=sys.stderr)", lines)
    child.start()
    wait_until(lambda: len(lines) == 2)
    assert {name for name, _ in lines} == {"child"}
    assert any("'ADDED'" in line and "HOME" not in line for _, line in lines)
    wait_until(lambda: child.reap() is not None)


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_a_death_is_seen_once_with_its_cause(code: str, expected: int) -> None:
    child = child_of(code)
    child.start()
    seen: list[int] = []
    wait_until(lambda: (found := child.reap()) is not None and not seen.append(found))  # type: ignore[func-returns-value]
    assert seen == [expected]
    assert child.reap() is None and child.process is None
    assert describe_exit(expected) == {3: "exit code 3", -9: "killed by SIGKILL"}[expected]


def test_what_a_dead_child_left_behind_is_killed() -> None:
    lines: list[tuple[str, str]] = []
    code = "import subprocess,sys; print(subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)']).pid)"
    child = child_of(code, lines)
    child.start()
    wait_until(lambda: bool(lines))
    left = int(lines[0][1])
    assert is_alive(left)
    wait_until(lambda: child.reap() is not None)
    wait_until(lambda: is_gone(left))


def test_back_off_doubles_and_is_forgotten_after_a_healthy_run() -> None:
    child = child_of("")
    child.started_at = time.monotonic()
    assert [child.plan_restart() for _ in range(8)] == [0.5, 1, 2, 4, 8, 10, 10, 10]
    for _ in range(2000):
        assert child.plan_restart() == BACKOFF_MAX_S
    child.started_at = time.monotonic() - 31
    assert child.plan_restart() == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_no_child_outlives_a_supervisor_that_is_killed() -> None:
    code = (
        "import sys,time\n"
        "from workers.processes import Child, ChildSpec\n"
        "program = (sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)')\n"
        "child = Child(ChildSpec('c', program), {}, print)\n"
        "print(child.start(), flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    # the launcher has become the program, which says so
    assert supervisor.stdout.readline() == "c 1\n"
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    wait_until(lambda: is_gone(pid))
    supervisor.stdout.close()


def test_lease_owners_name_process_and_machine() -> None:
    assert worker_id("video-0", 17).startswith("video-0@") and worker_id("video-0", 17).endswith(":17")
    assert worker_id("video-0") != worker_id("video-0", 17)
