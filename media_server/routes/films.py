"""/v1/films: an idea becomes a storyboard, its shots become clips, the clips become one file."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from media_server import http_objects as objects
from media_server.admission import Limits
from media_server.auth import Caller, Owner
from media_server.errors import NotFound
from media_server.films import submit_film
from media_server.http_acceptance import Taking, accepting, answer_again, answer_created
from media_server.http_body import read_body
from media_server.http_content import CONTENT_RESPONSES, cancel, remove, send_artifact
from media_server.http_context import request_context
from media_server.http_fetch import check_url
from media_server.http_lists import METADATA_PARAMETER, Listing
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, FilmBody, parse_body
from media_server.http_views import film_object, list_page, poll_after_ms
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.idempotency import KeptAnswer
from media_server.jobs.spec import Job
from media_server.jobs.states import Status
from media_server.models.registry import get_card
from media_server.settings import Settings

router = APIRouter(prefix="/v1/films", tags=["films"])

FilmId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a film.")]
_MAX_PART_BYTES = 1 << 20
_MAX_CHILDREN = 1000


@router.post(
    "",
    response_model=objects.Film,
    summary="Create a film",
    responses=errors(404, 409, 422, 429),
    openapi_extra=body_of(FilmBody),
)
async def create_film(request: Request, owner: Owner, asked: Taking) -> Response:
    """Queue a film. `/v1/jobs/{id}/events` tells how it goes: its storyboard as it is written, its shots, joining."""
    db: Database = request.app.state.db
    settings: Settings = request.app.state.settings
    async with (
        read_body(request, max_part_bytes=_MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await answer_again(request, owner, key, _describe, asked)
        body = parse_body(FilmBody, values)
        if body.webhook_url is not None:
            check_url(body.webhook_url, param="webhook_url", allow_private=settings.allow_private_urls)

        def submit() -> Job:
            # an engine by URL knows its models itself
            if body.text_model is not None and settings.engine_url is None:
                _check_text_model(db, body.text_model)
            return submit_film(
                db,
                body,
                get_card(db, body.model, "video"),
                limits=Limits.of(settings),
                shot_retries=settings.shot_retries,
                max_attempts=settings.max_attempts,
                owner_key_id=owner.owner_key_id,
                traceparent=request_context(request).traceparent,
                retention_s=settings.retention_s,
                answer_s=owner.answer_s(settings),
                idempotency_key=key,
            )

        film = await run_in_threadpool(submit)
    return await answer_created(request, film, _describe, asked, key)


@router.get(
    "",
    response_model=objects.ListPage[objects.Film],
    summary="List films",
    openapi_extra=METADATA_PARAMETER,
)
async def list_films(request: Request, owner: Owner, asked: Listing) -> dict[str, object]:
    """List the caller's films, newest first, without their children."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        page = store.list_jobs(db, **asked.of("film"), owner_key_id=owner.list_owner)
        return list_page([film_object(db, job, []) for job in page.data], page.has_more)

    return await run_in_threadpool(read)


@router.get("/{film_id}", response_model=objects.Film, summary="Retrieve a film", responses=errors(404))
async def retrieve_film(request: Request, response: Response, owner: Owner, film_id: FilmId) -> objects.Film:
    """Say where a film stands, and where each of its jobs does."""
    db: Database = request.app.state.db
    return await _answer(db, await run_in_threadpool(_owned_film, db, film_id, owner), response)


@router.post("/{film_id}/cancel", response_model=objects.Film, summary="Cancel a film", responses=errors(404))
async def cancel_film(request: Request, response: Response, owner: Owner, film_id: FilmId) -> objects.Film:
    """Cancel a film and its jobs; it says `cancelled` once all that ran has stopped."""
    db: Database = request.app.state.db

    def stop() -> Job:
        _owned_film(db, film_id, owner)
        return cancel(request, film_id)

    return await _answer(db, await run_in_threadpool(stop), response)


@router.delete("/{film_id}", response_model=objects.Deleted, summary="Delete a film", responses=errors(404))
async def delete_film(request: Request, owner: Owner, film_id: FilmId) -> objects.Deleted:
    """Cancel the film if it has not ended, then remove it with its jobs, prompts and files."""
    db: Database = request.app.state.db

    def delete() -> None:
        _owned_film(db, film_id, owner)
        remove(request, film_id)

    await run_in_threadpool(delete)
    return objects.Deleted(id=film_id, object="film.deleted", deleted=True)


@router.head("/{film_id}/content", include_in_schema=False)
@router.get(
    "/{film_id}/content",
    summary="Download a film's file",
    response_class=Response,
    responses={**CONTENT_RESPONSES, **errors(404, 409, 412, 416)},
)
async def film_content(
    request: Request,
    owner: Owner,
    film_id: FilmId,
    variant: Annotated[
        Literal["video", "storyboard", "timeline", "contact_sheet", "thumbnail"],
        Query(description="The storyboard is there as soon as it is written, the rest once the film has completed."),
    ] = "video",
    download: Annotated[bool, Query(description="Ask browsers to save the file.")] = False,
) -> Response:
    """Send a file of a film, whole or in part (Range, If-Range, ETag)."""
    db: Database = request.app.state.db
    job = await run_in_threadpool(_owned_film, db, film_id, owner)
    if variant == "storyboard" and (job.status is not Status.COMPLETED or job.answer_s is not None):
        # a film that fails later keeps what was made; one that keeps no words is joined without it
        job = await run_in_threadpool(_storyboard_of, db, job)
    return await send_artifact(request, job, variant, is_download=download)


def _owned_film(db: Database, film_id: str, owner: Caller) -> Job:
    return owner.check(store.get(db, film_id), kind="film")


def _check_text_model(db: Database, name: str) -> None:
    try:
        get_card(db, name, "text")
    except NotFound as error:
        raise NotFound(
            error.message, code=error.code, param="text_model", rule=error.rule, value=error.value
        ) from error


def _children(db: Database, film: Job) -> list[Job]:
    return store.list_jobs(db, parent_id=film.id, order="asc", limit=_MAX_CHILDREN).data


def _storyboard_of(db: Database, film: Job) -> Job:
    return next((child for child in _children(db, film) if child.kind == "storyboard"), film)


async def _answer(db: Database, film: Job, response: Response) -> objects.Film:
    response.headers["openai-poll-after-ms"] = poll_after_ms(film.status, film.eta_s)
    return await run_in_threadpool(_describe, db, film)


def _describe(db: Database, film: Job) -> objects.Film:
    return film_object(db, film, _children(db, film))
