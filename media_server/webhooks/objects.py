"""What the API takes and answers about webhooks: OpenAI's endpoints with our fields beside theirs, and the log."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from media_server.validation import RequestModel
from media_server.webhooks import endpoints, log
from media_server.webhooks.endpoints import EVENT_TYPES

_WHE = "whe_0192f0c1a5b07cc2a3f44b6f1d2e3c4d"
_EVT = "evt_0192f0c1a5b07cc2a3f44b6f1d2e3c4d"
_VIDEO = "video_0192f0c1a5b07cc2a3f44b6f1d2e3c4d"
_ENDPOINT: dict[str, Any] = {
    "id": _WHE,
    "object": "webhook_endpoint",
    "name": "editing room",
    "url": "https://example.com/hook",
    "event_types": ["video.completed"],
    "signing_secret_hint": "whsec_…A9fQ=",
    "created_at": 1764400000,
    "updated_at": 1764400000,
    "is_enabled": True,
    "disabled_reason": None,
    "failing_since": None,
}

EventType = Literal[
    "video.completed",
    "video.failed",
    "video.cancelled",
    "film.completed",
    "film.failed",
    "film.cancelled",
    "storyboard.completed",
    "storyboard.failed",
    "storyboard.cancelled",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
]
Subscription = Literal[EventType, "*"]
EventTypes = Annotated[
    list[Subscription],
    Field(min_length=1, max_length=50, description="The events that are sent there; `*` is every one."),
]
Name = Annotated[str, Field(min_length=1, max_length=200, description="A name for people.")]
Url = Annotated[str, Field(max_length=2048, description="An https URL with a public address.")]


class _Body(RequestModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class EndpointBody(_Body):
    """An endpoint to be created."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"name": "editing room", "url": "https://example.com/hook", "event_types": ["video.completed"]},
                {"name": "all", "url": "https://example.com/all", "event_types": ["*"]},
            ]
        }
    )

    name: Name
    url: Url
    event_types: EventTypes


class EndpointChanges(_Body):
    """What is to change of an endpoint; what is left out stays."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"event_types": ["video.completed", "video.failed"]}, {"is_enabled": True}]}
    )

    name: Name | None = None
    url: Url | None = None
    event_types: EventTypes | None = None
    is_enabled: bool | None = Field(None, description="False stops sending; true starts again what stopped.")


class RotationBody(_Body):
    """How a secret is replaced."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"keep_old_secret_active_for_24_hours": True}]})

    keep_old_secret_active_for_24_hours: bool = Field(
        False, description="Sign with the old secret too for a day; else it ends at once, with every one before it."
    )


class SampleBody(_Body):
    """What a test sends: a sample of an event."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"event_type": "video.completed"}]})

    event_type: EventType


class ReplayBody(_Body):
    """Which of an endpoint's messages are sent again: those of this span that it did not get."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"since": 1764400000, "until": 1764486400}]})

    since: float = Field(ge=0, description="Unix seconds; messages from then on.")
    until: float | None = Field(None, ge=0, description="Unix seconds; messages before then. Now if left out.")

    @model_validator(mode="after")
    def _is_a_span(self) -> Self:
        if self.until is not None and self.until <= self.since:
            raise ValueError("until is later than since")
        return self


BODIES: list[type[BaseModel]] = [EndpointBody, EndpointChanges, RotationBody, SampleBody, ReplayBody]


class WebhookEndpoint(BaseModel):
    """Where events are sent: OpenAI's webhook endpoint, and how it fares."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ENDPOINT]})

    id: str
    object: Literal["webhook_endpoint"]
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str = Field(description="The end of the secret, to tell it from others.")
    created_at: int
    updated_at: int = Field(description="When its settings or its secret last changed.")
    is_enabled: bool = Field(description="Whether events are sent there.")
    disabled_reason: str | None = Field(description="Why not, such as that it answered 410, or failed for days.")
    failing_since: int | None = Field(description="Since when no try has succeeded; null if the last one has.")


class WebhookEndpointWithSecret(WebhookEndpoint):
    """An endpoint with the secret that signs what it gets; told once, when it is made."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    **_ENDPOINT,
                    "signing_secret": "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA9fQ=",
                }
            ]
        }
    )

    signing_secret: str


class WebhookTest(BaseModel):
    """What an endpoint answered to a test."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "webhook_endpoint.test",
                    "webhook_endpoint_id": _WHE,
                    "event_type": "video.completed",
                    "success": True,
                    "status_code": 200,
                }
            ]
        }
    )

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    success: Literal[True] = Field(description="That it answered; `status_code` says what.")
    status_code: int


class EventTypeList(BaseModel):
    """The events that this service sends."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"object": "list", "data": list(EVENT_TYPES)}]})

    object: Literal["list"]
    data: list[str]


class DeliveryTry(BaseModel):
    """One try at a message."""

    number: int
    started_at: float
    duration_s: float
    status_code: int | None = Field(description="What the receiver answered; null if it did not.")
    error: str | None = Field(description="Why it counts as failed; null if it does not.")


class WebhookDelivery(BaseModel):
    """A message to one receiver, and each try at it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _EVT,
                    "object": "webhook_delivery",
                    "event_type": "video.completed",
                    "job_id": _VIDEO,
                    "batch_id": None,
                    "webhook_endpoint_id": _WHE,
                    "url": "https://example.com/hook",
                    "status": "pending",
                    "created_at": 1764400000,
                    "next_attempt_at": 1764400007,
                    "settled_at": None,
                    "payload": '{"id":"' + _EVT + '"}',
                    "attempts": [
                        {
                            "number": 1,
                            "started_at": 1764400000.2,
                            "duration_s": 0.05,
                            "status_code": 503,
                            "error": "HTTP 503",
                        }
                    ],
                }
            ]
        }
    )

    id: str = Field(description="The message's `webhook-id`, the same in each try and each replay.")
    object: Literal["webhook_delivery"]
    event_type: str
    job_id: str | None = Field(description="The job that it tells of; null if it is a batch.")
    batch_id: str | None = Field(description="The batch that it tells of; null if it is a job.")
    webhook_endpoint_id: str | None = Field(description="Null for a request's own `webhook_url`.")
    url: str | None = Field(description="Null once the job is deleted whose `webhook_url` it was.")
    status: Literal["pending", "delivered", "dead"]
    created_at: int
    next_attempt_at: int | None
    settled_at: int | None
    payload: str = Field(description="The bytes that are signed and sent.")
    attempts: list[DeliveryTry]


class Replayed(BaseModel):
    """How many messages are sent again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"object": "webhook_endpoint.replay", "webhook_endpoint_id": _WHE, "replayed": 3}]
        }
    )

    object: Literal["webhook_endpoint.replay"]
    webhook_endpoint_id: str
    replayed: int


def endpoint_object(endpoint: endpoints.Endpoint) -> WebhookEndpoint:
    """Describe an endpoint without its secret."""
    since = endpoint.failing_since
    return WebhookEndpoint(
        id=endpoint.id,
        object="webhook_endpoint",
        name=endpoint.name,
        url=endpoint.url,
        event_types=endpoint.event_types,
        signing_secret_hint=f"whsec_…{endpoint.secret[-5:]}",
        created_at=int(endpoint.created_at),
        updated_at=int(endpoint.updated_at),
        is_enabled=endpoint.is_enabled,
        disabled_reason=endpoint.disabled_reason,
        failing_since=None if since is None else int(since),
    )


def endpoint_with_secret(endpoint: endpoints.Endpoint) -> WebhookEndpointWithSecret:
    """Describe an endpoint and tell its secret, which is done once."""
    return WebhookEndpointWithSecret(**endpoint_object(endpoint).model_dump(), signing_secret=endpoint.secret)


def delivery_object(delivery: log.Delivery) -> WebhookDelivery:
    """Describe a message and its tries."""
    return WebhookDelivery(
        id=delivery.id,
        object="webhook_delivery",
        event_type=delivery.type,
        job_id=delivery.job_id,
        batch_id=delivery.batch_id,
        webhook_endpoint_id=delivery.endpoint_id,
        url=delivery.url,
        status=delivery.state,
        created_at=int(delivery.created_at),
        next_attempt_at=None if delivery.next_at is None else int(delivery.next_at),
        settled_at=None if delivery.settled_at is None else int(delivery.settled_at),
        payload=delivery.payload,
        attempts=[DeliveryTry(**vars(item)) for item in delivery.tries],
    )
