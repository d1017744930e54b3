"""One trace from a request to the delivery of its webhook, read from the SDK's in-memory exporter."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from media_server.app import create_app
from media_server.artifacts.store import open_artifacts
from media_server.jobs import claims, outbox
from media_server.jobs.doorbell import make_celery
from media_server.jobs.spec import Claim, Result
from media_server.models.card import VideoCard
from media_server.models.registry import publish
from media_server.settings import Settings
from media_server.tracing import open_tracing
from media_server.webhooks.sending import Answer
from tests.fresh_database import open_migrated
from tests.workers.test_video_worker import CARD
from workers.delivery_worker import Courier
from workers.pool_worker import PoolContext, _handle
from workers.stages import StageClock

CALLER = "00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"
CANARY = "xylophone"


class Gone:
    """A receiver that answers 503."""

    async def send(self, *_: object, **__: object) -> Answer:
        return Answer(status=503)


def work(context: PoolContext, claim: Claim) -> None:
    clock = StageClock(context, claim)
    for at, (stage, step) in enumerate([("encode_prompt", 0), ("denoise", 0), ("denoise", 1), ("decode", 0)]):
        clock.enter(stage, step=step, at=float(at))
    clock.end(at=10.0)
    if claim.attempt == 1:
        raise RuntimeError(CANARY)
    assert claims.complete(context.db, claim, Result(gpu_seconds=1.0))


def test_spans_are_linked_from_request_to_delivery(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    settings = Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0")
    db = open_migrated(settings.database)
    publish(db, VideoCard.model_validate(CARD), "video-0@test:1")
    tracing = open_tracing(settings, "test", exporter)
    app = create_app(settings)
    with TestClient(app, base_url="http://127.0.0.1:8000") as http:
        own, app.state.tracing = app.state.tracing, tracing
        body = {"prompt": CANARY, "webhook_url": "https://example.com/hook"}
        answer = http.post("/v1/videos", json=body, headers={"traceparent": CALLER, "x-request-id": "mine"})
        assert answer.status_code == 200
        job_id = answer.json()["id"]
        # the application closes what it opened
        app.state.tracing = own
    context = PoolContext(
        settings, db, open_artifacts(settings), make_celery(settings), threading.Event(), "video", "w@test:1", tracing
    )
    for _ in range(2):
        claim = claims.claim_next(db, "video", "w@test:1", 20.0)
        assert claim is not None
        _handle(context, claim, work)
    (message,) = outbox.claim_due(db, "d", lease_s=60.0)
    sender: Any = Gone()
    asyncio.run(Courier(settings, db, "d", tracing)._deliver(sender, message))
    tracing.close()
    db.close()

    spans = exporter.get_finished_spans()
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
        context_of = span.get_span_context()
        assert context_of is not None and f"{context_of.trace_id:032x}" == "1a" * 16
        assert CANARY not in span.to_json()
    (request,) = by_name["POST /v1/videos"]
    assert request.parent is not None and f"{request.parent.span_id:016x}" == "2b" * 8
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200 and request.attributes["request_id"] == "mine"
    first, second = by_name["job video"]
    for attempt, (job, outcome) in enumerate([(first, "failed"), (second, "completed")], start=1):
        assert _is_child(job, request)
        assert job.attributes is not None
        assert (job.attributes["job_id"], job.attributes["attempt"]) == (job_id, attempt)
        assert job.attributes["outcome"] == outcome
        stages = [span for span in spans if _is_child(span, job)]
        assert [span.name for span in stages] == ["stage encode_prompt", "stage denoise", "stage decode"]
        lengths = [(span.end_time - span.start_time) / 1e9 for span in stages if span.end_time and span.start_time]
        assert lengths == pytest.approx([1.0, 2.0, 7.0], abs=1e-3)
    assert (first.status.is_ok, first.status.description) == (False, "internal_error")
    (delivery,) = by_name["webhook delivery"]
    assert _is_child(delivery, request) and not delivery.status.is_ok
    assert delivery.attributes is not None and delivery.attributes["job_id"] == job_id


def _is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    parent, context = span.parent, of.get_span_context()
    return parent is not None and context is not None and parent.span_id == context.span_id


def test_without_the_setting_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from media_server.settings import Settings; from media_server.tracing import open_tracing\n"
        "tracing = open_tracing(Settings(), 'x')\n"
        "with tracing.span('a', 'parent', job_id='b') as span:\n"
        "    span.set(a=1); span.rename('b'); span.fail('c'); assert span.traceparent == 'parent'\n"
        "tracing.record('a', None, start_s=0.0); tracing.close(); assert not tracing.is_on\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from media_server.errors import ConfigurationError

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"media-server\[tracing\]"):
        open_tracing(Settings(otlp_url="http://127.0.0.1:4318"), "x")
