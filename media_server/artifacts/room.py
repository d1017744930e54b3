"""Whether there is room for new work on the disks that the service writes to: its data folder, and local artifacts.

What was accepted before still needs some: the watermark is above zero so that running jobs can finish and say so.
"""

import shutil
from pathlib import Path

from media_server.artifacts.store import ArtifactStore
from media_server.errors import InsufficientStorage
from media_server.settings import Settings


def check_room(settings: Settings, artifacts: ArtifactStore) -> None:
    """Raise InsufficientStorage if a disk has less than `min_free_bytes` left."""
    if settings.min_free_bytes == 0:
        return
    free = min(_free_bytes(folder) for folder in {settings.data_dir, artifacts.root or settings.data_dir})
    if free < settings.min_free_bytes:
        raise InsufficientStorage(
            f"The disk has {free} bytes left, and new jobs are taken only while it has {settings.min_free_bytes}.",
            rule=f"at least {settings.min_free_bytes} bytes free",
            value=free,
        )


def _free_bytes(folder: Path) -> int:
    # a data folder that holds nothing yet (database and artifacts by URL) need not exist
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
