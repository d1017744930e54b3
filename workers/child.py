"""Launcher of a supervised program: ask the kernel to kill it when the supervisor dies, then become that program.

`python -I -S child.py PARENT_PID PROGRAM ARG…`. Imports nothing of ours, so that it costs a few milliseconds. Linux
only knows PR_SET_PDEATHSIG (prctl(2)); elsewhere the program is just started. The request survives execve(2).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and execute the rest of the command line."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if not tie_to_parent(parent, signal.SIGKILL):
        sys.exit(1)
    os.execv(program[0], program)


def tie_to_parent(parent: int, signal_number: signal.Signals) -> bool:
    """Have this process get a signal when its parent dies; False if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
        # the parent may have died before the request was made
        return os.getppid() == parent
    return True


if __name__ == "__main__":
    main()
