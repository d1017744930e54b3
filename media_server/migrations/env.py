"""Alembic's entry: runs the revisions on the connection that `upgrade` hands over, in its transaction."""

from alembic import context
from sqlalchemy.engine import Connection

from media_server.jobs.tables import metadata


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    context.run_migrations()


_run(context.config.attributes["connection"])
