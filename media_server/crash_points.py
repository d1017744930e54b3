"""Named places on a job's way where a test has a process die, as by SIGKILL; nothing happens there otherwise.

A transaction of name `x` has `x.written` before its commit, `x.committed` after it, `x.rung` after its doorbells.
MEDIA_SERVER_TEST_CRASH_AT=NAME has the first process that comes there die; with NAME=FILE only if it can make that
file, so that the process that takes its place goes on.
"""

import os
import signal

from media_server.settings import crash_point

# those that wake somebody after their commit
RINGING = ("accept", "cancel", "finish", "fail", "release", "confirm_cancel", "end_lease", "lost", "ring_again")
SILENT = (
    *("hold_key", "hold_files", "keep_answer", "delete"),
    *("claim", "beat", "checkpoint"),
    *("forget_files", "purge", "take_message", "settle_message"),
)
# of the store: a file has its name, is synced, is removed; of a clip: its files lie there and no row says so yet, and
# its row says so and its segments lie there still; of a message: it has come and no row says so yet; of the reserve:
# it is written and has no name yet
OTHER = ("file.named", "file.synced", "file.removed", "clip.uploaded", "clip.finished", "message.sent", "reserve.made")
POINTS = frozenset(
    [*OTHER]
    + [f"{name}.{step}" for name in RINGING for step in ("written", "committed", "rung")]
    + [f"{name}.{step}" for name in SILENT for step in ("written", "committed")]
)

_name, _file = crash_point()
is_armed = _name is not None


def arm(name: str | None) -> None:
    """Have this process die at a point, or at none."""
    global _name, _file, is_armed
    assert name is None or name in POINTS, name
    _name, _file, is_armed = name, None, name is not None


def reach(name: str) -> None:
    """Die here if this is the point."""
    if name != _name:
        return
    if _file is not None:
        try:
            os.close(os.open(_file, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
