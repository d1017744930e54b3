"""The files of one claim: what the GPU program is given, and what it has made.

Keys: an attempt's files lie under `<job>/<attempt>/` and go with it; finished segments lie under `<job>/segments/`,
outlive their attempt and go with the job. Everything here may take long, and nothing here beats the lease.
"""

import logging
from pathlib import Path
from typing import Any

from media_server.errors import NotFound
from media_server.jobs import claims
from media_server.jobs.spec import ArtifactRecord, Claim
from media_server.jobs.transitions import SEGMENTS
from workers.pool_worker import PoolContext

logger = logging.getLogger(__name__)


class ClipFiles:
    """The files of one claim, in a local folder and in the store."""

    def __init__(self, context: PoolContext, claim: Claim, folder: Path) -> None:
        self.db = context.db
        self.store = context.artifacts
        self.claim = claim
        self.folder = folder
        self.prefix = f"{claim.job.id}/{claim.attempt}"

    def fetch(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Bring inputs and finished segments to local files: paths by input, and the segments to resume from."""
        inputs = {
            name: str(self._local(key, self.folder / f"{name}{Path(key).suffix}"))
            for name, key in self.claim.job.params.get("inputs", {}).items()
        }
        resume = []
        for checkpoint in claims.checkpoints(self.db, self.claim.job.id):
            try:
                path = self._local(checkpoint.key, self.folder / f"segment_{checkpoint.sequence}.mkv")
            except NotFound:
                logger.warning("job %s: a finished segment is gone and is made again", self.claim.job.id)
                break
            resume.append({"segment": checkpoint.sequence, "path": str(path), "data": checkpoint.data})
        return inputs, resume

    def keep_segment(self, segment: int, path: Path, data: dict[str, Any]) -> None:
        """Upload a finished segment and write its checkpoint; one that comes too late for its attempt goes again."""
        key = f"{self.claim.job.id}/{SEGMENTS}/{self.claim.attempt}_{segment:03d}.mkv"
        self.store.put_file(key, path, "video/x-matroska")
        if not claims.save_checkpoint(self.db, self.claim, segment, key, data):
            self.store.delete(key)

    def upload(self, made: list[dict[str, Any]]) -> list[ArtifactRecord]:
        """Upload what the program has made: `name`, `path` and `content_type` of each file."""
        records = []
        for file in made:
            path = Path(file["path"])
            stored = self.store.put_file(f"{self.prefix}/{path.name}", path, file["content_type"])
            records.append(stored.record(file["name"]))
        return records

    def remove(self) -> None:
        """Remove what this attempt has uploaded."""
        self.store.delete_prefix(self.prefix)

    def remove_segments(self) -> None:
        """Remove the finished segments of all attempts: nobody continues from them any more."""
        self.store.delete_prefix(f"{self.claim.job.id}/{SEGMENTS}")

    def _local(self, key: str, path: Path) -> Path:
        """Give the path of a stored file, copied to `path` where the store is no folder."""
        local = self.store.local_path(key)
        if local is not None:
            return local
        with path.open("wb") as file:
            for chunk in self.store.read(key):
                file.write(chunk)
        return path
