"""The end of the runtime folder: removed with its dead sockets and free locks once the service has stopped.

Invariant: a folder that something else lies in, or that anybody uses, stays as it is, whole.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def remove_runtime_folder(folder: Path) -> None:
    """Remove the folder if only dead sockets and free locks are in it; the caller holds the data folder's lock."""
    with contextlib.ExitStack() as locks:
        try:
            found = sorted(folder.iterdir())
            in_use = next((path for path in found if not _is_left_over(path, locks)), None)
            if in_use is not None:
                logger.debug("the runtime folder stays: %s", in_use.name)
                return
            for path in found:
                path.unlink()
            folder.rmdir()
        except FileNotFoundError:
            # it was never made
            return
        except OSError as error:
            # something has come into it since
            logger.debug("the runtime folder stays: errno %s", error.errno)


def _is_left_over(path: Path, locks: contextlib.ExitStack) -> bool:
    about = path.lstat()
    if about.st_uid != os.getuid():
        return False
    if stat.S_ISSOCK(about.st_mode):
        return _is_dead(path)
    return stat.S_ISREG(about.st_mode) and path.suffix == ".lock" and _is_free(path, locks)


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(str(path)) == errno.ECONNREFUSED


def _is_free(path: Path, locks: contextlib.ExitStack) -> bool:
    """Take a lock if it can be had at once; it is held until the folder is gone."""
    file = locks.enter_context(path.open())
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
