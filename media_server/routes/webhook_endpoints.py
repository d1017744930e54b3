"""/v1/webhook_endpoints: where a caller's events go, as the openai package manages it; and which events there are."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from media_server import http_objects
from media_server.auth import Owner
from media_server.errors import Unprocessable
from media_server.http_acceptance import Taking, accepting
from media_server.http_body import read_body
from media_server.http_fetch import check_url
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, parse_body
from media_server.http_views import list_page
from media_server.ids import new_id
from media_server.jobs import idempotency
from media_server.jobs.database import Database, Transaction
from media_server.jobs.idempotency import Hold, KeptAnswer
from media_server.jobs.outbox import make_payload
from media_server.settings import Settings
from media_server.webhooks import endpoints, log, objects
from media_server.webhooks.endpoints import EVENT_TYPES, Endpoint
from media_server.webhooks.objects import endpoint_object, endpoint_with_secret
from media_server.webhooks.sending import Sender

router = APIRouter(prefix="/v1", tags=["webhooks"])

EndpointId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a webhook endpoint.")]
_MAX_PART_BYTES = 1 << 16


@router.get("/webhook_event_types", response_model=objects.EventTypeList, summary="List event types")
async def list_webhook_event_types(owner: Owner) -> objects.EventTypeList:
    """List the events that this service sends: each the end of a job that was asked for by itself."""
    return objects.EventTypeList(object="list", data=list(EVENT_TYPES))


@router.post(
    "/webhook_endpoints",
    response_model=objects.WebhookEndpointWithSecret,
    summary="Create a webhook endpoint",
    responses=errors(409, 422),
    openapi_extra=body_of(objects.EndpointBody),
)
async def create_webhook_endpoint(request: Request, owner: Owner, asked: Taking) -> Response:
    """Have events sent to a URL. The answer alone tells the secret that signs them."""
    db: Database = request.app.state.db
    async with (
        read_body(request, max_part_bytes=_MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return _again(key)
        body = parse_body(objects.EndpointBody, values)
        _check(request, body.url)

        def create() -> Response:
            with db.write() as tx:
                made = endpoints.create(
                    tx, owner.owner_key_id, name=body.name, url=body.url, event_types=body.event_types
                )
                return _tell_secret(tx, made, key)

        return await run_in_threadpool(create)


@router.get(
    "/webhook_endpoints",
    response_model=http_objects.ListPage[objects.WebhookEndpoint],
    summary="List webhook endpoints",
)
async def list_webhook_endpoints(
    request: Request,
    owner: Owner,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, object]:
    """List the caller's endpoints, newest first."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        found, has_more = endpoints.list_endpoints(db, owner.owner_key_id, after=after, limit=limit)
        return list_page([endpoint_object(endpoint) for endpoint in found], has_more)

    return await run_in_threadpool(read)


@router.get(
    "/webhook_endpoints/{webhook_endpoint_id}",
    response_model=objects.WebhookEndpoint,
    summary="Retrieve a webhook endpoint",
    responses=errors(404),
)
async def retrieve_webhook_endpoint(
    request: Request, owner: Owner, webhook_endpoint_id: EndpointId
) -> objects.WebhookEndpoint:
    """Say where an endpoint's events go, and how it fares."""
    db: Database = request.app.state.db
    return endpoint_object(await run_in_threadpool(endpoints.get, db, webhook_endpoint_id, owner.owner_key_id))


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}",
    response_model=objects.WebhookEndpoint,
    summary="Update a webhook endpoint",
    responses=errors(404),
    openapi_extra=body_of(objects.EndpointChanges, is_required=False),
)
async def update_webhook_endpoint(
    request: Request, owner: Owner, webhook_endpoint_id: EndpointId
) -> objects.WebhookEndpoint:
    """Change an endpoint; messages that wait for it follow it to a new URL, or go once it is enabled again."""
    db: Database = request.app.state.db
    async with read_body(request, max_part_bytes=_MAX_PART_BYTES) as values:
        changes = parse_body(objects.EndpointChanges, values).model_dump(exclude_none=True)
    if "url" in changes:
        _check(request, changes["url"])
    updated = await run_in_threadpool(endpoints.update, db, webhook_endpoint_id, owner.owner_key_id, changes)
    return endpoint_object(updated)


@router.delete(
    "/webhook_endpoints/{webhook_endpoint_id}",
    response_model=http_objects.Deleted,
    summary="Delete a webhook endpoint",
    responses=errors(404),
)
async def delete_webhook_endpoint(
    request: Request, owner: Owner, webhook_endpoint_id: EndpointId
) -> http_objects.Deleted:
    """Remove an endpoint with its secrets, the messages that wait for it, and their log."""
    db: Database = request.app.state.db
    await run_in_threadpool(endpoints.delete, db, webhook_endpoint_id, owner.owner_key_id)
    return http_objects.Deleted(id=webhook_endpoint_id, object="webhook_endpoint.deleted", deleted=True)


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate_secret",
    response_model=objects.WebhookEndpointWithSecret,
    summary="Rotate a webhook endpoint's secret",
    responses=errors(404, 409, 422),
    openapi_extra=body_of(objects.RotationBody, is_required=False),
)
async def rotate_webhook_secret(
    request: Request, owner: Owner, asked: Taking, webhook_endpoint_id: EndpointId
) -> Response:
    """Replace the secret; the answer alone tells the new one. The old one signs for a day more if asked to."""
    db: Database = request.app.state.db
    async with (
        read_body(request, max_part_bytes=_MAX_PART_BYTES) as values,
        accepting(request, owner, asked, values) as key,
    ):
        if isinstance(key, KeptAnswer):
            return _again(key)
        keeps_old = parse_body(objects.RotationBody, values).keep_old_secret_active_for_24_hours

        def rotate() -> Response:
            with db.write() as tx:
                rotated = endpoints.rotate_secret(tx, webhook_endpoint_id, owner.owner_key_id, keeps_old=keeps_old)
                return _tell_secret(tx, rotated, key)

        return await run_in_threadpool(rotate)


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/test",
    response_model=objects.WebhookTest,
    summary="Test a webhook endpoint",
    responses=errors(404, 422),
    openapi_extra=body_of(objects.SampleBody),
)
async def test_webhook_endpoint(request: Request, owner: Owner, webhook_endpoint_id: EndpointId) -> objects.WebhookTest:
    """Send a sample event now, signed as all are, and say what was answered; 422 says why it did not arrive."""
    db: Database = request.app.state.db
    sender: Sender = request.app.state.webhook_tests
    async with read_body(request, max_part_bytes=_MAX_PART_BYTES) as values:
        event_type = parse_body(objects.SampleBody, values).event_type

    def look() -> tuple[Endpoint, float]:
        with db.read() as tx:
            return endpoints.load(tx, webhook_endpoint_id, owner.owner_key_id), tx.now()

    endpoint, now = await run_in_threadpool(look)
    id = new_id("evt")
    payload = make_payload(id, event_type, new_id(event_type.partition(".")[0]), now)  # type: ignore[arg-type]
    secrets = endpoint.secrets_at(now)
    answer = await sender.send(endpoint.url, payload, message_id=id, secrets=secrets, param="url")
    if answer.status is None:
        raise Unprocessable(
            f"{webhook_endpoint_id} did not answer: {answer.error}.",
            code="webhook_not_answered",
            param="url",
            rule=answer.error,
        )
    if 300 <= answer.status < 400:
        raise Unprocessable(
            f"{webhook_endpoint_id} answered with a redirect ({answer.status}), and none is followed: "
            "the url must be that of the receiver itself.",
            code="webhook_redirected",
            param="url",
            rule="a receiver that answers without a redirect",
            value=answer.status,
        )
    return objects.WebhookTest(
        object="webhook_endpoint.test",
        webhook_endpoint_id=webhook_endpoint_id,
        event_type=event_type,
        success=True,
        status_code=answer.status,
    )


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/replay",
    response_model=objects.Replayed,
    summary="Replay what an endpoint missed",
    responses=errors(404, 409),
    openapi_extra=body_of(objects.ReplayBody),
)
async def replay_webhook_endpoint(request: Request, owner: Owner, webhook_endpoint_id: EndpointId) -> objects.Replayed:
    """Send again, now and by a fresh schedule, the messages of a span of time that the endpoint did not get."""
    db: Database = request.app.state.db
    async with read_body(request, max_part_bytes=_MAX_PART_BYTES) as values:
        body = parse_body(objects.ReplayBody, values)

    def replay() -> int:
        endpoints.get(db, webhook_endpoint_id, owner.owner_key_id)
        return log.replay_all(db, webhook_endpoint_id, owner.owner_key_id, since=body.since, until=body.until)

    count = await run_in_threadpool(replay)
    return objects.Replayed(object="webhook_endpoint.replay", webhook_endpoint_id=webhook_endpoint_id, replayed=count)


def _check(request: Request, url: str) -> None:
    settings: Settings = request.app.state.settings
    check_url(url, param="url", allow_private=settings.allow_private_urls)


def _tell_secret(tx: Transaction, endpoint: Endpoint, key: Hold | None) -> Response:
    """Answer with an endpoint's secret, and keep that answer for its key, in the transaction that made it."""
    made: BaseModel = endpoint_with_secret(endpoint)
    text = made.model_dump_json()
    if key is not None:
        idempotency.bind(tx, key, made_id=endpoint.id, response=text)
    return Response(text, media_type=JSONResponse.media_type)


def _again(kept: KeptAnswer) -> Response:
    headers = {"idempotent-replayed": "true"}
    return Response(kept.response, kept.status_code, headers, media_type=JSONResponse.media_type)
