"""/v1/files: what batches read and write, as the openai package uploads and downloads it."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from media_server import http_objects
from media_server.auth import Caller, Owner
from media_server.batches import files, objects
from media_server.batches.objects import file_object
from media_server.errors import Conflict, InvalidRequest, NotFound
from media_server.http_acceptance import Taking, accepting
from media_server.http_body import read_body
from media_server.http_openapi import errors
from media_server.http_range import strong_etag
from media_server.http_requests import ID_PATTERN, parse_body
from media_server.http_views import list_page
from media_server.ids import new_id
from media_server.jobs import idempotency
from media_server.jobs.database import Database
from media_server.jobs.idempotency import HeldKey, KeptAnswer
from media_server.settings import Settings

router = APIRouter(prefix="/v1/files", tags=["batches"])

FileId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a file.")]
_MAX_PART_BYTES = 1 << 16
_MAX_NAME = 255
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {
                            "type": "string",
                            "contentMediaType": "application/octet-stream",
                            "description": "JSON lines; each is a `BatchLine`.",
                        },
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after": {
                            "type": "object",
                            "required": ["anchor", "seconds"],
                            "description": "How long it is kept; in bracket form. 30 days if left out.",
                            "properties": {
                                "anchor": {"type": "string", "enum": ["created_at"]},
                                "seconds": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                            },
                        },
                    },
                }
            }
        },
    }
}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, as it was sent or written.",
        "content": {files.CONTENT_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.post(
    "",
    response_model=objects.File,
    summary="Upload a file",
    responses=errors(409, 422),
    openapi_extra=_FORM,
)
async def create_file(request: Request, owner: Owner, asked: Taking) -> Response:
    """Keep a file of requests, one a line, for a batch; refused where no words are kept."""
    state = request.app.state
    refuse_words("file", owner, state.settings)
    db: Database = state.db
    async with (
        read_body(request, max_part_bytes=_MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await run_in_threadpool(_again, db, owner, key)
        content = values.pop("file", None)
        if not isinstance(content, UploadFile):
            rule = "must be an uploaded file"
            raise InvalidRequest(f"file: {rule}.", param="file", rule=rule)
        body = parse_body(objects.FileBody, values)

        def keep() -> files.FileRow:
            return files.upload(
                db,
                state.artifacts,
                new_id("file"),
                content.file,
                owner_key_id=owner.owner_key_id,
                filename=_filename(content),
                lifetime_s=_lifetime_s(state.settings, body.expires_after),
                key=key,
            )

        row = await run_in_threadpool(keep)
        text = file_object(row).model_dump_json()
        if isinstance(key, HeldKey):
            await run_in_threadpool(idempotency.keep_answer, db, key, text)
    return Response(text, media_type=JSONResponse.media_type)


@router.get("", response_model=http_objects.ListPage[objects.File], summary="List files")
async def list_files(
    request: Request,
    owner: Owner,
    purpose: Annotated[files.FilePurpose | None, Query(description="Only of this purpose.")] = None,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of creation.")] = "desc",
) -> dict[str, object]:
    """List the caller's files: those it uploaded, and those that its batches wrote."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        rows, has_more = files.list_files(
            db, owner_key_id=owner.list_owner, purpose=purpose, after=after, limit=limit, order=order
        )
        return list_page([file_object(row) for row in rows], has_more)

    return await run_in_threadpool(read)


@router.get("/{file_id}", response_model=objects.File, summary="Retrieve a file", responses=errors(404))
async def retrieve_file(request: Request, owner: Owner, file_id: FileId) -> objects.File:
    """Describe a file."""
    return file_object(await run_in_threadpool(owned_file, request.app.state.db, file_id, owner))


@router.delete(
    "/{file_id}", response_model=http_objects.Deleted, summary="Delete a file", responses=errors(404, 409)
)
async def delete_file(request: Request, owner: Owner, file_id: FileId) -> http_objects.Deleted:
    """Remove a file; one that a batch still reads stays until that has ended."""
    db: Database = request.app.state.db

    def delete() -> None:
        owned_file(db, file_id, owner)
        files.delete(db, file_id)

    await run_in_threadpool(delete)
    return http_objects.Deleted(id=file_id, object="file", deleted=True)


@router.get(
    "/{file_id}/content",
    summary="Download a file",
    response_class=Response,
    responses={**_CONTENT, **errors(404)},
)
async def file_content(request: Request, owner: Owner, file_id: FileId) -> Response:
    """Send a file whole."""
    row = await run_in_threadpool(owned_file, request.app.state.db, file_id, owner)
    body = await run_in_threadpool(request.app.state.artifacts.read, row.key)
    headers = {
        "content-length": str(row.size_bytes),
        "etag": strong_etag(row.sha256),
        "cache-control": "private, no-cache",
        "content-disposition": f'attachment; filename="{row.id}.jsonl"',
    }
    return StreamingResponse(body, headers=headers, media_type=files.CONTENT_TYPE)


def refuse_words(param: str, owner: Caller, settings: Settings) -> None:
    """Raise InvalidRequest where zero data retention holds: the files of a batch are its words."""
    if owner.answer_s(settings) is not None:
        rule = "requests one by one"
        message = f"{param}: no words are kept here, and the files of a batch hold them."
        raise InvalidRequest(message, code="zero_retention", param=param, rule=rule)


def owned_file(db: Database, file_id: str, owner: Caller) -> files.FileRow:
    """Read a file of the caller's. Raises NotFound if there is none."""
    with db.read() as tx:
        row = files.load(tx, file_id)
    if not owner.may_see(row.owner_key_id):
        raise NotFound(f"No file has the id {file_id!r}.", param="id", value=file_id)
    return row


def _again(db: Database, owner: Caller, kept: KeptAnswer) -> Response:
    try:
        text = kept.response or file_object(owned_file(db, kept.made_id, owner)).model_dump_json()
    except NotFound as error:
        raise Conflict(
            f"Idempotency-Key: {kept.made_id}, which this key made, has been deleted; a new request needs a new key.",
            code="idempotency_key_spent",
            param="Idempotency-Key",
        ) from error
    headers = {"idempotent-replayed": "true"}
    return Response(text, kept.status_code, headers, media_type=JSONResponse.media_type)


def _filename(content: UploadFile) -> str:
    """Give the name that the caller has for a file: only ever shown."""
    name = content.filename or "file.jsonl"
    if len(name) > _MAX_NAME:
        rule = f"a name of at most {_MAX_NAME} characters"
        raise InvalidRequest(f"file: {rule}, got {len(name)}.", param="file", rule=rule, value=len(name))
    # what cannot be stored, or would break a line of a terminal
    return "".join(c if c.isprintable() and c not in "/\\" else "_" for c in name)


def _lifetime_s(settings: Settings, asked: objects.Lifetime | None) -> float:
    """Say how long a file is kept: as asked, and no longer than the service keeps what has ended."""
    longest = files.KEEP_S if settings.retention_s is None else min(files.KEEP_S, settings.retention_s)
    return longest if asked is None else min(longest, float(asked.seconds))
