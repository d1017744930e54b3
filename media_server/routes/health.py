"""/health: whether the process lives, and whether the service can take work; `ready` says what is missing."""

import asyncio
from collections.abc import Awaitable

import httpx
import redis.asyncio
from fastapi import APIRouter
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from media_server import http_objects as objects
from media_server.errors import NotReady, SchemaVersionError
from media_server.http_errors import ProblemResponse
from media_server.http_openapi import errors
from media_server.jobs.database import Database
from media_server.models.registry import Published, list_cards
from media_server.settings import ModelEntry, Settings
from media_server.text.engine import AsyncEngineClient, EngineUnavailable
from media_server.text.remote_writing import open_client

router = APIRouter(prefix="/health", tags=["health"])

_TIMEOUT_S = 5.0


@router.get("/live", response_model=objects.Health, summary="Is the process alive")
async def live() -> objects.Health:
    """Answer, which is all that a living process can do."""
    return objects.Health(status="ok", parts=[])


@router.get("/ready", response_model=objects.Health, summary="Can the service take work", responses=errors(503))
async def ready(request: Request) -> Response:
    """Say of each part whether it is up; 503 with the missing ones if one is not."""
    settings: Settings = request.app.state.settings
    checks = [
        _in_time("broker", _broker(request.app.state.redis, settings)),
        _in_time("database", run_in_threadpool(_database, request.app.state.db, settings)),
    ]
    if settings.engine_url is not None:
        checks.append(_in_time("engine", _engine_by_url(settings)))
    found = await asyncio.gather(*checks)
    parts = [part for group in found for part in group]
    missing = [part for part in parts if not part.is_ready]
    listed = [part.model_dump() for part in parts]
    if not missing:
        return JSONResponse({"status": "ok", "parts": listed})
    error = NotReady("Not ready: " + "; ".join(f"{part.name}: {part.detail}" for part in missing) + ".")
    return ProblemResponse({**error.to_body(), "parts": listed}, status_code=503, headers={"retry-after": "2"})


async def _in_time(name: str, check: Awaitable[list[objects.Part]]) -> list[objects.Part]:
    try:
        return await asyncio.wait_for(check, _TIMEOUT_S)
    except TimeoutError:
        return [objects.Part(name=name, is_ready=False, detail=f"no answer within {_TIMEOUT_S:g} s")]


async def _broker(client: redis.asyncio.Redis, settings: Settings) -> list[objects.Part]:
    """Say whether the broker answers, and whether it knows of our engines: one that came back empty does not yet."""
    try:
        await client.ping()
        served = await AsyncEngineClient(client).served_models()
    except (RedisError, OSError, EngineUnavailable):
        return [objects.Part(name="broker", is_ready=False, detail="does not answer")]
    parts = [objects.Part(name="broker", is_ready=True, detail="answers")]
    if settings.engine_url is None:
        parts += [_announced(entry, served) for entry in settings.models if entry.kind == "text"]
    return parts


def _announced(entry: ModelEntry, served: set[str]) -> objects.Part:
    is_ready = entry.name in served
    detail = "takes requests" if is_ready else "no engine has told the broker lately that it takes requests"
    return objects.Part(name=f"requests to {entry.name}", is_ready=is_ready, detail=detail)


async def _engine_by_url(settings: Settings) -> list[objects.Part]:
    try:
        async with open_client(settings) as client:
            answer = await client.get("models")
    except httpx.HTTPError:
        return [objects.Part(name="engine", is_ready=False, detail="the server at engine_url does not answer")]
    detail = f"the server at engine_url answers with status {answer.status_code}"
    return [objects.Part(name="engine", is_ready=answer.status_code == 200, detail=detail)]


def _database(db: Database, settings: Settings) -> list[objects.Part]:
    try:
        cards = {found.card.name: found for found in list_cards(db)}
    except SchemaVersionError as error:
        return [objects.Part(name="migrations", is_ready=False, detail=error.message.rstrip("."))]
    except SQLAlchemyError:
        return [objects.Part(name="database", is_ready=False, detail="does not answer")]
    return [
        objects.Part(name="migrations", is_ready=True, detail="up to date"),
        *(
            _model(entry, cards.get(entry.name))
            for entry in settings.models
            # an engine by URL has a check of its own
            if entry.kind == "video" or settings.engine_url is None
        ),
    ]


def _model(entry: ModelEntry, found: Published | None) -> objects.Part:
    """Say whether a worker carries a model: a video worker, or an engine."""
    noun = "engine" if entry.kind == "text" else "worker"
    name = f"{noun} {entry.name}"
    if found is None:
        return objects.Part(name=name, is_ready=False, detail=f"no {noun} of pool {entry.pool_name} has loaded it yet")
    if not found.is_live:
        return objects.Part(name=name, is_ready=False, detail=f"no {noun} of pool {entry.pool_name} was seen lately")
    return objects.Part(name=name, is_ready=True, detail=f"{found.workers} of pool {entry.pool_name}")
