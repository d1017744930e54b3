"""The tables of webhooks: endpoints, the messages to them and to requests' own URLs, and each try at a message."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from media_server.jobs.schema import Json, Serial, metadata

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner_key_id", String),
    Column("name", String, nullable=False),
    Column("url", Text, nullable=False),
    Column("event_types", Json, nullable=False),
    Column("secret", Text, nullable=False),
    # secrets before rotations that are still to sign, newest first: [[secret, until when], …]
    Column("old_secrets", Json, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
    Column("disabled_reason", Text),
    Column("failing_since", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Index("ix_webhook_endpoints_owner", "owner_key_id", "created_at", "id"),
)

# one message to one receiver, about a job or a batch; written by the transaction that ended it
outbox = Table(
    "outbox",
    metadata,
    # evt_…, the webhook-id that receivers remember
    Column("id", String, primary_key=True),
    Column("event_seq", BigInteger),
    Column("job_id", String, ForeignKey("jobs.id")),
    # no foreign key: the log outlives the batch
    Column("batch_id", String),
    Column("owner_key_id", String),
    # a managed endpoint, or the URL that the request named
    Column("endpoint_id", String, ForeignKey("webhook_endpoints.id", ondelete="CASCADE")),
    Column("url", Text),
    # who gets it: an endpoint, or an owner's host (`outbox.receiver_of`); a slow one holds up its own messages only
    Column("receiver", String, nullable=False),
    Column("type", String, nullable=False),
    # the exact bytes that are signed and sent, each time the same
    Column("payload", Text, nullable=False),
    # pending, delivered, dead
    Column("state", String, nullable=False),
    Column("attempts", Integer, nullable=False),
    # attempts before the last replay: they do not count against the schedule
    Column("uncounted", Integer, nullable=False),
    Column("next_at", Double),
    Column("lease_until", Double),
    Column("lease_owner", String),
    Column("created_at", Double, nullable=False),
    Column("settled_at", Double),
    UniqueConstraint("event_seq", "endpoint_id"),
    UniqueConstraint("batch_id", "endpoint_id"),
    Index("ix_outbox_due", "state", "next_at"),
    Index("ix_outbox_job", "job_id"),
    # the log, newest first, whole or of an endpoint; and what is old enough to be forgotten
    Index("ix_outbox_endpoint", "endpoint_id", "created_at", "id"),
    Index("ix_outbox_owner", "owner_key_id", "created_at", "id"),
    Index("ix_outbox_settled", "settled_at"),
)

# the log: each try at an outbox row
deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("outbox_id", String, ForeignKey("outbox.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("status_code", Integer),
    Column("error", Text),
    UniqueConstraint("outbox_id", "number"),
    sqlite_autoincrement=True,
)
