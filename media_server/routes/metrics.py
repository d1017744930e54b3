"""/metrics: the service's figures for Prometheus, to whoever may read here, or to all by `metrics_open`."""

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from media_server.auth import identify
from media_server.http_openapi import errors
from media_server.metrics import read_figures
from media_server.settings import Settings
from media_server.text.engine import AsyncEngineClient

router = APIRouter(tags=["health"])

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PLAIN = {"schema": {"type": "string"}}


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format, or OpenMetrics where the request prefers it.",
            "content": {"text/plain": _PLAIN, "application/openmetrics-text": _PLAIN},
        },
        **errors(401),
    },
)
async def metrics(request: Request) -> Response:
    """Show what the service does: queues, jobs, seconds of steps and stages, memory, deliveries, requests, disks.

    It needs a key as every other GET does; with the setting `metrics_open` it needs none.
    """
    state = request.app.state
    settings: Settings = state.settings
    if not settings.metrics_open:
        await run_in_threadpool(identify, request)
    announced = await AsyncEngineClient(state.redis).announcements()
    folders = {"data": settings.data_dir}
    if state.artifacts.root is not None:
        folders["artifacts"] = state.artifacts.root
    await run_in_threadpool(state.recorder.flush)
    figures = await run_in_threadpool(read_figures, state.db, folders, announced)
    encode, content_type = _encoder(request.headers.get("accept", ""))
    return Response(await run_in_threadpool(encode, figures.registry()), headers={"content-type": content_type})


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    wanted = {part.partition(";")[0].strip() for part in accept.split(",")}
    if "application/openmetrics-text" in wanted:
        return partial(openmetrics.generate_latest, version="1.0.0"), _OPENMETRICS
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4
