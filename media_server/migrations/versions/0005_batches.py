"""Uploaded files, batches and their lines."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005_batches"
down_revision = "0004_keys_and_ledger"
branch_labels = None
depends_on = None

Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Make the three tables."""
    op.create_table(
        "files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_created", "files", ["created_at", "id"], unique=False)
    op.create_index("ix_files_owner", "files", ["owner_key_id", "created_at", "id"], unique=False)
    op.create_index("ix_files_expires", "files", ["expires_at"], unique=False)
    op.create_table(
        "batches",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("input_file_id", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("metadata", Json, nullable=False),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("traceparent", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("ending", sa.String(), nullable=False),
        sa.Column("errors", Json, nullable=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("completed", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_file_id", sa.String(), nullable=True),
        sa.Column("error_file_id", sa.String(), nullable=True),
        sa.Column("output_lifetime_s", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("in_progress_at", sa.Double(), nullable=True),
        sa.Column("finalizing_at", sa.Double(), nullable=True),
        sa.Column("cancelling_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_created", "batches", ["created_at", "id"], unique=False)
    op.create_index("ix_batches_owner", "batches", ["owner_key_id", "created_at", "id"], unique=False)
    op.create_index("ix_batches_status", "batches", ["status", "created_at"], unique=False)
    op.create_index("ix_batches_input", "batches", ["input_file_id"], unique=False)
    op.create_index("ix_batches_ended", "batches", ["ended_at"], unique=False)
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.String(), nullable=True),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("is_error", sa.Boolean(), nullable=True),
        sa.Column("record", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_lines_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
    )
    op.create_index("ix_batch_lines_state", "batch_lines", ["batch_id", "state", "number"], unique=False)
