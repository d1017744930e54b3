"""/v1/webhook_deliveries: the log of messages to receivers, each with its tries, and sending one again."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from media_server import http_objects
from media_server.auth import Owner
from media_server.http_openapi import errors
from media_server.http_requests import ID_PATTERN
from media_server.http_views import list_page
from media_server.jobs.database import Database
from media_server.webhooks import log, objects
from media_server.webhooks.objects import delivery_object

router = APIRouter(prefix="/v1/webhook_deliveries", tags=["webhooks"])

DeliveryId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of a message, its `webhook-id`.")]


@router.get("", response_model=http_objects.ListPage[objects.WebhookDelivery], summary="List deliveries")
async def list_webhook_deliveries(
    request: Request,
    owner: Owner,
    webhook_endpoint_id: Annotated[str | None, Query(pattern=ID_PATTERN, description="Only to this endpoint.")] = None,
    job_id: Annotated[str | None, Query(pattern=ID_PATTERN, description="Only of this job.")] = None,
    batch_id: Annotated[str | None, Query(pattern=ID_PATTERN, description="Only of this batch.")] = None,
    status: Annotated[log.State | None, Query(description="Only in this state.")] = None,
    event_type: Annotated[objects.EventType | None, Query(description="Only of this event.")] = None,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, object]:
    """List the messages that the caller's jobs and batches sent, newest first; settled ones for 30 days."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        found, has_more = log.list_deliveries(
            db,
            owner.owner_key_id,
            endpoint_id=webhook_endpoint_id,
            job_id=job_id,
            batch_id=batch_id,
            state=status,
            type=event_type,
            after=after,
            limit=limit,
        )
        return list_page([delivery_object(delivery) for delivery in found], has_more)

    return await run_in_threadpool(read)


@router.get(
    "/{delivery_id}", response_model=objects.WebhookDelivery, summary="Retrieve a delivery", responses=errors(404)
)
async def retrieve_webhook_delivery(request: Request, owner: Owner, delivery_id: DeliveryId) -> objects.WebhookDelivery:
    """Say what became of a message, try by try."""
    db: Database = request.app.state.db
    return delivery_object(await run_in_threadpool(log.get, db, delivery_id, owner.owner_key_id))


@router.post(
    "/{delivery_id}/replay",
    response_model=objects.WebhookDelivery,
    summary="Replay a delivery",
    responses=errors(404, 409),
)
async def replay_webhook_delivery(request: Request, owner: Owner, delivery_id: DeliveryId) -> objects.WebhookDelivery:
    """Send a message again, now and by a fresh schedule: the same bytes under the same id."""
    db: Database = request.app.state.db
    return delivery_object(await run_in_threadpool(log.replay, db, delivery_id, owner.owner_key_id))
