"""/v1/storyboards: an idea becomes a list of shots, as a job or as a stream of its text."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.sse import format_sse_event
from pydantic import ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from media_server import http_objects as objects
from media_server.admission import Limits, admit_text
from media_server.auth import Caller, Owner, is_still_allowed
from media_server.errors import InvalidRequest, NotFound
from media_server.films import MAX_FILM_SECONDS, MAX_IDEA_CHARS, MAX_SHOTS
from media_server.http_acceptance import Taking, accepting, answer_again, answer_created, kept_job
from media_server.http_body import read_json
from media_server.http_content import CONTENT_RESPONSES, cancel, remove, send_artifact
from media_server.http_context import request_context
from media_server.http_events import KEY_EVERY_S, EventFeed, is_last, read_events
from media_server.http_fetch import check_url
from media_server.http_lists import METADATA_PARAMETER, Listing
from media_server.http_openapi import errors
from media_server.http_requests import Label, Metadata, Priority, Seed, WebhookUrl, parse_body
from media_server.http_views import Places, list_page, page_places, poll_after_ms, progress_fields
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.idempotency import KeptAnswer
from media_server.jobs.spec import Job, JobSpec
from media_server.jobs.states import Status
from media_server.models.card import VideoCard
from media_server.models.clip import MAX_SEED, check_characters, check_metadata
from media_server.models.registry import get_card
from media_server.settings import Settings
from media_server.text.openapi import json_body
from media_server.text.sse import HEADERS, MEDIA_TYPE
from media_server.validation import RequestModel

router = APIRouter(prefix="/v1/storyboards", tags=["storyboards"])

TEXT_POOL = "text"
_LOCATION = "/v1/storyboards/"
_FALLBACK_S = 2.0
_HEARTBEAT_S = 15.0

StoryboardId = Annotated[str, Path(max_length=80, description="The id of a storyboard.")]


class StoryboardRequest(RequestModel):
    """An idea to be written out. What is left out, the service decides."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"idea": "a red ball looks for its blue friend", "seconds": 8, "shots": 3}]},
    )

    idea: Annotated[str, Field(max_length=MAX_IDEA_CHARS)]
    seconds: Annotated[float, Field(gt=0, le=MAX_FILM_SECONDS)] = 8.0
    shots: Annotated[int, Field(ge=1, le=MAX_SHOTS)] | None = Field(None, description="How many; else by the length.")
    style: Annotated[str, Field(max_length=MAX_IDEA_CHARS)] | None = None
    seed: Seed = None
    video_model: str | None = Field(None, max_length=200, description="Whose caption style the prompts are in.")
    fps: Annotated[int, Field(ge=1)] | None = Field(None, description="The video model's own if left out.")
    model: str | None = Field(None, max_length=200, description="Language model; the first if left out.")
    stream: bool = Field(False, description="Answer with the text as it is written.")
    webhook_url: WebhookUrl = None
    metadata: Metadata
    priority: Priority = 0
    label: Label = None


class Storyboard(objects.Progress):
    """A storyboard: its idea, and its text once it is written."""

    id: str
    object: Literal["storyboard"]
    model: str | None
    video_model: str
    idea: str | None = Field(description="Null once prompts have been erased.")
    seconds: float
    num_frames: int = Field(description="Seconds times fps; the shots' sum to it exactly.")
    shots: int | None = Field(description="How many were asked for.")
    style: str | None
    fps: int
    seed: int
    parent_id: str | None = Field(description="The film that it was written for.")
    storyboard: dict[str, Any] | None = Field(description="Title, characters, palette, shots; once it is written.")
    content_url: str | None


@router.post(
    "",
    status_code=202,
    response_model=Storyboard,
    summary="Create a storyboard",
    responses={
        200: {
            "model": Storyboard,
            "description": "With `Prefer: wait`: the storyboard, which has ended. With `stream`: events "
            "storyboard.created, storyboard.delta, storyboard.completed.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **errors(404, 409, 422, 429),
    },
    openapi_extra=json_body(StoryboardRequest),
)
async def create_storyboard(request: Request, owner: Owner, asked: Taking) -> Response:
    """Queue a storyboard; with `stream`, answer with its text as it is written and the storyboard at the end.

    A stream's ids are those of /v1/jobs/{id}/events, where it can be taken up again; a client that leaves leaves a
    job that goes on.
    """
    db: Database = request.app.state.db
    settings: Settings = request.app.state.settings
    values = await read_json(request)
    async with accepting(request, owner, asked, values, status=202) as key:
        body = parse_body(StoryboardRequest, values)
        if isinstance(key, KeptAnswer):
            if body.stream:
                return _stream_of(request, owner, await run_in_threadpool(kept_job, db, owner, key))
            return await answer_again(request, owner, key, storyboard_object, asked, location=_LOCATION)
        if body.webhook_url is not None:
            check_url(body.webhook_url, param="webhook_url", allow_private=settings.allow_private_urls)

        def submit() -> Job:
            if body.model is not None and settings.engine_url is None:
                get_card(db, body.model, "text")
            spec = _spec(body, get_card(db, body.video_model, "video"), request, owner, settings)
            with db.write("accept") as tx:
                tx.lock(f"admission:{spec.pool}")
                admit_text(tx, Limits.of(settings), spec.pool, owner_key_id=spec.owner_key_id, priority=spec.priority)
                return store.submit_in(tx, replace(spec, idempotency_key=key))

        job = await run_in_threadpool(submit)
    if body.stream:
        return _stream_of(request, owner, job)
    return await answer_created(request, job, storyboard_object, asked, key, status=202, location=_LOCATION)


@router.get(
    "", response_model=objects.ListPage[Storyboard], summary="List storyboards", openapi_extra=METADATA_PARAMETER
)
async def list_storyboards(request: Request, owner: Owner, asked: Listing) -> dict[str, object]:
    """List the caller's storyboards, those of films among them."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        page = store.list_jobs(db, **asked.of("storyboard"), owner_key_id=owner.list_owner)
        places = page_places(db, page.data)
        return list_page([storyboard_object(db, job, places) for job in page.data], page.has_more)

    return await run_in_threadpool(read)


@router.get("/{storyboard_id}", response_model=Storyboard, summary="Retrieve a storyboard", responses=errors(404))
async def retrieve_storyboard(
    request: Request, response: Response, owner: Owner, storyboard_id: StoryboardId
) -> Storyboard:
    """Say where a storyboard stands, and what it says once it is written."""
    db: Database = request.app.state.db

    def read() -> Storyboard:
        job = _owned(db, storyboard_id, owner)
        response.headers["openai-poll-after-ms"] = poll_after_ms(job.status, job.eta_s)
        return storyboard_object(db, job)

    return await run_in_threadpool(read)


@router.post("/{storyboard_id}/cancel", response_model=Storyboard, summary="Cancel a storyboard", responses=errors(404))
async def cancel_storyboard(request: Request, owner: Owner, storyboard_id: StoryboardId) -> Storyboard:
    """Cancel a storyboard: at once if it waits, within a moment if it is being written."""
    db: Database = request.app.state.db

    def stop() -> Storyboard:
        _owned(db, storyboard_id, owner)
        return storyboard_object(db, cancel(request, storyboard_id))

    return await run_in_threadpool(stop)


@router.delete(
    "/{storyboard_id}", response_model=objects.Deleted, summary="Delete a storyboard", responses=errors(404, 409)
)
async def delete_storyboard(request: Request, owner: Owner, storyboard_id: StoryboardId) -> objects.Deleted:
    """Cancel the storyboard if it has not ended, then remove it with its idea and its file."""
    db: Database = request.app.state.db

    def delete() -> None:
        _owned(db, storyboard_id, owner)
        remove(request, storyboard_id)

    await run_in_threadpool(delete)
    return objects.Deleted(id=storyboard_id, object="storyboard.deleted", deleted=True)


@router.head("/{storyboard_id}/content", include_in_schema=False)
@router.get(
    "/{storyboard_id}/content",
    summary="Download a storyboard",
    response_class=Response,
    responses={**CONTENT_RESPONSES, **errors(404, 409, 412, 416)},
)
async def storyboard_content(
    request: Request,
    owner: Owner,
    storyboard_id: StoryboardId,
    download: Annotated[bool, Query(description="Ask browsers to save the file.")] = False,
) -> Response:
    """Send storyboard.json."""
    job = await run_in_threadpool(_owned, request.app.state.db, storyboard_id, owner)
    return await send_artifact(request, job, "storyboard", is_download=download)


def storyboard_object(db: Database, job: Job, places: Places | None = None) -> Storyboard:
    """Describe a storyboard."""
    params = job.params
    return Storyboard(
        id=job.id,
        object="storyboard",
        model=job.model,
        video_model=params["video_model"],
        idea=job.prompts.get("idea"),
        seconds=params["seconds"],
        num_frames=params["num_frames"],
        shots=params["shots"],
        style=job.prompts.get("style"),
        fps=params["fps"],
        seed=params["seed"],
        parent_id=job.parent_id,
        storyboard=(job.result or {}).get("storyboard"),
        content_url=f"/v1/storyboards/{job.id}/content" if job.status is Status.COMPLETED else None,
        **progress_fields(db, job, places),
    )


def _spec(body: StoryboardRequest, card: VideoCard, request: Request, owner: Caller, settings: Settings) -> JobSpec:
    if not body.idea.strip():
        raise InvalidRequest("idea: must not be empty.", param="idea", rule="must not be empty", value=body.idea)
    check_characters("idea", body.idea)
    check_characters("style", body.style or "")
    check_metadata(body.metadata)
    fps = card.fps if body.fps is None else body.fps
    if not card.fps_range[0] <= fps <= card.fps_range[1]:
        rule = f"from {card.fps_range[0]} to {card.fps_range[1]} for {card.name}"
        raise InvalidRequest(f"fps: {rule}, got {fps}.", param="fps", rule=rule, value=fps)
    num_frames = round(body.seconds * fps)
    if num_frames < (body.shots or 1):
        rule = f"at least one frame a shot at {fps} fps"
        raise InvalidRequest(f"seconds: {rule}, got {body.seconds:g}.", param="seconds", rule=rule, value=body.seconds)
    if num_frames > (body.shots or MAX_SHOTS) * card.limits.max_frames(fps):
        rule = f"at most {card.limits.max_seconds:g} s a shot"
        raise InvalidRequest(f"seconds: {rule}, got {body.seconds:g}.", param="seconds", rule=rule, value=body.seconds)
    return JobSpec(
        kind="storyboard",
        pool=TEXT_POOL,
        model=body.model,
        params={
            "seconds": num_frames / fps,
            "num_frames": num_frames,
            "shots": body.shots,
            "fps": fps,
            "seed": secrets.randbelow(MAX_SEED) if body.seed is None else body.seed,
            "video_model": card.name,
        },
        prompts={"idea": body.idea} | ({"style": body.style} if body.style else {}),
        priority=body.priority,
        owner_key_id=owner.owner_key_id,
        metadata=body.metadata,
        label=body.label,
        traceparent=request_context(request).traceparent,
        webhook_url=body.webhook_url,
        max_attempts=settings.max_attempts,
        retention_s=settings.retention_s,
        answer_s=owner.answer_s(settings),
    )


def _owned(db: Database, storyboard_id: str, owner: Caller) -> Job:
    return owner.check(store.get(db, storyboard_id), kind="storyboard")


async def _stream(db: Database, feed: EventFeed, job: Job, is_allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the text of a storyboard as it is written, and the storyboard itself when its job has ended.

    The stream ends early as `job_events` does.
    """
    created = await run_in_threadpool(storyboard_object, db, job)
    yield _frame("storyboard.created", created.model_dump(mode="json"))
    after, attempt = 0, 0
    loop = asyncio.get_running_loop()
    sent_at = allowed_at = loop.time()
    async with feed.listen(job.root_id) as news:
        while True:
            news.clear()
            if loop.time() - allowed_at >= KEY_EVERY_S:
                if not await run_in_threadpool(is_allowed):
                    return
                allowed_at = loop.time()
            for event in await run_in_threadpool(read_events, db, job, after):
                after = event.seq
                if is_last(event, job):
                    ended = await run_in_threadpool(lambda: storyboard_object(db, store.get(db, job.id)))
                    yield _frame(event.type, ended.model_dump(mode="json"), id=str(event.seq))
                    yield format_sse_event(data_str="[DONE]")
                    return
                text = event.data.get("text")
                if event.attempt != attempt and text:
                    # what an attempt before has written does not count
                    if attempt:
                        yield _frame("storyboard.restarted", {"attempt": event.attempt})
                    attempt = event.attempt
                if text:
                    sent_at = loop.time()
                    yield _frame("storyboard.delta", {"id": job.id, "delta": text}, id=str(event.seq))
            if feed.is_stopping:
                return
            try:
                await asyncio.wait_for(news.wait(), _FALLBACK_S)
            except TimeoutError:
                if await run_in_threadpool(_is_gone, db, job):
                    return
                if loop.time() - sent_at >= _HEARTBEAT_S:
                    sent_at = loop.time()
                    yield format_sse_event(comment="heartbeat")


def _stream_of(request: Request, owner: Caller, job: Job) -> StreamingResponse:
    is_allowed = partial(is_still_allowed, request, owner)
    stream = _stream(request.app.state.db, request.app.state.event_feed, job, is_allowed)
    return StreamingResponse(stream, headers=HEADERS, media_type=MEDIA_TYPE)


def _is_gone(db: Database, job: Job) -> bool:
    """Whether the job was deleted while somebody listened."""
    try:
        store.get(db, job.id)
    except NotFound:
        return True
    return False


def _frame(event: str, data: dict[str, Any], id: str | None = None) -> bytes:
    return format_sse_event(event=event, data_str=json.dumps(data, separators=(",", ":")), id=id)
