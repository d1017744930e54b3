"""Messages about batches: a message in the outbox is about a job or a batch.

SQLite cannot let a column be null that was not: there the two tables are made anew and filled from the old ones.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008_batch_messages"
down_revision = "0007_queue_index"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_outbox_due": ["state", "next_at"],
    "ix_outbox_job": ["job_id"],
    "ix_outbox_endpoint": ["endpoint_id", "created_at", "id"],
    "ix_outbox_owner": ["owner_key_id", "created_at", "id"],
    "ix_outbox_settled": ["settled_at"],
}


def upgrade() -> None:
    """Let a message have no job and no event, and name a batch instead."""
    if op.get_bind().dialect.name != "sqlite":
        op.alter_column("outbox", "job_id", nullable=True)
        op.alter_column("outbox", "event_seq", nullable=True)
        op.add_column("outbox", sa.Column("batch_id", sa.String(), nullable=True))
        op.create_unique_constraint(op.f("uq_outbox_batch_id_endpoint_id"), "outbox", ["batch_id", "endpoint_id"])
        return
    # the tries go first: a message takes its tries with it
    op.execute("CREATE TABLE kept_deliveries AS SELECT * FROM deliveries")
    op.drop_table("deliveries")
    op.execute("CREATE TABLE kept_outbox AS SELECT * FROM outbox")
    for name in _INDEXES:
        op.drop_index(name, table_name="outbox")
    op.drop_table("outbox")
    columns = _create_outbox()
    _create_deliveries()
    op.execute(f"INSERT INTO outbox ({columns}) SELECT {columns} FROM kept_outbox")
    tries = "id, outbox_id, number, started_at, duration_s, status_code, error"
    op.execute(f"INSERT INTO deliveries ({tries}) SELECT {tries} FROM kept_deliveries")
    op.drop_table("kept_deliveries")
    op.drop_table("kept_outbox")


def _create_outbox() -> str:
    """Make the outbox with its indexes; returns the names of the columns that it had."""
    old: list[sa.Column[Any]] = [
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=True),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("endpoint_id", sa.String(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("receiver", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("uncounted", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
    ]
    op.create_table(
        "outbox",
        *old,
        sa.Column("batch_id", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_outbox_job_id")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["webhook_endpoints.id"], name=op.f("fk_outbox_endpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("event_seq", "endpoint_id", name=op.f("uq_outbox_event_seq_endpoint_id")),
        sa.UniqueConstraint("batch_id", "endpoint_id", name=op.f("uq_outbox_batch_id_endpoint_id")),
    )
    for name, columns in _INDEXES.items():
        op.create_index(name, "outbox", columns)
    return ", ".join(column.name for column in old)


def _create_deliveries() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("outbox_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["outbox_id"], ["outbox.id"], name=op.f("fk_deliveries_outbox_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("outbox_id", "number", name=op.f("uq_deliveries_outbox_id_number")),
        sqlite_autoincrement=True,
    )
