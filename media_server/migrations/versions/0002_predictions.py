"""What each job is predicted to take, so that a queue knows its length in seconds."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the predictions; jobs from before have none."""
    op.add_column("jobs", sa.Column("predicted_gpu_seconds", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("predicted_peak_memory_bytes", sa.BigInteger(), nullable=True))
