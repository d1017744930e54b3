"""/v1/keys: API keys, for whoever has `admin`: made, listed, changed and revoked as `media-server keys` does it."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from media_server import http_objects
from media_server.auth import Caller, Owner
from media_server.errors import Forbidden, InvalidRequest, NotFound
from media_server.http_body import read_body
from media_server.http_openapi import body_of, errors
from media_server.http_requests import ID_PATTERN, parse_body
from media_server.http_views import list_page
from media_server.jobs.database import Database
from media_server.key_objects import Key, KeyBody, KeyWithSecret, LimitsBody, key_object
from media_server.keys import ApiKey, change_limits, create_key, get_key, has_keys, list_keys, revoke_key

_MAX_PART_BYTES = 1 << 16


def _administer(owner: Owner) -> Caller:
    """Let in whoever has the scope `admin`; without any key that is whoever reaches a service on loopback."""
    if not owner.is_admin:
        raise Forbidden(
            "This key does not have the scope 'admin', which this request needs.",
            code="out_of_scope",
            param="authorization",
            rule="a key with the scope admin",
        )
    return owner


router = APIRouter(prefix="/v1/keys", tags=["keys"], dependencies=[Depends(_administer)])

KeyId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of an API key.")]


@router.post(
    "", response_model=KeyWithSecret, summary="Create an API key", responses=errors(409), openapi_extra=body_of(KeyBody)
)
async def create_api_key(request: Request, response: Response) -> KeyWithSecret:
    """Make a key. The answer alone tells it: it is kept as a hash.

    The first key closes the service to requests without one, so it must have `admin`: no other could make another.
    """
    db: Database = request.app.state.db
    async with read_body(request, max_part_bytes=_MAX_PART_BYTES) as values:
        body = parse_body(KeyBody, values)

    def create() -> tuple[ApiKey, str]:
        if "admin" not in body.scopes and not has_keys(db):
            rule = "admin among them, for the first key: no other could make another"
            raise InvalidRequest(
                f"scopes: {rule}; got {', '.join(body.scopes)}.", param="scopes", rule=rule, value=body.scopes
            )
        return create_key(db, body.name, scopes=body.scopes, limits=body.limits, lifetime_s=body.lifetime_s)

    key, text = await run_in_threadpool(create)
    response.headers["cache-control"] = "no-store"
    return KeyWithSecret(**key_object(key).model_dump(), key=text)


@router.get("", response_model=http_objects.ListPage[Key], summary="List API keys")
async def list_api_keys(
    request: Request,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, object]:
    """List every key there ever was, oldest first; revoked ones say since when."""
    db: Database = request.app.state.db

    def read() -> dict[str, object]:
        keys = list_keys(db)
        start = 0 if after is None else 1 + _place_of(keys, after)
        return list_page([key_object(key) for key in keys[start : start + limit]], len(keys) > start + limit)

    return await run_in_threadpool(read)


@router.get("/{key_id}", response_model=Key, summary="Retrieve an API key", responses=errors(404))
async def retrieve_api_key(request: Request, key_id: KeyId) -> Key:
    """Describe a key, a revoked one too."""
    keys = await run_in_threadpool(list_keys, request.app.state.db)
    for key in keys:
        if key.id == key_id:
            return key_object(key)
    raise NotFound(f"No key has the id {key_id!r}.", param="key_id", value=key_id)


@router.post(
    "/{key_id}",
    response_model=Key,
    summary="Change an API key's limits",
    responses=errors(404),
    openapi_extra=body_of(LimitsBody),
)
async def update_api_key(request: Request, key_id: KeyId) -> Key:
    """Give a key other limits, which hold from its next request on; `zero_retention` stays unless it is named."""
    db: Database = request.app.state.db
    async with read_body(request, max_part_bytes=_MAX_PART_BYTES) as values:
        limits = parse_body(LimitsBody, values).limits

    def change() -> ApiKey:
        wanted = limits
        if "zero_retention" not in limits.model_fields_set:
            wanted = limits.model_copy(update={"zero_retention": get_key(db, key_id).limits.zero_retention})
        return change_limits(db, key_id, wanted)

    return key_object(await run_in_threadpool(change))


@router.post("/{key_id}/revoke", response_model=Key, summary="Revoke an API key", responses=errors(404))
async def revoke_api_key(request: Request, key_id: KeyId) -> Key:
    """End a key's validity at once, its streams with it; its jobs go on, and its ledger stays."""
    return key_object(await run_in_threadpool(revoke_key, request.app.state.db, key_id))


def _place_of(keys: list[ApiKey], after: str) -> int:
    for place, key in enumerate(keys):
        if key.id == after:
            return place
    rule = "the id of a key"
    message = f"after: must be {rule}; none has the id {after!r}."
    raise InvalidRequest(message, param="after", rule=rule, value=after)
