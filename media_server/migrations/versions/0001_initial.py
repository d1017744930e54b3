"""The first schema, whole: jobs with their attempts, events, artifacts and prompts; outbox, keys, ledger, models.

A revision is frozen once released: it repeats the columns instead of importing today's tables.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("quotas", Json, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_keys_prefix")),
    )
    op.create_table(
        "garbage",
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("prefix", name=op.f("pk_garbage")),
    )
    op.create_index("ix_garbage_due", "garbage", ["due_at"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("request_sha256", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires", "idempotency_keys", ["expires_at"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("stage", sa.String(), nullable=True),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("queue_key", sa.String(), nullable=False),
        sa.Column("parent_id", sa.String(), nullable=True),
        sa.Column("root_id", sa.String(), nullable=False),
        sa.Column("traceparent", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("params", Json, nullable=False),
        sa.Column("metadata", Json, nullable=False),
        sa.Column("label", sa.String(), nullable=True),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("eta_s", sa.Double(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("uncounted", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("cancel_requested_at", sa.Double(), nullable=True),
        sa.Column("error_code", sa.String(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("result", Json, nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("winning_attempt", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("retention_s", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("doorbell_at", sa.Double(), nullable=True),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("remixed_from_id", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["parent_id"], ["jobs.id"], name=op.f("fk_jobs_parent_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at", "id"], unique=False)
    op.create_index("ix_jobs_doorbell", "jobs", ["status", "pool", "doorbell_at"], unique=False)
    op.create_index("ix_jobs_expires", "jobs", ["expires_at"], unique=False)
    op.create_index("ix_jobs_kind", "jobs", ["kind", "created_at", "id"], unique=False)
    op.create_index("ix_jobs_lease", "jobs", ["status", "lease_until"], unique=False)
    op.create_index("ix_jobs_lease_owner", "jobs", ["lease_owner"], unique=False)
    op.create_index("ix_jobs_owner", "jobs", ["owner_key_id", "created_at", "id"], unique=False)
    op.create_index("ix_jobs_parent", "jobs", ["parent_id", "created_at", "id"], unique=False)
    op.create_index(
        "ix_jobs_queue",
        "jobs",
        ["pool", "status", "queue_key", sa.text("priority DESC"), "created_at", "id"],
        unique=False,
    )
    op.create_index("ix_jobs_root", "jobs", ["root_id"], unique=False)
    op.create_table(
        "models",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("card", Json, nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "worker", name=op.f("pk_models")),
    )
    op.create_index("ix_models_seen", "models", ["seen_at"], unique=False)
    op.create_table(
        "turns",
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("queue_key", sa.String(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("pool", "queue_key", name=op.f("pk_turns")),
    )
    op.create_index("ix_turns_next", "turns", ["pool", "turn", "queue_key"], unique=False)
    op.create_table(
        "usage",
        sa.Column("id", Serial, autoincrement=True, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("root_id", sa.String(), nullable=True),
        sa.Column("label", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_usage_owner", "usage", ["owner_key_id", "created_at"], unique=False)
    op.create_index("ix_usage_root", "usage", ["root_id"], unique=False)
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", Json, nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        sa.Column("old_secret_until", sa.Double(), nullable=True),
        sa.Column("is_enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("failing_since", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_owner", "webhook_endpoints", ["owner_key_id"], unique=False)
    op.create_table(
        "artifacts",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("content_type", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint(
            "job_id", "attempt", "name", "sequence", name=op.f("uq_artifacts_job_id_attempt_name_sequence")
        ),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("error_code", sa.String(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id")),
        sa.PrimaryKeyConstraint("job_id", "sequence", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "events",
        sa.Column("seq", Serial, autoincrement=True, nullable=False),
        sa.Column("v", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("root_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job", "events", ["job_id", "seq"], unique=False)
    op.create_index("ix_events_root", "events", ["root_id", "seq"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("owner_key_id", sa.String(), nullable=True),
        sa.Column("endpoint_id", sa.String(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["webhook_endpoints.id"], name=op.f("fk_outbox_endpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_outbox_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("event_seq", "endpoint_id", name=op.f("uq_outbox_event_seq_endpoint_id")),
    )
    op.create_index("ix_outbox_due", "outbox", ["state", "next_at"], unique=False)
    op.create_index("ix_outbox_endpoint", "outbox", ["endpoint_id", "created_at"], unique=False)
    op.create_index("ix_outbox_job", "outbox", ["job_id"], unique=False)
    op.create_table(
        "prompts",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("field", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_prompts_job_id")),
        sa.PrimaryKeyConstraint("job_id", "field", name=op.f("pk_prompts")),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", Serial, autoincrement=True, nullable=False),
        sa.Column("outbox_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["outbox_id"], ["outbox.id"], name=op.f("fk_deliveries_outbox_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("outbox_id", "number", name=op.f("uq_deliveries_outbox_id_number")),
        sqlite_autoincrement=True,
    )
