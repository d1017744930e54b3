"""A disk of a few megabytes that can be filled to the last byte: a tmpfs, where one may be mounted."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import IO

DISK_BYTES = 192 << 20


def mount(folder: Path) -> str | None:
    """Put a small disk into memory; says why there is none where that is not allowed."""
    if sys.platform != "linux":
        return "none: a small disk is a tmpfs, which only Linux has"
    command = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"none, the disk is never filled: {done.stderr.strip()}"


def unmount(folder: Path) -> None:
    """Let go of it, also while something of it is open."""
    subprocess.run(("umount", "-l", str(folder)), check=False)


def fill(file: IO[bytes]) -> None:
    """Write into a file until not a byte is left on its disk."""
    for size in (1 << 20, 1 << 14, 512, 1):
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))
