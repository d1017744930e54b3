"""What a backup is written to and read from: a folder, or a tar file; both hold the same files and a manifest.

Invariants: a target appears under its name when it is whole and on the disk; a source's names stay below where they
are put, and its bytes are what the manifest's hashes say.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from media_server.errors import ConfigurationError

MANIFEST = "backup.json"
_READ_BYTES = 1 << 20
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_RULE = "a whole backup: a folder or a tar file with backup.json"


@dataclass(frozen=True)
class Entry:
    """A file of a backup."""

    path: str
    size_bytes: int
    sha256: str


class Target:
    """A backup as it is written."""

    def __init__(self, folder: Path | None, tar: tarfile.TarFile | None) -> None:
        self._folder = folder
        self._tar = tar
        self.entries: list[Entry] = []

    def add(self, path: str, file: IO[bytes]) -> None:
        """Write a file's bytes from its beginning; closes nothing."""
        file.seek(0)
        digest, size_bytes = hashlib.sha256(), 0
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
        file.seek(0)
        self._write(path, file, size_bytes)
        self.entries.append(Entry(path, size_bytes, digest.hexdigest()))

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest: what has none is no backup."""
        content = json.dumps({**manifest, "files": [asdict(entry) for entry in self.entries]}, indent=1).encode()
        self._write(MANIFEST, io.BytesIO(content), len(content))

    def _write(self, path: str, file: IO[bytes], size_bytes: int) -> None:
        if self._tar is not None:
            info = tarfile.TarInfo(path)
            info.size, info.mode = size_bytes, 0o600
            self._tar.addfile(info, file)
            return
        assert self._folder is not None
        place = self._folder / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _copy(file, place)


class Source:
    """A backup as it is read."""

    def __init__(self, folder: Path | None, tar: tarfile.TarFile | None) -> None:
        self._folder = folder
        self._tar = tar
        try:
            with self._open(MANIFEST) as file:
                self.manifest: dict[str, Any] = json.loads(file.read())
            self.entries = [Entry(**entry) for entry in self.manifest["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _bad(f"{MANIFEST} cannot be read") from error
        for entry in self.entries:
            if not all(_SEGMENT.fullmatch(part) for part in entry.path.split("/")):
                raise _bad(f"it names {entry.path!r}")

    def copy(self, entry: Entry, place: Path) -> None:
        """Copy a file to a place. Raises ConfigurationError if it is missing, or not what its hash says."""
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._open(entry.path) as file:
            sha256, size_bytes = _copy(file, place)
        if (sha256, size_bytes) != (entry.sha256, entry.size_bytes):
            raise _bad(f"{entry.path} is not what it was when it was written")

    def _open(self, path: str) -> IO[bytes]:
        try:
            file = self._tar.extractfile(path) if self._tar is not None else (self._root / path).open("rb")
        except (KeyError, OSError, tarfile.TarError) as error:
            raise _bad(f"{path} is missing") from error
        if file is None:
            raise _bad(f"{path} is no file")
        return file

    @property
    def _root(self) -> Path:
        assert self._folder is not None
        return self._folder


@contextmanager
def open_target(target: Path) -> Iterator[Target]:
    """Write a backup; it gets its name at the end of the block, and leaves nothing if that raises.

    Raises ConfigurationError if the target is there and is no empty folder.
    """
    target = target.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigurationError(
            f"target: {target} exists; a backup is written to a new place.",
            param="target",
            rule="a new file, or a new or empty folder",
            value=str(target),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if target.suffix == ".tar":
            made = partial / "backup.tar"
            with made.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                with tarfile.open(fileobj=file, mode="w") as tar:
                    yield Target(None, tar)
                file.flush()
                os.fsync(file.fileno())
            made.rename(target)
        else:
            yield Target(partial, None)
            if target.exists():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def open_source(source: Path) -> Iterator[Source]:
    """Read a backup. Raises ConfigurationError if it is none."""
    if source.is_dir():
        yield Source(source, None)
        return
    try:
        tar = tarfile.open(source, "r:")  # noqa: SIM115
    except (OSError, tarfile.TarError) as error:
        raise _bad(f"{source} cannot be read") from error
    with tar:
        yield Source(None, tar)


def _copy(file: IO[bytes], place: Path) -> tuple[str, int]:
    """Write a file for this user alone, durably; returns its hash and size."""
    digest, size_bytes = hashlib.sha256(), 0
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest(), size_bytes


def _bad(reason: str) -> ConfigurationError:
    return ConfigurationError(f"source: must be {_RULE}; {reason}.", param="source", rule=_RULE)
