"""/v1/jobs: every job by its id, whatever it makes; cancelling; and its events as they happen."""

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from media_server import http_objects as objects
from media_server.auth import Caller, Owner, is_still_allowed
from media_server.errors import InvalidRequest
from media_server.http_content import cancel
from media_server.http_events import is_last, job_events, read_events
from media_server.http_lists import METADATA_PARAMETER, Listing
from media_server.http_openapi import errors, event_stream
from media_server.http_requests import ID_PATTERN
from media_server.http_views import job_object, list_page, page_places
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.spec import Job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a job of any kind.")]
Kind = Literal["video", "film", "storyboard", "join"]


@router.get("", response_model=objects.ListPage[objects.Job], summary="List jobs", openapi_extra=METADATA_PARAMETER)
async def list_jobs(
    request: Request,
    owner: Owner,
    asked: Listing,
    kind: Annotated[list[Kind] | None, Query(description="Only these kinds.")] = None,
    parent_id: Annotated[str | None, Query(pattern=ID_PATTERN, description="Only the children of this job.")] = None,
) -> dict[str, object]:
    """List the caller's jobs of every kind, newest first."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        page = store.list_jobs(db, **asked.of(*(kind or ()), parent_id=parent_id), owner_key_id=owner.list_owner)
        places = page_places(db, page.data)
        return list_page([job_object(db, job, places) for job in page.data], page.has_more)

    return await run_in_threadpool(read)


@router.get("/{job_id}", response_model=objects.Job, summary="Retrieve a job", responses=errors(404))
async def retrieve_job(request: Request, owner: Owner, job_id: JobId) -> objects.Job:
    """Say where a job stands."""
    db: Database = request.app.state.db
    return await run_in_threadpool(lambda: job_object(db, owned(db, job_id, owner)))


@router.post("/{job_id}/cancel", response_model=objects.Job, summary="Cancel a job", responses=errors(404))
async def cancel_job(request: Request, owner: Owner, job_id: JobId) -> objects.Job:
    """Cancel a job: a queued one at once, a running one as soon as its worker confirms that it has stopped.

    A film takes its children with it. A job that has ended stays as it is.
    """
    db: Database = request.app.state.db

    def stop() -> objects.Job:
        owned(db, job_id, owner)
        return job_object(db, cancel(request, job_id))

    return await run_in_threadpool(stop)


@router.get(
    "/{job_id}/events",
    summary="Follow a job",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events; each `data` is a JobEvent, each `id` its seq. A film's stream has the "
            "events of its children too. Ends after the job's last event.",
            "content": event_stream(objects.JobEvent),
        },
        204: {"description": "The job has ended, and everything up to its end has been received."},
        **errors(404),
    },
)
async def follow_job(
    request: Request,
    owner: Owner,
    job_id: JobId,
    last_event_id: Annotated[str | None, Header(description="The last id received; events after it follow.")] = None,
) -> Response:
    """Follow a job from its beginning, or from the event after `Last-Event-ID`."""
    db: Database = request.app.state.db
    after = _seq(last_event_id)
    job = await run_in_threadpool(owned, db, job_id, owner)
    if job.status.is_terminal and after and await run_in_threadpool(_has_all, db, job, after):
        # EventSource comes back after each end, unless it is told with 204 that there is no more
        return Response(status_code=204)
    is_allowed = partial(is_still_allowed, request, owner)
    stream = job_events(db, request.app.state.event_feed, job, after=after, is_allowed=is_allowed)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def owned(db: Database, job_id: str, owner: Caller) -> Job:
    """Read a job of the caller's. Raises NotFound if there is none."""
    return owner.check(store.get(db, job_id))


def _has_all(db: Database, job: Job, after: int) -> bool:
    """Whether a listener that has `after` has the job's last event; what follows that one belongs to no stream."""
    while events := read_events(db, job, after):
        if any(is_last(event, job) for event in events):
            return False
        after = events[-1].seq
    return True


def _seq(last_event_id: str | None) -> int:
    if last_event_id is None or last_event_id == "":
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18):
        raise InvalidRequest(
            f"Last-Event-ID must be the id of an event, got {last_event_id[:40]!r}.",
            param="Last-Event-ID",
            rule="the id of an event",
            value=last_event_id[:40],
        )
    return int(last_event_id)
