"""The queue's index holds what places are made of: a place among 10,000 jobs is read from it alone."""

import sqlalchemy as sa
from alembic import op

revision = "0007_queue_index"
down_revision = "0006_observed"
branch_labels = None
depends_on = None

_COLUMNS = ("pool", "status", "queue_key", sa.text("priority DESC"), "created_at", "id")


def upgrade() -> None:
    """Replace the index."""
    op.drop_index("ix_jobs_queue", table_name="jobs")
    op.create_index("ix_jobs_queue", "jobs", [*_COLUMNS, "predicted_gpu_seconds"])


def downgrade() -> None:
    """Put the narrower one back."""
    op.drop_index("ix_jobs_queue", table_name="jobs")
    op.create_index("ix_jobs_queue", "jobs", list(_COLUMNS))
