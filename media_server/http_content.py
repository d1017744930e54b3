"""Serve a job's file: whole or in part, with validators, to GET and HEAD."""

import logging
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from media_server.artifacts.reserve import with_reserve
from media_server.artifacts.store import ArtifactStore
from media_server.errors import Conflict, MediaServerError, NotFound
from media_server.http_errors import PreconditionFailed, RangeNotSatisfiable, problem_response
from media_server.http_range import select, strong_etag
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.spec import ArtifactRecord, Job
from media_server.jobs.states import Status

logger = logging.getLogger(__name__)

# long enough for a player that asks for a clip part by part
SIGNED_FOR_S = 300.0

# how OpenAPI describes a file's answers
CONTENT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {
            "video/mp4": {"schema": {"type": "string", "contentMediaType": "video/mp4"}},
            "image/jpeg": {"schema": {"type": "string", "contentMediaType": "image/jpeg"}},
            "image/png": {"schema": {"type": "string", "contentMediaType": "image/png"}},
            "text/vtt": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "object"}},
            "application/zip": {"schema": {"type": "string", "contentMediaType": "application/zip"}},
        },
    },
    206: {"description": "The part that Range names.", "content": {"video/mp4": {"schema": {"type": "string"}}}},
    302: {"description": "With `redirect_downloads`, where the object store has the file, for a few minutes."},
    304: {"description": "If-None-Match names the current version."},
}


async def send_artifact(request: Request, job: Job, name: str, *, is_download: bool) -> Response:
    """Answer a GET or HEAD for a file of a job, whole or in part; its name is made of the job's id and the file's.

    Raises Conflict while the job is under way, NotFound if it has no such file.
    """
    db: Database = request.app.state.db
    artifacts: ArtifactStore = request.app.state.artifacts
    record = await run_in_threadpool(find_artifact, db, job, name)
    chosen = select(
        request.headers,
        size_bytes=record.size_bytes,
        etag=strong_etag(record.sha256),
        modified_at=job.completed_at or job.created_at,
    )
    # the bytes under a key never change; whether they still exist is asked each time
    headers = {**chosen.headers, "cache-control": "private, no-cache"}
    if chosen.status == 304:
        return Response(status_code=304, headers=headers)
    if chosen.status == 412:
        raise PreconditionFailed(
            "If-Match names another version of this file.", param="if-match", rule=strong_etag(record.sha256)
        )
    if chosen.status == 416:
        return problem_response(_past_the_end(record, request), headers)
    disposition = "attachment" if is_download else "inline"
    headers["content-disposition"] = f'{disposition}; filename="{job.id}-{record.key.rpartition("/")[2]}"'
    headers["content-length"] = str(len(chosen.range))
    if request.method == "HEAD":
        return Response(status_code=chosen.status, headers=headers, media_type=record.content_type)
    if request.app.state.settings.redirect_downloads:
        signed = await run_in_threadpool(artifacts.presigned_url, record.key, SIGNED_FOR_S)
        if signed is not None:
            # Range goes with it: the store answers in parts itself
            return RedirectResponse(signed, status_code=302, headers={"cache-control": "no-store"})
    body = await run_in_threadpool(artifacts.read, record.key, chosen.range.start, chosen.range.end)
    return StreamingResponse(body, status_code=chosen.status, headers=headers, media_type=record.content_type)


def cancel(request: Request, job_id: str) -> Job:
    """Cancel a job, also while the disk is full; blocking."""
    state = request.app.state
    return with_reserve(state.settings, partial(store.request_cancel, state.db, job_id))


def remove(request: Request, job_id: str) -> None:
    """Delete a job and the files that nobody writes to any more, also while the disk is full; blocking.

    Once its row is deleted the job is: files that the store does not let go of now are left to the sweeper.
    """
    state = request.app.state
    for prefix in with_reserve(state.settings, partial(store.delete, state.db, job_id)):
        try:
            state.artifacts.delete_prefix(prefix)
        except Exception as error:
            # each store has its own errors
            logger.warning("job %s: %s stays for the sweeper (%s)", job_id, prefix, type(error).__name__)


def find_artifact(db: Database, job: Job, name: str) -> ArtifactRecord:
    """Find the latest file of that name of a job.

    Raises Conflict while the job is under way, NotFound if it has no such file.
    """
    records = store.artifacts_of(db, job.id)
    for record in reversed(records):
        if record.name == name:
            return record
    raise _missing(job, name, sorted({record.name for record in records}))


def _missing(job: Job, variant: str, existing: list[str]) -> MediaServerError:
    """Say why a job has no such file: it is not made yet, the job did not end well, or it makes none of that name."""
    if job.expires_at is not None and job.status is Status.COMPLETED and not existing:
        return NotFound(f"The files of {job.id} have expired.", code="expired", param="variant", value=variant)
    if not job.status.is_terminal:
        return Conflict(
            f"The {variant} of {job.id} is not made yet: the job is {job.status}, {int(job.progress)} %.",
            code="not_ready",
            param="variant",
            rule="the job has completed",
            value=job.status.value,
        )
    if job.status is not Status.COMPLETED and not existing:
        reason = f": {job.error_code}: {job.error_message}" if job.error_code else ""
        return NotFound(
            f"{job.id} has no {variant}: it {_ENDS[job.status]}{reason}.",
            code=f"job_{job.status}",
            param="variant",
            rule="the job has completed",
            value=job.status.value,
        )
    return NotFound(
        f"{job.id} has no {variant}; it has {', '.join(existing) or 'no files'}.",
        code="no_such_variant",
        param="variant",
        rule=f"one of {', '.join(existing)}",
        value=variant,
    )


_ENDS = {Status.FAILED: "failed", Status.CANCELLED: "was cancelled"}


def _past_the_end(record: ArtifactRecord, request: Request) -> RangeNotSatisfiable:
    return RangeNotSatisfiable(
        f"The file has {record.size_bytes} bytes; the range lies past its end.",
        param="range",
        rule=f"starts below {record.size_bytes}",
        value=request.headers["range"][:100],
    )
