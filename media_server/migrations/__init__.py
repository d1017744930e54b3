"""The database's revisions, run from inside the package by Alembic.

Alembic is imported when there is something to migrate: each process of a service checks the revision at its start.
Invariant: a database of a revision that this release does not know is refused, never guessed.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from media_server.errors import SchemaVersionError

if TYPE_CHECKING:
    from alembic.config import Config

# the revision that this release needs: the last of versions/
HEAD = "0008_batch_messages"


def upgrade(conn: Connection) -> None:
    """Run the missing migrations in the connection's open transaction.

    Raises SchemaVersionError if the database is of an unknown revision.
    """
    current = _current(conn)
    if current == HEAD:
        return
    if current is not None and current not in known_revisions():
        raise SchemaVersionError(f"The database is of revision {current}, which this release does not know.")
    from alembic import command

    config = _config()
    config.attributes["connection"] = conn
    command.upgrade(config, "head")


def check_revision(conn: Connection) -> None:
    """Raise SchemaVersionError unless the database is of this release's revision."""
    current = _current(conn)
    if current != HEAD:
        raise SchemaVersionError(f"The database is of revision {current}, this release needs {HEAD}.")


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    # a % in the path would be read as an interpolation
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


@cache
def known_revisions() -> frozenset[str]:
    """Name every revision that this release can bring to its own."""
    from alembic.script import ScriptDirectory

    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _current(conn: Connection) -> str | None:
    if not sa.inspect(conn).has_table("alembic_version"):
        return None
    revision: str | None = conn.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return revision
