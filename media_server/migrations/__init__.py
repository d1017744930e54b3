"""The database's revisions, run from inside the package by Alembic.

Invariant: a database of a revision that this release does not know is refused, never guessed.
"""

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from media_server.errors import SchemaVersionError


def upgrade(conn: Connection) -> None:
    """Run the missing migrations in the connection's open transaction.

    Raises SchemaVersionError if the database is of an unknown revision.
    """
    current = _current(conn)
    if current is not None and current not in known_revisions():
        raise SchemaVersionError(f"The database is of revision {current}, which this release does not know.")
    config = _config()
    config.attributes["connection"] = conn
    command.upgrade(config, "head")


def check_revision(conn: Connection) -> None:
    """Raise SchemaVersionError unless the database is of this release's revision."""
    current, head = _current(conn), head_revision()
    if current != head:
        raise SchemaVersionError(f"The database is of revision {current}, this release needs {head}.")


def _config() -> Config:
    config = Config()
    # a % in the path would be read as an interpolation
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


@cache
def known_revisions() -> frozenset[str]:
    """Name every revision that this release can bring to its own."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


@cache
def head_revision() -> str | None:
    """Name the revision that this release needs."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _current(conn: Connection) -> str | None:
    return MigrationContext.configure(conn).get_current_revision()
