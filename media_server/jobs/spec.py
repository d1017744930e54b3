"""Types of the job store: what is asked, what a row says, what a worker holds and what it gives back.

Prompts are kept apart from parameters, in a table that can be erased; here they meet again as `prompts`.
Times are unix seconds by the database's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from media_server.jobs.idempotency import Hold
from media_server.jobs.states import Status

JobKind = Literal["video", "film", "storyboard", "join"]


@dataclass(frozen=True)
class JobSpec:
    """A job as it is submitted."""

    kind: JobKind
    pool: str
    params: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    priority: int = 0
    owner_key_id: str | None = None
    parent_id: str | None = None
    root_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None
    traceparent: str | None = None
    webhook_url: str | None = None
    max_attempts: int = 3
    # how long it is kept after its end; None: until deleted
    retention_s: float | None = None
    id: str | None = None
    status: Status = Status.QUEUED
    remixed_from_id: str | None = None
    # None where nothing is known
    predicted_gpu_seconds: float | None = None
    predicted_peak_memory_bytes: int | None = None
    # bound by the transaction that writes the job
    idempotency_key: Hold | None = None
    # what it counts against its key's quotas: denoise steps x pixels x frames, and the bytes of its inputs
    work: float = 0.0
    input_bytes: int = 0
    # of a job that keeps no words: how long an answer in words can be had after its end
    answer_s: float | None = None


@dataclass(frozen=True)
class Place:
    """A place in a queue: jobs that are taken before, jobs of the same owner that wait in all, and the wait.

    `wait_s` is None where nothing is known of what the jobs take.
    """

    ahead: int
    waiting: int
    wait_s: float | None


@dataclass(frozen=True)
class Job:
    """A row of the jobs table, with its prompts."""

    id: str
    kind: JobKind
    pool: str
    priority: int
    status: Status
    stage: str | None
    owner_key_id: str | None
    parent_id: str | None
    root_id: str
    traceparent: str | None
    model: str | None
    params: dict[str, Any]
    metadata: dict[str, str]
    label: str | None
    progress: float
    step: int | None
    total_steps: int | None
    eta_s: float | None
    attempt: int
    # attempts that a drain gave back: they do not count against max_attempts
    uncounted: int
    max_attempts: int
    lease_until: float | None
    lease_owner: str | None
    cancel_requested_at: float | None
    error_code: str | None
    error_message: str | None
    result: dict[str, Any] | None
    # of all attempts, as far as their workers said
    gpu_seconds: float | None
    peak_memory_bytes: int | None
    winning_attempt: int | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    retention_s: float | None
    expires_at: float | None
    deleted_at: float | None
    doorbell_at: float | None
    not_before: float | None
    webhook_url: str | None
    remixed_from_id: str | None
    predicted_gpu_seconds: float | None
    predicted_peak_memory_bytes: int | None
    answer_s: float | None
    words_until: float | None
    prompts: dict[str, str] = field(default_factory=dict, repr=False)
    # of a job that has just been admitted; no row has it
    place: Place | None = None


@dataclass(frozen=True)
class Claim:
    """One attempt at a job, held by one worker; the job is as it was when claimed."""

    job: Job
    attempt: int
    worker: str


@dataclass(frozen=True)
class Beat:
    """What a heartbeat learns: if not ours, stop and delete the files; if cancelled, stop and confirm."""

    is_ours: bool
    cancel_requested: bool


@dataclass(frozen=True)
class ArtifactRecord:
    """A file of a job; its key never changes and is never written twice."""

    name: str
    key: str
    content_type: str
    size_bytes: int
    sha256: str
    state: Literal["live", "final"] = "final"
    sequence: int = 0


@dataclass(frozen=True)
class UsageRecord:
    """An entry of the ledger, such as `completion_tokens`."""

    kind: str
    amount: float


@dataclass(frozen=True)
class Result:
    """What a finished attempt made."""

    artifacts: list[ArtifactRecord] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    gpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    usage: list[UsageRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A finished part of a job that a later attempt may continue from."""

    sequence: int
    attempt: int
    key: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Preview:
    """The latest picture of what an attempt makes: a JPEG, and what it shows (segment, step of steps)."""

    number: int
    data: dict[str, Any]
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True)
class Event:
    """A row of the events table; `seq` rises in the order in which a family's events were committed."""

    seq: int
    v: int
    job_id: str
    root_id: str
    attempt: int
    type: str
    data: dict[str, Any]
    created_at: float


@dataclass(frozen=True)
class Page:
    """A page of a list."""

    data: list[Job]
    has_more: bool


@dataclass(frozen=True)
class SweepReport:
    """What one sweep did: jobs it ended, and pools whose doorbell it rang again."""

    lost: list[str]
    cancelled: list[str]
    rung: list[str]
