"""Limits of keys and the ledger: tallies, a shot's number in each entry, and the indexes that both read."""

import sqlalchemy as sa
from alembic import op

revision = "0004_keys_and_ledger"
down_revision = "0003_webhooks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add what a ledger by shot and limits by key need; entries made before name no shot."""
    op.add_column("usage", sa.Column("shot", sa.Integer(), nullable=True))
    op.create_index("ix_usage_job", "usage", ["job_id"], unique=False)
    is_deleted = sa.text("deleted_at IS NOT NULL")
    op.create_index(
        "ix_jobs_deleted", "jobs", ["deleted_at"], unique=False, sqlite_where=is_deleted, postgresql_where=is_deleted
    )
    op.create_index("ix_jobs_owner_queue", "jobs", ["queue_key", "status", "pool"], unique=False)
    op.create_table(
        "tallies",
        sa.Column("owner_key_id", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("amount", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner_key_id", "label", "kind", "period", name=op.f("pk_tallies")),
    )
    op.create_index("ix_tallies_period", "tallies", ["period"], unique=False)
