"""Every table of the service, for SQLite and PostgreSQL.

Times are float unix seconds by the database's clock. JSON holds parameters and results, never prompts: those stand
in `prompts`, which can be erased alone. Those of webhooks stand in `webhook_tables.py`, those of batches and of
uploaded files in `batch_tables.py`. `migrations/` makes these tables; a test holds the two together.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from media_server.jobs.batch_tables import batch_lines, batches, files
from media_server.jobs.schema import Json, Serial, metadata
from media_server.jobs.webhook_tables import deliveries, outbox, webhook_endpoints

__all__ = [
    "api_keys",
    "artifacts",
    "attempts",
    "batch_lines",
    "batches",
    "checkpoints",
    "counters",
    "deliveries",
    "events",
    "files",
    "garbage",
    "idempotency_keys",
    "job_metadata",
    "jobs",
    "list_index",
    "metadata",
    "models",
    "outbox",
    "previews",
    "prompts",
    "turns",
    "usage",
    "webhook_endpoints",
]


_IS_DELETED = text("deleted_at IS NOT NULL")
_HAS_WORDS = text("words_until IS NOT NULL")


def list_index(name: str, *columns: str) -> Index:
    """Make an index that a list reads in its order, of the jobs that are not deleted."""
    is_kept = text("deleted_at IS NULL")
    return Index(name, *columns, "created_at", "id", sqlite_where=is_kept, postgresql_where=is_kept)


jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("pool", String, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("status", String, nullable=False),
    Column("stage", String),
    Column("owner_key_id", String),
    # the owner, or "" without one: the claim takes turns between these
    Column("queue_key", String, nullable=False),
    Column("parent_id", String, ForeignKey("jobs.id")),
    Column("root_id", String, nullable=False),
    Column("traceparent", String),
    Column("model", String),
    Column("params", Json, nullable=False),
    Column("metadata", Json, nullable=False),
    Column("label", String),
    Column("progress", Double, nullable=False),
    Column("step", Integer),
    Column("total_steps", Integer),
    Column("eta_s", Double),
    Column("attempt", Integer, nullable=False),
    Column("uncounted", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("lease_until", Double),
    Column("lease_owner", String),
    Column("cancel_requested_at", Double),
    Column("error_code", String),
    Column("error_message", Text),
    Column("result", Json),
    Column("gpu_seconds", Double),
    Column("peak_memory_bytes", BigInteger),
    Column("winning_attempt", Integer),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("completed_at", Double),
    Column("retention_s", Double),
    Column("expires_at", Double),
    Column("deleted_at", Double),
    Column("doorbell_at", Double),
    # a retry that waits is not taken before this
    Column("not_before", Double),
    Column("webhook_url", Text),
    Column("remixed_from_id", String),
    # what it was predicted to take when it was admitted
    Column("predicted_gpu_seconds", Double),
    Column("predicted_peak_memory_bytes", BigInteger),
    # of a job that keeps no words: how long an answer in words can be had after its end; None: it keeps them
    Column("answer_s", Double),
    # when its words are erased; None: they are, or are kept
    Column("words_until", Double),
    # the claim: an owner's next job of a pool, in the order in which it is taken; with all that a place is made of
    Index(
        "ix_jobs_queue",
        *("pool", "status", "queue_key", text("priority DESC"), "created_at", "id", "predicted_gpu_seconds"),
    ),
    # lapsed leases, and how recently a pool's doorbell rang
    Index("ix_jobs_lease", "status", "lease_until"),
    Index("ix_jobs_doorbell", "status", "pool", "doorbell_at"),
    Index("ix_jobs_lease_owner", "lease_owner"),
    # lists, by creation: what a list asks to be equal, then its order; without the rows of deleted jobs
    list_index("ix_jobs_created"),
    list_index("ix_jobs_kind", "kind"),
    list_index("ix_jobs_status", "status"),
    list_index("ix_jobs_kind_status", "kind", "status"),
    list_index("ix_jobs_model", "model"),
    list_index("ix_jobs_owner", "owner_key_id"),
    list_index("ix_jobs_owner_kind", "owner_key_id", "kind"),
    list_index("ix_jobs_owner_status", "owner_key_id", "status"),
    Index("ix_jobs_parent", "parent_id", "created_at", "id"),
    Index("ix_jobs_root", "root_id"),
    Index("ix_jobs_expires", "expires_at"),
    # rows of deleted jobs, to be removed for good; partial, or SQLite would read lists of all others from it
    Index("ix_jobs_deleted", "deleted_at", sqlite_where=_IS_DELETED, postgresql_where=_IS_DELETED),
    # words to be erased
    Index("ix_jobs_words", "words_until", sqlite_where=_HAS_WORDS, postgresql_where=_HAS_WORDS),
    # how much of an owner's waits
    Index("ix_jobs_owner_queue", "queue_key", "status", "pool"),
)

# a job's metadata once more, for lists that ask for it
job_metadata = Table(
    "job_metadata",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("key", String, primary_key=True),
    Column("value", Text, nullable=False),
    # the job's own, so that the index has a list's order
    Column("created_at", Double, nullable=False),
    Index("ix_job_metadata_pair", "key", "value", "created_at", "job_id"),
)

# whose turn it is in a pool: owners are served in the order of the number of their last claim
turns = Table(
    "turns",
    metadata,
    Column("pool", String, primary_key=True),
    Column("queue_key", String, primary_key=True),
    Column("turn", BigInteger, nullable=False),
    Index("ix_turns_next", "pool", "turn", "queue_key"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("worker", String, nullable=False),
    # running, completed, failed, cancelled, released, lost
    Column("outcome", String, nullable=False),
    Column("error_code", String),
    Column("error_message", Text),
    Column("gpu_seconds", Double),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("data", Json, nullable=False),
    Column("created_at", Double, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("v", Integer, nullable=False),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("root_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("type", String, nullable=False),
    Column("data", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_events_job", "job_id", "seq"),
    Index("ix_events_root", "root_id", "seq"),
    sqlite_autoincrement=True,
)

# the latest picture of each clip that is being made; it goes with its attempt
previews = Table(
    "previews",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("attempt", Integer, nullable=False),
    # of the attempt, from 1
    Column("number", Integer, nullable=False),
    Column("data", Json, nullable=False),
    Column("jpeg", LargeBinary, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("id", String, primary_key=True),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("name", String, nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("key", Text, nullable=False),
    Column("content_type", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("job_id", "attempt", "name", "sequence"),
)

# key prefixes whose files have no owner any more; the sweeper removes them, then the row
garbage = Table(
    "garbage",
    metadata,
    Column("prefix", String, primary_key=True),
    Column("due_at", Double, nullable=False),
    Index("ix_garbage_due", "due_at"),
)

prompts = Table(
    "prompts",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("field", String, primary_key=True),
    Column("text", Text, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String, primary_key=True),
    Column("key", String, primary_key=True),
    # method, path and body, hashed: another request under the same key is refused
    Column("request_sha256", String, nullable=False),
    # who is accepting the first request; lets the key go when it has not been renewed for a while
    Column("holder", String, nullable=False),
    # the job, or the webhook endpoint, that the first request made
    Column("made_id", String),
    # None while the first request is being accepted
    Column("status_code", Integer),
    Column("response", Text),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("ix_idempotency_keys_made", "made_id"),
    Index("ix_idempotency_keys_expires", "expires_at"),
)

usage = Table(
    "usage",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("created_at", Double, nullable=False),
    Column("owner_key_id", String),
    # no foreign keys: the ledger outlives the jobs
    Column("job_id", String),
    Column("root_id", String),
    # which shot of its film the job makes
    Column("shot", Integer),
    Column("label", String),
    Column("model", String),
    Column("kind", String, nullable=False),
    Column("amount", Double, nullable=False),
    Index("ix_usage_owner", "owner_key_id", "created_at"),
    Index("ix_usage_root", "root_id"),
    Index("ix_usage_job", "job_id"),
    sqlite_autoincrement=True,
)

# sums of the ledger that limits are held against, for each key and each of its labels
tallies = Table(
    "tallies",
    metadata,
    Column("owner_key_id", String, primary_key=True),
    # a project label; "" for all of the key's
    Column("label", String, primary_key=True),
    Column("kind", String, primary_key=True),
    # a day (2026-11-30), a month (2026-11), or total
    Column("period", String, primary_key=True),
    Column("amount", Double, nullable=False),
    Index("ix_tallies_period", "period"),
)

# what /metrics shows of all processes together; `figures.py` has the names
counters = Table(
    "counters",
    metadata,
    Column("name", String, primary_key=True),
    # a JSON list of the labels' values
    Column("labels", String, primary_key=True),
    # "" of a counter; of a histogram the upper bound of a bucket, or "sum"
    Column("part", String, primary_key=True),
    Column("value", Double, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    # the first characters, for the lookup; the whole key only as an HMAC
    Column("prefix", String, nullable=False, unique=True),
    Column("hash", String, nullable=False),
    Column("scopes", Json, nullable=False),
    Column("quotas", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_used_at", Double),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

models = Table(
    "models",
    metadata,
    Column("name", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("pool", String, nullable=False),
    Column("hash", String, nullable=False),
    Column("card", Json, nullable=False),
    Column("published_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    # what its worker said of itself when it was seen: bytes of device memory
    Column("figures", Json),
    Index("ix_models_seen", "seen_at"),
)
