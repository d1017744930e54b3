"""/v1/videos: clips, in the shapes of OpenAI's Videos API, with what our models take beyond it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from media_server import http_objects as objects
from media_server.auth import Caller, Owner
from media_server.http_acceptance import Taking, accepting, answer_again, answer_created
from media_server.http_body import read_body
from media_server.http_clips import Extras, InputName, Inputs, input_files, ready_clip, submit_clip
from media_server.http_content import CONTENT_RESPONSES, remove, send_artifact
from media_server.http_lists import METADATA_PARAMETER, Listing
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, RemixRequest, VideoRequest, parse_body, take_files
from media_server.http_views import list_page, page_places, poll_after_ms, video_object
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.idempotency import KeptAnswer
from media_server.jobs.spec import Job
from media_server.models.registry import ClipRequest, get_card, parse_clip_request

router = APIRouter(prefix="/v1/videos", tags=["videos"])

VideoId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a clip.")]
# a data URI may come as one field of a form
MAX_PART_BYTES = 48 << 20

_REMIX_FIELDS = {"prompt", "negative_prompt", "seed", "metadata"}
_INPUT_FIELDS: Mapping[str, InputName] = {"input_reference": "first_frame", "last_frame": "last_frame"}


@router.post(
    "",
    response_model=objects.Video,
    summary="Create a clip",
    responses=errors(404, 409, 422, 429),
    openapi_extra=body_of(VideoRequest, files=("input_reference", "last_frame")),
)
async def create_video(request: Request, owner: Owner, asked: Taking) -> Response:
    """Queue a clip. The answer comes at once; `GET /v1/videos/{id}` or `/v1/jobs/{id}/events` tell how it goes."""
    db: Database = request.app.state.db
    async with (
        read_body(request, max_part_bytes=MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await answer_again(request, owner, key, video_object, asked)
        uploads = take_files(values, *_INPUT_FIELDS)
        body = parse_body(VideoRequest, values)
        card = await run_in_threadpool(get_card, db, body.model, "video")
        inputs = Inputs(
            uploads={_INPUT_FIELDS[name]: upload for name, upload in uploads.items()},
            references={
                input_name: reference
                for name, input_name in _INPUT_FIELDS.items()
                if (reference := getattr(body, name)) is not None
            },
        )
        job = await submit_clip(request, owner, card, clip_request(body), inputs, extras_of(body, idempotency_key=key))
    return await answer_created(request, job, video_object, asked, key)


@router.get(
    "",
    response_model=objects.ListPage[objects.Video],
    summary="List clips",
    openapi_extra=METADATA_PARAMETER,
)
async def list_videos(request: Request, owner: Owner, asked: Listing) -> dict[str, object]:
    """List the caller's clips, newest first; the shots of films are among them."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        page = store.list_jobs(db, **asked.of("video"), owner_key_id=owner.list_owner)
        places = page_places(db, page.data)
        return list_page([video_object(db, job, places) for job in page.data], page.has_more)

    return await run_in_threadpool(read)


@router.get("/{video_id}", response_model=objects.Video, summary="Retrieve a clip", responses=errors(404))
async def retrieve_video(request: Request, response: Response, owner: Owner, video_id: VideoId) -> objects.Video:
    """Say where a clip stands; a failed one is answered with 200 and its error."""
    db: Database = request.app.state.db
    return await answer(db, await run_in_threadpool(owned_video, db, video_id, owner), response)


@router.delete("/{video_id}", response_model=objects.Deleted, summary="Delete a clip", responses=errors(404, 409))
async def delete_video(request: Request, owner: Owner, video_id: VideoId) -> objects.Deleted:
    """Cancel the clip if it has not ended, then remove it, its prompts and its files."""
    db: Database = request.app.state.db

    def delete() -> None:
        owned_video(db, video_id, owner)
        remove(request, video_id)

    await run_in_threadpool(delete)
    return objects.Deleted(id=video_id, object="video.deleted", deleted=True)


@router.head("/{video_id}/content", include_in_schema=False)
@router.get(
    "/{video_id}/content",
    summary="Download a clip's file",
    response_class=Response,
    responses={**CONTENT_RESPONSES, **errors(404, 409, 412, 416)},
)
async def video_content(
    request: Request,
    owner: Owner,
    video_id: VideoId,
    variant: Annotated[
        Literal["video", "thumbnail", "spritesheet", "spritesheet_vtt", "last_frame", "manifest", "frames"],
        Query(
            description="`spritesheet_vtt` is the WebVTT index of the spritesheet; `manifest` makes the same clip "
            "again; `frames` is the image sequence, if it was asked for."
        ),
    ] = "video",
    download: Annotated[bool, Query(description="Ask browsers to save the file.")] = False,
) -> Response:
    """Send a file of a completed clip, whole or in part (Range, If-Range, ETag)."""
    db: Database = request.app.state.db
    job = await run_in_threadpool(owned_video, db, video_id, owner)
    return await send_artifact(request, job, variant, is_download=download)


@router.head("/{video_id}/spritesheet.jpg", include_in_schema=False)
@router.get(
    "/{video_id}/spritesheet.jpg",
    summary="Download a clip's spritesheet",
    response_class=Response,
    responses={**CONTENT_RESPONSES, **errors(404, 409, 412, 416)},
)
async def video_spritesheet(request: Request, owner: Owner, video_id: VideoId) -> Response:
    """Send the spritesheet from where its WebVTT index, which stands beside it, looks for it."""
    job = await run_in_threadpool(owned_video, request.app.state.db, video_id, owner)
    return await send_artifact(request, job, "spritesheet", is_download=False)


@router.post(
    "/{video_id}/remix",
    response_model=objects.Video,
    summary="Remix a clip",
    responses=errors(404, 409, 422, 429),
    openapi_extra=body_of(RemixRequest),
)
async def remix_video(request: Request, owner: Owner, asked: Taking, video_id: VideoId) -> Response:
    """Make a completed clip again with another prompt; all else, the seed too, stays unless named."""
    db: Database = request.app.state.db
    async with (
        read_body(request, max_part_bytes=MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await answer_again(request, owner, key, video_object, asked)
        body = parse_body(RemixRequest, values)
        source = await run_in_threadpool(ready_clip, db, video_id, owner, param="video_id")
        card = await run_in_threadpool(get_card, db, source.model, "video")
        clip = parse_clip_request({**clip_fields(source), **body.model_dump(include=_REMIX_FIELDS, exclude_none=True)})
        inputs = Inputs(files=await run_in_threadpool(input_files, request.app.state.artifacts, source))
        # of an extension, the clip that it continues is among the inputs
        kept = {name: source.params[name] for name in ("source",) if name in source.params}
        extras = extras_of(body, remixed_from_id=source.id, params=kept, idempotency_key=key)
        job = await submit_clip(request, owner, card, clip, inputs, extras)
    return await answer_created(request, job, video_object, asked, key)


def owned_video(db: Database, video_id: str, owner: Caller) -> Job:
    """Read a clip of the caller's. Raises NotFound if there is none, or if the id is another kind's."""
    return owner.check(store.get(db, video_id), kind="video")


def clip_request(body: BaseModel) -> ClipRequest:
    """Take those fields of a body that are the clip's own."""
    fields = set(type(body).model_fields) & set(ClipRequest.model_fields)
    return parse_clip_request(body.model_dump(include=fields))


def clip_fields(job: Job) -> dict[str, Any]:
    """Give the fields that would ask for a clip like this one again, without its prompts' text."""
    params = job.params
    segments = params.get("extend")
    return {
        "size": params["size"],
        "fps": params["fps"],
        "num_frames": params["num_frames"],
        "seed": params["seed"],
        "num_inference_steps": params["num_inference_steps"],
        "guidance_scale": params["guidance_scale"],
        "guidance_scale_2": params["guidance_scale_2"],
        "negative_prompt": job.prompts.get("negative_prompt", ""),
        "attention": params["attention"],
        "output": params["output"],
        "extend": segments and {name: segments[name] for name in ("segments", "overlap_frames", "anchor", "on_drift")},
    }


def extras_of(body: Any, **more: Any) -> Extras:
    """Take those fields of a body that are the job's, not the clip's."""
    return Extras(
        metadata=body.metadata, webhook_url=body.webhook_url, priority=body.priority, label=body.label, **more
    )


async def answer(db: Database, job: Job, response: Response) -> objects.Video:
    """Describe a clip, and advise a poller when to ask again."""
    response.headers["openai-poll-after-ms"] = poll_after_ms(job.status, job.eta_s)
    return await run_in_threadpool(video_object, db, job)
