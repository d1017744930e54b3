"""The HTTP application: what it holds open, in which order a request passes through it, and its routes.

A request passes: error of last resort, request context, quotas in headers, body limit, routing with its error
handlers, route. Routes are coroutines; whatever blocks (the store, files, decoding) runs in the thread pool.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import redis.asyncio
from anyio import CapacityLimiter
from celery import Celery
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from media_server.artifacts.store import open_artifacts
from media_server.auth import identify
from media_server.batches.objects import BODIES as BATCH_BODIES
from media_server.figures import Recorder
from media_server.http_admission import QuotaHeadersMiddleware, refuse_when_full
from media_server.http_context import RequestContextMiddleware
from media_server.http_errors import install_error_handlers
from media_server.http_events import EventFeed
from media_server.http_limits import BodyLimitMiddleware
from media_server.http_openapi import DESCRIPTION, TAGS, TITLE, describe
from media_server.http_requests import BODIES
from media_server.jobs.database import open_database
from media_server.jobs.doorbell import make_celery, ring
from media_server.key_objects import BODIES as KEY_BODIES
from media_server.routes import (
    batches,
    chat,
    files,
    films,
    health,
    jobs,
    keys,
    metrics,
    models,
    storyboards,
    tokens,
    usage,
    video_extensions,
    videos,
    webhook_deliveries,
    webhook_endpoints,
)
from media_server.settings import Settings
from media_server.text.metering import close_meters
from media_server.text.routing import Router
from media_server.tracing import open_tracing
from media_server.webhooks.objects import BODIES as WEBHOOK_BODIES
from media_server.webhooks.sending import Sender

# images that are decoded at a time: each may take some hundred MB
MAX_DECODERS = 2
# webhook tests that wait for their receivers at a time
MAX_WEBHOOK_TESTS = 8


def create_app(settings: Settings) -> FastAPI:
    """Build the application; what it needs is opened when it starts and closed when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        celery = make_celery(settings)
        bell = Bell(celery)
        app.state.celery = celery
        app.state.db = open_database(settings.database, ring=bell.ring)
        app.state.artifacts = open_artifacts(settings)
        app.state.recorder = Recorder(app.state.db)
        app.state.tracing = open_tracing(settings, "api")
        app.state.redis = redis.asyncio.from_url(settings.redis_url, socket_connect_timeout=3, socket_timeout=10)
        app.state.router = Router()
        app.state.event_feed = EventFeed(app.state.db)
        app.state.stopping = asyncio.Event()
        app.state.meters = set()
        app.state.decoders = CapacityLimiter(MAX_DECODERS)
        app.state.webhook_tests = Sender(allow_private=settings.allow_private_urls, max_at_once=MAX_WEBHOOK_TESTS)
        try:
            yield
        finally:
            begin_stop(app)
            await close_meters(app.state.meters)
            await app.state.event_feed.close()
            await app.state.webhook_tests.aclose()
            await app.state.redis.aclose()
            bell.close()
            celery.close()
            app.state.recorder.close()
            app.state.tracing.close()
            app.state.db.close()

    app = FastAPI(
        title=TITLE,
        version=_version(),
        description=DESCRIPTION,
        openapi_tags=TAGS,
        lifespan=lifespan,
        # the pages of FastAPI load their scripts from another host
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.state.settings = settings
    install_error_handlers(app)
    app.add_middleware(
        BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes, max_upload_bytes=settings.max_upload_bytes
    )
    app.add_middleware(QuotaHeadersMiddleware)
    app.add_middleware(RequestContextMiddleware)
    app.include_router(health.router)
    app.include_router(metrics.router)
    for module in (
        models,
        video_extensions,
        videos,
        films,
        jobs,
        chat,
        tokens,
        storyboards,
        batches,
        files,
        keys,
        usage,
        webhook_endpoints,
        webhook_deliveries,
    ):
        app.include_router(module.router, dependencies=[Depends(identify), Depends(refuse_when_full)])
    describe(app, bodies=[*BODIES, *WEBHOOK_BODIES, *BATCH_BODIES, *KEY_BODIES])
    return app


def begin_stop(app: FastAPI) -> None:
    """Have every request that waits for something be answered now: streams end, `Prefer: wait` shows the job."""
    app.state.stopping.set()
    app.state.event_feed.stop()


class Bell:
    """Rings doorbells away from the request: an answer never waits for the broker, and rings for one pool merge."""

    def __init__(self, celery: Celery) -> None:
        self._celery = celery
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bell")

    def ring(self, pool: str) -> None:
        """Ring a pool soon; what is lost, the sweeper rings again."""
        with self._lock:
            if pool in self._pending:
                return
            self._pending.add(pool)
        self._thread.submit(self._ring, pool)

    def close(self) -> None:
        """Ring what is pending, then stop."""
        self._thread.shutdown(wait=True)

    def _ring(self, pool: str) -> None:
        with self._lock:
            self._pending.discard(pool)
        ring(self._celery, pool)


def _operation_id(route: APIRoute) -> str:
    return route.name


def _version() -> str:
    try:
        return version("media-server")
    except PackageNotFoundError:
        return "0.1.0"
