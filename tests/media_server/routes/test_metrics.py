"""/metrics, read with Prometheus' own parser and held to jobs, messages and requests that are known."""

from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from media_server.app import create_app
from media_server.figures import HISTOGRAMS, HTTP_SECONDS, STEP_SECONDS, Counts, Recorder
from media_server.jobs import outbox
from media_server.jobs.tables import counters, jobs
from media_server.jobs.tables import outbox as messages
from media_server.keys import create_key
from media_server.models.registry import seen
from media_server.text.messages import Announcement

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(http: TestClient) -> Samples:
    """Read every sample: name without our prefix, labels in order."""
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("media_server_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def as_key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def sample(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, tuple(sorted(labels.items()))))


def shown(found: Samples, name: str, **labels: str) -> float:
    """Give a sample that must be there."""
    value = sample(found, name, **labels)
    assert value is not None, name
    return value


def test_figures_are_those_of_known_jobs(service: Any) -> None:
    service.completed_video()
    for _ in range(3):
        assert service.http.post("/v1/videos", json={"prompt": "waits"}).status_code == 200
    with service.db.write() as tx:
        first = sa.select(sa.func.min(jobs.c.id)).where(jobs.c.status == "queued").scalar_subquery()
        tx.conn.execute(jobs.update().where(jobs.c.id == first).values(created_at=tx.now() - 100))
    service.worker.failures.append("too large")
    service.worker.do(service.worker.claim("video"))
    found = scrape(service.http)
    assert sample(found, "queue_jobs", pool="video") == 2
    # the oldest is done, those that wait are some seconds old
    assert 0 <= shown(found, "queue_oldest_seconds", pool="video") < 60
    assert sample(found, "jobs", kind="video", status="queued") == 2
    assert sample(found, "jobs", kind="video", status="completed") == 1
    assert sample(found, "jobs_ended_total", kind="video", status="completed") == 1
    assert sample(found, "jobs_ended_total", kind="video", status="failed") == 1
    assert sample(found, "gpu_seconds_total") == 0.5
    with service.db.read() as tx:
        stored = tx.conn.scalar(sa.text("SELECT SUM(amount) FROM usage WHERE kind = 'storage_bytes'"))
    assert sample(found, "stored_bytes") == stored > 0
    assert shown(found, "disk_free_bytes", folder="data") > 0
    assert sample(found, "broker_up") == 0


def test_the_oldest_of_a_queue_has_an_age(service: Any) -> None:
    job_id = service.http.post("/v1/videos", json={"prompt": "waits"}).json()["id"]
    with service.db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == job_id).values(created_at=tx.now() - 100))
    age_s = sample(scrape(service.http), "queue_oldest_seconds", pool="video")
    assert age_s is not None and 100 <= age_s < 160
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    found = scrape(service.http)
    # a queue that is empty says so
    assert sample(found, "queue_jobs", pool="video") == 0
    assert sample(found, "queue_oldest_seconds", pool="video") == 0


def test_requests_are_counted_by_template(service: Any) -> None:
    for name in ("video_a", "video_b", "video_c"):
        service.http.get(f"/v1/videos/{name}", headers={"x-request-id": "mine"})
    service.http.get("/nowhere/canary")
    service.http.request("BREW", "/v1/videos")
    found = scrape(service.http)
    about = {"route": "/v1/videos/{video_id}", "method": "GET", "status": "404"}
    assert sample(found, "http_request_seconds_count", **about) == 3
    assert sample(found, "http_request_seconds_bucket", **about, le="+Inf") == 3
    assert shown(found, "http_request_seconds_sum", **about) > 0
    assert sample(found, "http_request_seconds_count", route="none", method="GET", status="404") == 1
    assert (
        sum(value for (name, labels), value in found.items() if ("method", "other") in labels and "count" in name) == 1
    )
    # nothing that a caller has chosen is a label
    assert "canary" not in str(found) and "video_a" not in str(found) and "BREW" not in str(found)


def test_buckets_hold_all_below_them(service: Any) -> None:
    counts = Counts()
    for seconds in (0.02, 0.3, 0.30001, 5000.0):
        counts.observe(STEP_SECONDS, "tiny-wan", seconds=seconds)
    service.db.add_counts(counts.amounts)
    found = scrape(service.http)
    bounds = {"0.01": 0, "0.03": 1, "0.1": 1, "0.3": 2, "1": 3, "3600": 3, "+Inf": 4}
    for bound, count in bounds.items():
        assert sample(found, "step_seconds_bucket", model="tiny-wan", le=bound) == count, bound
    assert sample(found, "step_seconds_sum", model="tiny-wan") == pytest.approx(5000.62001)


def test_several_api_processes_show_the_same(service: Any) -> None:
    """Two applications on one database: what either has answered, both count."""
    with TestClient(create_app(service.settings), base_url="http://127.0.0.1:8000") as other:
        for http in (service.http, other, other):
            http.get("/v1/models")
        other.app.state.recorder.flush()  # type: ignore[attr-defined]
        about = {"route": "/v1/models", "method": "GET", "status": "200"}
        assert sample(scrape(service.http), "http_request_seconds_count", **about) == 3
        assert sample(scrape(other), "http_request_seconds_count", **about) == 3


def test_what_cannot_be_written_now_is_written_later(service: Any) -> None:
    recorder = Recorder(service.db)
    recorder.observe(HTTP_SECONDS, "/a", "GET", "200", seconds=1.0)
    add_counts, service.db.add_counts = service.db.add_counts, _refuse
    recorder.flush()
    service.db.add_counts = add_counts
    recorder.close()
    found = scrape(service.http)
    assert sample(found, "http_request_seconds_count", route="/a", method="GET", status="200") == 1


def _refuse(*_: object) -> None:
    raise sa.exc.OperationalError("locked", {}, Exception())


def test_workers_and_engines_say_what_they_hold(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"memory_bytes": 3e9, "memory_peak_bytes": 7e9, "memory_total_bytes": 8e10}
    seen(service.db, "scripted@test:1", figures)
    living = [
        Announcement(name="engine-0@a", instance="x", model="m", running=2, waiting=5, kv_tokens=100, kv_used_tokens=7)
    ]
    counted = {"greedy_choices": 90, "near_ties": 4, "second_tries": 3, "collapses": 1}
    living[0] = living[0].model_copy(update=counted)
    living.append(Announcement(name="engine-1@b", instance="y", model="m"))

    async def announcements(_: object) -> list[Announcement]:
        return living

    monkeypatch.setattr("media_server.text.engine.AsyncEngineClient.announcements", announcements)
    found = scrape(service.http)
    worker = {"worker": "scripted@test", "pool": "video", "model": "tiny-wan"}
    for name, value in figures.items():
        assert sample(found, f"worker_{name}", **worker) == value
    assert sample(found, "broker_up") == 1
    assert sample(found, "engine_running", engine="engine-0@a", model="m") == 2
    assert sample(found, "engine_waiting", engine="engine-0@a", model="m") == 5
    assert sample(found, "engine_kv_used_tokens", engine="engine-0@a", model="m") == 7
    for name, number in counted.items():
        assert sample(found, f"engine_{name}", engine="engine-0@a", model="m") == number
    # one that does not say is not shown as empty
    assert sample(found, "engine_running", engine="engine-1@b", model="m") == 0
    assert sample(found, "engine_kv_used_tokens", engine="engine-1@b", model="m") is None
    with service.db.write() as tx:
        tx.conn.execute(sa.text("UPDATE models SET seen_at = seen_at - 60"))
    assert sample(scrape(service.http), "worker_up", **worker) is None


def test_deliveries_are_counted(service: Any) -> None:
    for _ in range(3):
        service.http.post("/v1/videos", json={"prompt": "a", "webhook_url": "https://example.com/hook"})
    service.worker.run_all()
    with service.db.write() as tx:
        tx.conn.execute(messages.update().values(next_at=tx.now() - 50, created_at=tx.now() - 50))
    assert shown(scrape(service.http), "webhook_overdue_seconds") >= 50
    one, two, three = outbox.claim_due(service.db, "w", lease_s=60.0)
    for message, error, retry_in_s in ((one, None, None), (two, "HTTP 500", 5.0), (three, "HTTP 410", None)):
        outbox.settle(service.db, message, "w", started_at=0.0, duration_s=0.2, error=error, retry_in_s=retry_in_s)
    found = scrape(service.http)
    for outcome in ("delivered", "retry", "dead"):
        assert sample(found, "webhook_tries_total", outcome=outcome) == 1
        assert sample(found, "webhook_try_seconds_bucket", outcome=outcome, le="0.25") == 1
    for state in ("pending", "delivered", "dead"):
        assert sample(found, "webhook_messages", state=state) == 1
    assert sample(found, "webhook_lag_seconds_count") == 1
    assert 50 <= shown(found, "webhook_lag_seconds_sum") < 110


def test_who_may_read(service: Any) -> None:
    _, reader = create_key(service.db, "reader", scopes=["read"])
    _, submitter = create_key(service.db, "submitter", scopes=["submit"])
    assert service.http.get("/metrics").status_code == 401
    assert service.http.get("/metrics", headers=as_key(submitter)).status_code == 403
    assert service.http.get("/metrics", headers=as_key(reader)).status_code == 200
    opened = service.settings.model_copy(update={"metrics_open": True})
    with TestClient(create_app(opened), base_url="http://127.0.0.1:8000") as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/videos").status_code == 401


def test_openmetrics_where_it_is_preferred(service: Any) -> None:
    service.completed_video()
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = service.http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {
        family.name
        for family in parse_openmetrics(answer.text)  # type: ignore[no-untyped-call]
    } >= {"media_server_jobs_ended"}
    for broken in ("application/openmetrics-text;version=x", "text/plain;version=", ";;,"):
        assert service.http.get("/metrics", headers={"accept": broken}).status_code == 200


def test_what_a_rolled_back_transaction_counted_is_not_shown(service: Any) -> None:
    store_before = scrape(service.http)
    with pytest.raises(ZeroDivisionError), service.db.write() as tx:
        tx.counts.observe(STEP_SECONDS, "x", seconds=1.0)
        raise ZeroDivisionError
    assert sample(scrape(service.http), "step_seconds_count", model="x") is None
    assert sample(store_before, "step_seconds_count", model="x") is None


def test_labels_are_few(service: Any) -> None:
    """Many jobs, keys and labels of callers make no more series."""
    sizes = []
    for number in range(3):
        for index in range(2):
            video = service.completed_video(label=f"label-{number}-{index}", metadata={"n": str(index)})
            assert service.http.delete(f"/v1/videos/{video['id']}").status_code == 200
        sizes.append(len(scrape(service.http)))
    # the first scrape is counted by the second
    assert sizes[1] == sizes[2]
    with service.db.read() as tx:
        for labels in tx.conn.scalars(sa.select(counters.c.labels).distinct()):
            assert "label-" not in labels and "video_" not in labels.replace("{video_id}", "")


def test_bounds_rise() -> None:
    for histogram in HISTOGRAMS:
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
        assert histogram.part_of(histogram.bounds[0]) == f"{histogram.bounds[0]:g}"
        assert histogram.part_of(histogram.bounds[-1] + 1) == "+Inf"
