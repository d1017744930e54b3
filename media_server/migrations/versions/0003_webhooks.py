"""Replay and rotation of webhooks, their receivers, keys that a crash lets go, lists by status, model and metadata.

A revision is frozen once released: it repeats the columns instead of importing today's tables.
"""

from urllib.parse import urlsplit

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003_webhooks"
down_revision = "0002"
branch_labels = None
depends_on = None

Json = sa.JSON().with_variant(JSONB(), "postgresql")

_LISTS = {
    "ix_jobs_created": [],
    "ix_jobs_kind": ["kind"],
    "ix_jobs_status": ["status"],
    "ix_jobs_kind_status": ["kind", "status"],
    "ix_jobs_model": ["model"],
    "ix_jobs_owner": ["owner_key_id"],
    "ix_jobs_owner_kind": ["owner_key_id", "kind"],
    "ix_jobs_owner_status": ["owner_key_id", "status"],
}
_REPLACED = ("ix_jobs_created", "ix_jobs_kind", "ix_jobs_owner")
_PORTS = {"https": 443, "http": 80}
# what an index of PostgreSQL can hold
_MAX_VALUE_CHARS = 512


def upgrade() -> None:
    """Change tables and indexes, and fill what is new from what is there."""
    for name in _REPLACED:
        op.drop_index(name, table_name="jobs")
    is_kept = sa.text("deleted_at IS NULL")
    for name, columns in _LISTS.items():
        op.create_index(name, "jobs", [*columns, "created_at", "id"], sqlite_where=is_kept, postgresql_where=is_kept)
    _add_metadata()
    op.drop_index("ix_outbox_endpoint", table_name="outbox")
    op.add_column("outbox", sa.Column("uncounted", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("outbox", sa.Column("receiver", sa.String(), nullable=False, server_default=""))
    op.create_index("ix_outbox_endpoint", "outbox", ["endpoint_id", "created_at", "id"])
    op.create_index("ix_outbox_owner", "outbox", ["owner_key_id", "created_at", "id"])
    op.create_index("ix_outbox_settled", "outbox", ["settled_at"])
    _name_receivers()
    op.add_column("webhook_endpoints", sa.Column("old_secrets", Json, nullable=False, server_default=sa.text("'[]'")))
    for column in ("old_secret", "old_secret_until"):
        # nothing has rotated a secret before this revision
        op.drop_column("webhook_endpoints", column)
    op.drop_index("ix_webhook_endpoints_owner", table_name="webhook_endpoints")
    op.create_index("ix_webhook_endpoints_owner", "webhook_endpoints", ["owner_key_id", "created_at", "id"])
    # nor written a key
    op.add_column("idempotency_keys", sa.Column("holder", sa.String(), nullable=False, server_default=""))
    op.alter_column("idempotency_keys", "job_id", new_column_name="made_id")
    op.create_index("ix_idempotency_keys_made", "idempotency_keys", ["made_id"])


def _add_metadata() -> None:
    op.create_table(
        "job_metadata",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_metadata_job_id")),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_metadata")),
    )
    pairs = {
        "sqlite": "json_each(jobs.metadata) AS pair",
        "postgresql": "jsonb_each_text(jobs.metadata) AS pair",
    }[op.get_bind().dialect.name]
    op.execute(
        sa.text(
            "INSERT INTO job_metadata (job_id, key, value, created_at) "
            f"SELECT jobs.id, pair.key, pair.value, jobs.created_at FROM jobs, {pairs} "
            f"WHERE jobs.deleted_at IS NULL AND length(pair.key) <= {_MAX_VALUE_CHARS} "
            f"AND length(pair.value) <= {_MAX_VALUE_CHARS}"
        )
    )
    op.create_index("ix_job_metadata_pair", "job_metadata", ["key", "value", "created_at", "job_id"])


def _name_receivers() -> None:
    """Say of each message that is still to be sent where it goes."""
    conn = op.get_bind()
    query = (
        "SELECT outbox.id, coalesce(outbox.url, webhook_endpoints.url) FROM outbox "
        "LEFT JOIN webhook_endpoints ON webhook_endpoints.id = outbox.endpoint_id WHERE outbox.state = 'pending'"
    )
    for id, url in conn.execute(sa.text(query)).all():
        try:
            parts = urlsplit(url)
            receiver = f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS.get(parts.scheme, 443)}"
        except ValueError:
            # such a URL was taken once; it is refused when it is sent
            receiver = url[:200]
        conn.execute(sa.text("UPDATE outbox SET receiver = :receiver WHERE id = :id"), {"receiver": receiver, "id": id})
