"""What is seen from outside, previews of what is being made, and jobs that keep no words."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006_observed"
down_revision = "0005_batches"
branch_labels = None
depends_on = None

Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Add counters, which start with what is stored now; jobs from before keep their words."""
    op.create_table(
        "counters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("part", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "labels", "part", name=op.f("pk_counters")),
    )
    op.execute(
        "INSERT INTO counters (name, labels, part, value) "
        "SELECT 'stored_bytes', '[]', '', COALESCE(SUM(amount), 0) FROM usage WHERE kind = 'storage_bytes'"
    )
    op.add_column("models", sa.Column("figures", Json, nullable=True))
    op.create_table(
        "previews",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("jpeg", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_previews_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_previews")),
    )
    op.add_column("jobs", sa.Column("answer_s", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("words_until", sa.Double(), nullable=True))
    has_words = sa.text("words_until IS NOT NULL")
    op.create_index(
        "ix_jobs_words", "jobs", ["words_until"], unique=False, sqlite_where=has_words, postgresql_where=has_words
    )
