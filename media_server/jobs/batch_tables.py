"""The tables of batches: uploaded files, batches of requests, and their lines while they run.

What a caller wrote stays in the input file, which a line's row only points into; what was answered stands in the line's
row until the batch's files are written.
"""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, String, Table, Text

from media_server.jobs.schema import Json, metadata

files = Table(
    "files",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner_key_id", String),
    # as the uploader named it; no path is made of it
    Column("filename", Text, nullable=False),
    Column("purpose", String, nullable=False),
    Column("key", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Index("ix_files_created", "created_at", "id"),
    Index("ix_files_owner", "owner_key_id", "created_at", "id"),
    Index("ix_files_expires", "expires_at"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner_key_id", String),
    Column("endpoint", String, nullable=False),
    # no foreign key: a file may be deleted once its batch has ended
    Column("input_file_id", String, nullable=False),
    Column("completion_window", String, nullable=False),
    Column("metadata", Json, nullable=False),
    # the one that every line names, if there is one
    Column("model", String),
    Column("traceparent", String),
    Column("status", String, nullable=False),
    # what it ends as, once its lines have: completed, expired, cancelled
    Column("ending", String, nullable=False),
    # why it failed as a whole: [{code, message, param, line}, …]
    Column("errors", Json),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("output_file_id", String),
    Column("error_file_id", String),
    # how long its files are kept; None: as long as the service keeps such files
    Column("output_lifetime_s", Double),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("cancelling_at", Double),
    # when it has ended, as whatever
    Column("ended_at", Double),
    Column("lease_owner", String),
    Column("lease_until", Double),
    Index("ix_batches_created", "created_at", "id"),
    Index("ix_batches_owner", "owner_key_id", "created_at", "id"),
    Index("ix_batches_status", "status", "created_at"),
    Index("ix_batches_input", "input_file_id"),
    Index("ix_batches_ended", "ended_at"),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", String, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # from 1, as editors count
    Column("number", Integer, primary_key=True),
    Column("custom_id", String),
    # where it stands in the input file, in bytes
    Column("start", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    # pending, running, ended
    Column("state", String, nullable=False),
    # the job that it has made, written by the transaction that made it
    Column("job_id", String),
    Column("tries", Integer, nullable=False),
    # a line that was refused for a while is not sent again before this
    Column("not_before", Double),
    Column("is_error", Boolean),
    # what goes into the output file or the error file
    Column("record", Text),
    Index("ix_batch_lines_state", "batch_id", "state", "number"),
)
