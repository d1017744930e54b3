"""Databases of this release's revision that cost a copy: the revisions are run once in each process of the tests."""

import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy.engine import make_url

from media_server.jobs.database import Database, Ring, migrate, open_database


def open_migrated(url: str, ring: Ring | None = None) -> Database:
    """Open a new, migrated SQLite database at a URL."""
    place = make_url(url)
    assert place.get_backend_name() == "sqlite" and place.database is not None
    write_migrated(Path(place.database))
    return open_database(url, ring)


def write_migrated(path: Path) -> None:
    """Write a new, migrated SQLite database file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # where there is one, a copy would take its rows
    with path.open("xb") as file:
        file.write(_migrated())


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "migrated.db"
        db = open_database(f"sqlite:///{path}")
        migrate(db)
        # its log is written into the file when the last connection closes
        db.close()
        return path.read_bytes()
