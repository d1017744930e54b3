"""Room for freeing room: a file beside SQLite's database that is given up when the disk is full.

Deleting, cancelling and collecting write a little before they free much. On a disk without a byte left they would be
refused like everything else, and nothing could ever be freed. PostgreSQL's disk is not ours to look after.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from media_server import crash_points
from media_server.jobs.database import is_disk_full
from media_server.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = "reserve"
_BLOCK = bytes(1 << 16)


def with_reserve(settings: Settings, work: Callable[[], T]) -> T:
    """Do something that frees room; if the disk is full, once more at the reserve's expense."""
    try:
        return work()
    except OperationalError as error:
        if not is_disk_full(error):
            raise
    if _path(settings) is not None and give_reserve(settings):
        logger.warning("the disk is full: the reserve of %d bytes is given up for deleting", settings.reserve_bytes)
    # who was quicker may have given it up
    return work()


def keep_reserve(settings: Settings) -> bool:
    """Make the reserve if it is missing and there is room for it; returns whether it is there."""
    path = _path(settings)
    if path is None:
        return False
    try:
        if path.stat().st_size == settings.reserve_bytes:
            return True
    except FileNotFoundError:
        pass
    # as much again stays for who comes first
    if shutil.disk_usage(path.parent).free < 2 * settings.reserve_bytes:
        return False
    making = path.with_name(f"{_NAME}.new")
    try:
        with making.open("wb") as file:
            # written, not only allocated: not every file system takes that at its word
            for start in range(0, settings.reserve_bytes, len(_BLOCK)):
                file.write(_BLOCK[: settings.reserve_bytes - start])
            file.flush()
            os.fsync(file.fileno())
        crash_points.reach("reserve.made")
        making.replace(path)
    except OSError:
        making.unlink(missing_ok=True)
        return False
    return True


def give_reserve(settings: Settings) -> bool:
    """Give the reserve up; False if there was none."""
    path = _path(settings)
    if path is None:
        return False
    path.with_name(f"{_NAME}.new").unlink(missing_ok=True)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _path(settings: Settings) -> Path | None:
    url = make_url(settings.database)
    if settings.reserve_bytes == 0 or url.get_backend_name() != "sqlite" or not url.database:
        return None
    return Path(url.database).with_name(_NAME)
