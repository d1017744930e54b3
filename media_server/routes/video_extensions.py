"""/v1/videos/extensions: a clip is continued from its last frames; and what else OpenAI's API asks of a given video.

`edits` and `characters` need models that change or remember what a video shows. No model that this service loads does,
and the answer says so; a plain clip in their place would be a lie.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Response
from fastapi import Path as PathParam
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request

from media_server import http_objects as objects
from media_server.artifacts.probe import ClipInfo, probe_clip
from media_server.auth import Caller, Owner
from media_server.errors import InvalidRequest, NotFound
from media_server.http_acceptance import Taking, accepting, answer_again, answer_created
from media_server.http_body import read_body
from media_server.http_clips import (
    CONTENT_TYPES,
    InputFile,
    Inputs,
    artifact_file,
    overlap_of,
    ready_clip,
    submit_clip,
    upload_file,
)
from media_server.http_errors import ProblemResponse
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, ExtensionRequest, parse_body, take_files
from media_server.http_views import video_object
from media_server.jobs.database import Database
from media_server.jobs.idempotency import KeptAnswer
from media_server.models.card import VideoCard
from media_server.models.registry import ClipRequest, get_card, parse_clip_request
from media_server.routes.videos import MAX_PART_BYTES, clip_fields, extras_of

router = APIRouter(prefix="/v1/videos", tags=["videos"])


@router.post(
    "/extensions",
    response_model=objects.Video,
    summary="Extend a clip",
    responses=errors(404, 409, 422, 429),
    openapi_extra=body_of(ExtensionRequest, files=("video",)),
)
async def extend_video(request: Request, owner: Owner, asked: Taking) -> Response:
    """Continue a clip, made here or uploaded, for `seconds` more; the file that comes out begins with it.

    Its size and frame rate are the clip's own, and must be ones that the model takes. A clip made here keeps its model
    and parameters unless others are named; an upload takes the model's defaults.
    """
    db: Database = request.app.state.db
    # the clip lies in a temporary file until the job has a copy
    async with (
        read_body(request, max_part_bytes=MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await answer_again(request, owner, key, video_object, asked)
        upload = take_files(values, "video").get("video")
        body = parse_body(ExtensionRequest, values)
        with ExitStack() as stack:
            opening = partial(_open_source, request, owner, body, upload, stack)
            source = await to_thread.run_sync(opening, limiter=request.app.state.decoders)
            card = await run_in_threadpool(get_card, db, source.model or body.model, "video")
            named = body.model_dump(include=set(ClipRequest.model_fields), exclude={"model"}, exclude_none=True)
            clip = parse_clip_request({**source.fields, **named})
            _check_length(source.info, clip, card)
            suffix = source.info.suffix
            inputs = Inputs(files={"video": InputFile(suffix, CONTENT_TYPES[suffix], source.path)})
            params = {"source": {"id": source.clip_id, "num_frames": source.info.num_frames}}
            extras = extras_of(body, params=params, idempotency_key=key)
            try:
                job = await submit_clip(request, owner, card, clip, inputs, extras)
            except InvalidRequest as error:
                raise _of_the_clip(error) from error
    return await answer_created(request, job, video_object, asked, key)


# a route that always refuses has no other answer to declare
_REFUSES: dict[str, Any] = {"status_code": 400, "response_class": ProblemResponse, "responses": errors(400, 404)}


@router.post("/edits", summary="Edit a clip", **_REFUSES)
async def edit_video() -> None:
    """Refuse: no model of this service changes what a given video shows."""
    raise _not_supported("edits", "Use /v1/videos/{id}/remix for another prompt, /v1/videos/extensions to continue it.")


@router.post("/characters", summary="Create a character", **_REFUSES)
async def create_character() -> None:
    """Refuse: no model of this service remembers a character."""
    raise _not_supported("characters", "Use input_reference to begin a clip with an image of the character.")


@router.get("/characters/{character_id}", summary="Retrieve a character", **_REFUSES | {"status_code": 404})
async def retrieve_character(character_id: Annotated[str, PathParam(pattern=ID_PATTERN)]) -> None:
    """Say that there is none: characters cannot be created here."""
    raise NotFound(f"No character has the id {character_id!r}.", param="character_id", value=character_id)


@dataclass(frozen=True)
class _Source:
    """The clip to be continued: where it lies, what it is, and what it hands on."""

    path: Path
    info: ClipInfo
    fields: dict[str, Any]
    model: str | None
    clip_id: str | None


def _open_source(
    request: Request, owner: Caller, body: ExtensionRequest, upload: UploadFile | None, stack: ExitStack
) -> _Source:
    """Bring the clip to disk and look into it; blocking. The stack removes the temporary file."""
    if upload is not None:
        path = stack.enter_context(upload_file(upload))
        info = probe_clip(path, param="video")
        if info.fps != int(info.fps):
            rule = "a whole number of frames a second"
            message = f"video: must have {rule}, got {info.fps:g}."
            raise InvalidRequest(message, param="video", rule=rule, value=info.fps)
        fields = {"size": f"{info.width}x{info.height}", "fps": int(info.fps)}
        return _Source(path, info, fields, None, None)
    if body.video is None:
        rule = "the id of a completed clip, or a file"
        raise InvalidRequest(f"video: this field is required: {rule}.", param="video", rule=rule)
    state = request.app.state
    job = ready_clip(state.db, body.video.id, owner, param="video")
    path = stack.enter_context(artifact_file(state.db, state.artifacts, job, "video"))
    kept = ("size", "fps", "num_inference_steps", "guidance_scale", "guidance_scale_2", "negative_prompt", "attention")
    fields = {name: value for name, value in clip_fields(job).items() if name in (*kept, "output")}
    return _Source(path, probe_clip(path, param="video"), fields, job.model, job.id)


def _check_length(info: ClipInfo, clip: ClipRequest, card: VideoCard) -> None:
    """Refuse a clip that is shorter than what a continuation takes over from it."""
    overlap = overlap_of(card, clip)
    if info.num_frames < overlap:
        rule = f"at least {overlap} frames to continue from"
        message = f"video: must have {rule}, got {info.num_frames}."
        raise InvalidRequest(message, param="video", rule=rule, value=info.num_frames)


def _of_the_clip(error: InvalidRequest) -> InvalidRequest:
    """Blame the clip for what it brought with it: its size and its frame rate."""
    if error.param not in ("size", "fps"):
        return error
    return InvalidRequest(
        f"video: the clip's {error.message}",
        code=error.code,
        param="video",
        rule=f"{error.param}: {error.rule}",
        value=error.value,
    )


def _not_supported(what: str, instead: str) -> InvalidRequest:
    return InvalidRequest(
        f"Video {what} are not supported: no model of this service offers them. {instead}",
        code="not_supported",
        rule=f"a model that offers {what}",
    )
