"""One store for the files of jobs and models: a folder, or S3 by URL.

Source: the object_store crate, by obstore. Keys are `<job>/<attempt>/<file>`, `<job>/segments/<file>`,
`<job>/inputs/<file>` or `models/<name>/<hash>/<file>`; they never change once written, since a rename is not atomic on
S3.
Invariants: a file is durable when `put_*` returns; no key leaves the store's folder, by dots or by links.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, S3Store, from_url

from media_server import crash_points
from media_server.errors import ConfigurationError, InsufficientStorage, InvalidRequest, NotFound
from media_server.jobs.spec import ArtifactRecord
from media_server.settings import Settings

READ_BYTES = 1 << 20
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MAX_KEY = 512
# how the library calls a file while it is written
_UNNAMED = re.compile(r"#\d+$")
# how the library words ENOSPC: it has no class of its own
_DISK_FULL = "os error 28)"


@dataclass(frozen=True)
class StoredFile:
    """What the store knows of a file that it has taken."""

    key: str
    content_type: str
    size_bytes: int
    sha256: str

    def record(self, name: str, sequence: int = 0) -> ArtifactRecord:
        """Name the file within its job, for the job's result."""
        return ArtifactRecord(name, self.key, self.content_type, self.size_bytes, self.sha256, sequence=sequence)


class ArtifactStore:
    """Files by key; made by `open_artifacts`, shared between threads."""

    def __init__(self, store: ObjectStore, root: Path | None) -> None:
        self._store = store
        # the real folder; None for S3
        self.root = root

    def put_file(self, key: str, source: Path | IO[bytes], content_type: str) -> StoredFile:
        """Copy a file (a path, or one opened for reading bytes) into the store."""
        _check_key(key)
        if isinstance(source, Path):
            with source.open("rb") as file:
                return self._put(key, file, content_type)
        source.seek(0)
        return self._put(key, source, content_type)

    def put_bytes(self, key: str, content: bytes, content_type: str) -> StoredFile:
        """Write bytes into the store."""
        _check_key(key)
        self._write(key, content, content_type)
        return StoredFile(key, content_type, len(content), hashlib.sha256(content).hexdigest())

    def read(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes from `start` up to, not including, `end`. Raises NotFound before the first."""
        size = self.size(key)
        stop = size if end is None else min(end, size)
        return self._chunks(key, start, stop)

    def size(self, key: str) -> int:
        """Give a file's size in bytes. Raises NotFound."""
        _check_key(key)
        try:
            return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            raise _not_found(key) from None

    def exists(self, key: str) -> bool:
        """Whether there is a file of this key."""
        with suppress(NotFound):
            self.size(key)
            return True
        return False

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys under a prefix, which is a folder: `video_1/` does not reach `video_10/`."""
        _check_key(prefix.rstrip("/"))
        for batch in obstore.list(self._store, prefix=prefix.rstrip("/")):
            for found in batch:
                yield found["path"]

    def walk(self) -> Iterator[tuple[str, float]]:
        """Yield key and last change (Unix seconds) of every file, also of those that have no name yet; in no order.

        It reads as it goes: what comes or goes meanwhile is in it or not.
        """
        if self.root is None:
            for batch in obstore.list(self._store):
                for found in batch:
                    yield found["path"], found["last_modified"].timestamp()
            return
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    changed_at = os.stat(path, follow_symlinks=False).st_mtime
                except FileNotFoundError:
                    continue
                yield os.path.relpath(path, self.root), changed_at

    def delete(self, key: str) -> None:
        """Delete one file. None there is no error."""
        _check_key(key)
        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def delete_prefix(self, prefix: str) -> int:
        """Delete every file under a prefix; returns how many. None there is no error."""
        keys = list(self.list_keys(prefix))
        for key in keys:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, key)
            crash_points.reach("file.removed")
        if self.root is not None:
            _remove_rest(self.root / prefix.rstrip("/"))
        return len(keys)

    def local_path(self, key: str) -> Path | None:
        """Give the path of a file that lies in a folder; None on S3. Raises NotFound if it is not there."""
        _check_key(key)
        if self.root is None:
            return None
        path = (self.root / key).resolve()
        if not path.is_relative_to(self.root) or not path.is_file():
            raise _not_found(key)
        return path

    def presigned_url(self, key: str, expires_s: float) -> str | None:
        """Give a URL that reads a file without our help for a while; None if it lies in a folder."""
        _check_key(key)
        if not isinstance(self._store, S3Store):
            return None
        return obstore.sign(self._store, "GET", key, timedelta(seconds=expires_s))

    def _put(self, key: str, file: IO[bytes], content_type: str) -> StoredFile:
        digest = hashlib.sha256()
        size_bytes = 0
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
        file.seek(0)
        self._write(key, file, content_type)
        return StoredFile(key, content_type, size_bytes, digest.hexdigest())

    def _write(self, key: str, content: bytes | IO[bytes], content_type: str) -> None:
        if self.root is None:
            obstore.put(self._store, key, content, attributes={"Content-Type": content_type})
            return
        self._check_contained(key)
        try:
            obstore.put(self._store, key, content)
        except BaseError as error:
            if _DISK_FULL not in str(error):
                raise
            raise InsufficientStorage("The disk is full; the file was not kept.") from error
        crash_points.reach("file.named")
        # the row that will name this file is durable; so is the file, and each folder that leads to it
        path = self.root / key
        _fsync(path)
        for folder in path.parents:
            _fsync(folder)
            if folder == self.root:
                break
        crash_points.reach("file.synced")

    def _chunks(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        if self.root is not None:
            self._check_contained(key)
        while start < stop:
            try:
                chunk = obstore.get_range(self._store, key, start=start, end=min(start + READ_BYTES, stop))
            except FileNotFoundError:
                raise _not_found(key) from None
            yield bytes(chunk)
            start += len(chunk)

    def _check_contained(self, key: str) -> None:
        """Refuse a key whose folder leads out of the root over a link."""
        assert self.root is not None
        if not (self.root / key).resolve().is_relative_to(self.root):
            raise _not_found(key)


def open_artifacts(settings: Settings | str) -> ArtifactStore:
    """Open the store of these settings, or the one at a path or URL (`s3://bucket/prefix`).

    S3 takes its credentials, endpoint and region from the AWS variables, as its tools do.
    """
    place = settings.artifacts if isinstance(settings, Settings) else settings
    if "://" not in place or place.startswith("file://"):
        root = Path(place.removeprefix("file://")).expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ArtifactStore(LocalStore(root), root)
    if place.startswith("s3://"):
        return ArtifactStore(from_url(place), None)
    scheme = place.partition("://")[0]
    raise ConfigurationError(f"artifacts_url must be a folder or s3://, got {scheme}://.", param="artifacts_url")


def _check_key(key: str) -> None:
    if len(key) > _MAX_KEY or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidRequest(f"An artifact key has plain names between slashes, got {key!r}.", param="key", value=key)


def _not_found(key: str) -> NotFound:
    return NotFound("The file is not there any more.", code="file_not_found", param="key", value=key)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_rest(folder: Path) -> None:
    """Remove what the library does not list: files whose writer was killed before they had their name, and folders."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            if _UNNAMED.search(name):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))
        # a folder that a late writer fills again stays
        with suppress(OSError):
            os.rmdir(path)
