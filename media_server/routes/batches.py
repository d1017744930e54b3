"""/v1/batches: files of requests that are run while the service has room, as the openai package has them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from media_server import http_objects
from media_server.auth import Caller, Owner
from media_server.batches import objects, store
from media_server.batches.objects import batch_object, read_window
from media_server.errors import InvalidRequest, NotFound
from media_server.http_acceptance import Taking, accepting
from media_server.http_body import read_body
from media_server.http_context import request_context
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, parse_body
from media_server.http_views import list_page
from media_server.jobs import idempotency
from media_server.jobs.database import Database
from media_server.jobs.idempotency import HeldKey, KeptAnswer
from media_server.models.clip import check_metadata
from media_server.routes.files import owned_file, refuse_words

router = APIRouter(prefix="/v1/batches", tags=["batches"])

BatchId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a batch.")]
_MAX_PART_BYTES = 1 << 16


@router.post(
    "",
    response_model=objects.Batch,
    summary="Create a batch",
    responses=errors(404, 409, 422),
    openapi_extra=body_of(objects.BatchBody),
)
async def create_batch(request: Request, owner: Owner, asked: Taking) -> Response:
    """Run the requests of an uploaded file. Each passes the same checks, quotas and budgets as one sent by itself.

    Lines that are refused or fail are in the error file, the others in the output file, once the batch has ended. A
    line that makes a job ends with its job; its body is then the job's object.
    """
    db: Database = request.app.state.db
    refuse_words("input_file_id", owner, request.app.state.settings)
    async with (
        read_body(request, max_part_bytes=_MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return await run_in_threadpool(_again, db, owner, key)
        body = parse_body(objects.BatchBody, values)
        check_metadata(body.metadata)
        lifetime = body.output_expires_after

        def create() -> store.BatchRow:
            try:
                input_file = owned_file(db, body.input_file_id, owner)
            except NotFound as error:
                message = f"input_file_id: {error.message}"
                raise NotFound(message, param="input_file_id", value=body.input_file_id) from error
            if input_file.purpose != "batch":
                rule = "a file of the purpose batch"
                raise InvalidRequest(
                    f"input_file_id: must be {rule}, got {input_file.purpose}.",
                    param="input_file_id",
                    rule=rule,
                    value=input_file.purpose,
                )
            return store.create(
                db,
                owner_key_id=owner.owner_key_id,
                input_file=input_file,
                endpoint=body.endpoint,
                completion_window=body.completion_window,
                window_s=read_window(body.completion_window),
                metadata=body.metadata,
                output_lifetime_s=float(lifetime.seconds) if lifetime is not None else None,
                traceparent=request_context(request).traceparent,
                key=key,
            )

        row = await run_in_threadpool(create)
        text = batch_object(row).model_dump_json()
        if isinstance(key, HeldKey):
            await run_in_threadpool(idempotency.keep_answer, db, key, text)
    return Response(text, media_type=JSONResponse.media_type)


@router.get("", response_model=http_objects.ListPage[objects.Batch], summary="List batches")
async def list_batches(
    request: Request,
    owner: Owner,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, object]:
    """List the caller's batches, newest first."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        rows, has_more = store.list_batches(db, owner_key_id=owner.list_owner, after=after, limit=limit)
        return list_page([batch_object(row) for row in rows], has_more)

    return await run_in_threadpool(read)


@router.get("/{batch_id}", response_model=objects.Batch, summary="Retrieve a batch", responses=errors(404))
async def retrieve_batch(request: Request, owner: Owner, batch_id: BatchId) -> objects.Batch:
    """Say where a batch stands."""
    return batch_object(await run_in_threadpool(_owned_batch, request.app.state.db, batch_id, owner))


@router.post(
    "/{batch_id}/cancel", response_model=objects.Batch, summary="Cancel a batch", responses=errors(404, 409)
)
async def cancel_batch(request: Request, owner: Owner, batch_id: BatchId) -> objects.Batch:
    """Stop a batch: lines that were not sent end at once, jobs under way are cancelled; what was made is kept."""
    db: Database = request.app.state.db

    def cancel() -> objects.Batch:
        _owned_batch(db, batch_id, owner)
        return batch_object(store.cancel(db, batch_id))

    return await run_in_threadpool(cancel)


def _owned_batch(db: Database, batch_id: str, owner: Caller) -> store.BatchRow:
    row = store.get(db, batch_id)
    if not owner.may_see(row.owner_key_id):
        raise NotFound(f"No batch has the id {batch_id!r}.", param="id", value=batch_id)
    return row


def _again(db: Database, owner: Caller, kept: KeptAnswer) -> Response:
    text = kept.response or batch_object(_owned_batch(db, kept.made_id, owner)).model_dump_json()
    headers = {"idempotent-replayed": "true"}
    return Response(text, kept.status_code, headers, media_type=JSONResponse.media_type)
