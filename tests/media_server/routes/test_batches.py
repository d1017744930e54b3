"""Batches of clips over the real application and store, with the real batch worker and a scripted video worker."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from media_server.app import create_app
from media_server.batches import running
from media_server.ids import new_id
from media_server.jobs import claims, store
from media_server.jobs.idempotency import HeldLine, StillAccepting
from media_server.jobs.spec import JobSpec
from media_server.jobs.tables import batch_lines, batches, garbage, jobs
from tests.media_server.routes.batching import (
    PENDING,
    batch_worker,
    count_jobs,
    done,
    ended,
    get,
    line,
    records,
    start,
    wait_until,
)

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


@pytest.fixture
def app(working: Any) -> FastAPI:
    return create_app(working.settings)


def test_the_openai_package_runs_a_batch_of_clips(live: str, working: Any) -> None:
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="anything", max_retries=0)
    lines = [line("one", seed=1), line("two", seed=2), line("bad", size="161x96")]
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(content), "in.jsonl", "batch")
    assert uploaded.expires_at is not None and uploaded.expires_at - uploaded.created_at == 30 * 86400
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/videos", completion_window="24h", metadata={"k": "v"}
    )
    assert (batch.status, batch.metadata, batch.object) == ("validating", {"k": "v"}, "batch")
    assert batch.expires_at is not None and batch.expires_at - batch.created_at == 86400
    assert client.batches.list().data == [batch]
    with batch_worker(working):
        wait_until(lambda: client.batches.retrieve(batch.id).status not in PENDING)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.completed_at and batch.in_progress_at and batch.finalizing_at
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.output_file_id and batch.error_file_id
    made = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [record["custom_id"] for record in made] == ["one", "two"]
    for number, record in enumerate(made, 1):
        assert record["error"] is None and record["id"].startswith("batch_req_")
        response = record["response"]
        assert (response["status_code"], response["request_id"]) == (200, f"{batch.id}:{number}")
        video = client.videos.retrieve(response["body"]["id"])
        assert (video.status, response["body"]["seed"]) == ("completed", number)
        assert response["body"] == video.model_dump(mode="json") | response["body"]
        assert client.videos.download_content(video.id).read() == working.worker.clip
    (failed,) = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert (failed["custom_id"], failed["line"], failed["response"]["status_code"]) == ("bad", 3, 400)
    problem = failed["response"]["body"]
    assert (problem["param"], problem["value"], problem["error"]["param"]) == ("size", "161x96", "size")
    assert problem["rule"]
    names = {file.id: (file.purpose, file.filename) for file in client.files.list()}
    assert names[batch.output_file_id] == ("batch_output", f"{batch.id}_output.jsonl")
    assert [file.id for file in client.files.list(purpose="batch")] == [uploaded.id]
    assert client.files.delete(uploaded.id).model_dump() == {"id": uploaded.id, "deleted": True, "object": "file"}
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(uploaded.id)
    # lines' words are in the files alone
    with working.db.read() as tx:
        assert tx.conn.execute(sa.select(batch_lines)).all() == []
        # the input file's bytes wait for the sweeper, nothing else does
        waiting = set(tx.conn.scalars(sa.select(garbage.c.prefix)))
    assert f"{uploaded.id}/" in waiting and not any(batch.output_file_id in prefix for prefix in waiting)
    with pytest.raises(openai.ConflictError, match="nothing left to cancel"):
        client.batches.cancel(batch.id)


def test_lines_that_are_no_requests_and_jobs_that_fail_are_in_the_error_file(working: Any) -> None:
    working.worker.failures = ["no memory"]
    batch_id = start(working, b"{", line("first"), line("first"), line("film", url="/v1/films"))
    with batch_worker(working):
        batch = ended(working, batch_id)
    assert batch["request_counts"] == {"total": 4, "completed": 0, "failed": 4}
    assert batch["status"] == "completed" and batch["output_file_id"] is None
    broken, failed, repeated, elsewhere = records(working, batch["error_file_id"])
    assert [item["line"] for item in (broken, failed, repeated, elsewhere)] == [1, 2, 3, 4]
    assert (broken["custom_id"], broken["error"]["rule"]) == (None, "RFC 8259 JSON")
    assert failed["error"] == {"code": "out_of_memory", "message": "no memory"}
    assert failed["response"]["body"]["status"] == "failed" and failed["response"]["status_code"] == 200
    assert (repeated["error"]["param"], repeated["error"]["value"]) == ("custom_id", "first")
    assert (elsewhere["error"]["param"], elsewhere["error"]["value"]) == ("url", "/v1/films")


def test_a_file_without_requests_or_with_too_many_fails_its_batch(service: Any) -> None:
    empty = start(service, b"\n \n")
    settings = service.settings.model_copy(update={"max_batch_lines": 2})
    service.settings = settings
    many = start(service, line("a"), line("b"), b"", line("c"))
    with batch_worker(service):
        found = [ended(service, batch_id) for batch_id in (empty, many)]
    assert [batch["status"] for batch in found] == ["failed", "failed"] and all(b["failed_at"] for b in found)
    (first,), (second,) = [batch["errors"]["data"] for batch in found]
    assert (first["code"], first["param"], first["line"]) == ("empty_file", "input_file_id", None)
    assert (second["code"], second["line"]) == ("too_many_lines", 4) and "more than 2" in second["message"]


@pytest.mark.parametrize("has_died", [False, True])
def test_a_batch_goes_on_where_its_worker_left_it(service: Any, has_died: bool) -> None:
    batch_id = start(service, *(line(f"n{index}") for index in range(6)))
    with batch_worker(service):
        # as many as are sent at a time, each of the lowest priority
        wait_until(lambda: count_jobs(service) == 4)
    with service.db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.priority))) == {-50}
        assert tx.conn.scalar(sa.select(batches.c.lease_owner)) is None
    if has_died:
        # one line was on its way, its lease is another's that has lapsed
        with service.db.write() as tx:
            tx.conn.execute(batches.update().values(lease_owner="dead@test:1", lease_until=tx.now() - 1))
            last = sa.and_(batch_lines.c.number == 6)
            tx.conn.execute(batch_lines.update().where(last).values(state="running"))
    service.worker.run_all()
    with batch_worker(service, "batches@test:2"):
        batch = done(service, batch_id)
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0} and count_jobs(service) == 6
    made = records(service, batch["output_file_id"])
    assert [record["custom_id"] for record in made] == [f"n{index}" for index in range(6)]
    assert len({record["response"]["body"]["id"] for record in made}) == 6


def test_a_line_makes_one_job_whoever_sends_it(service: Any) -> None:
    batch_id = start(service, line("a"))
    (batch,) = running.claim(service.db, "w1", lease_s=60.0, room=9)
    running.ingest(service.db, batch, "w1", list(_specs()))
    assert running.begin_lines(service.db, batch_id, "w1", 9)
    held = HeldLine(batch_id, 1, "w1")

    def submit(held: HeldLine) -> str:
        spec = JobSpec(kind="video", pool="video", id=new_id("video"), idempotency_key=held)
        return store.submit(service.db, spec).id

    made = submit(held)
    for other in (held, HeldLine(batch_id, 1, "w2"), HeldLine(batch_id, 2, "w1")):
        with pytest.raises(StillAccepting):
            submit(other)
    assert count_jobs(service) == 1
    # a worker that lost its lease can neither end the line nor make another job
    with service.db.write() as tx:
        tx.conn.execute(batches.update().values(lease_until=0.0))
    assert running.claim(service.db, "w2", lease_s=60.0, room=9)
    with pytest.raises(running.BatchLost):
        running.end_line(service.db, batch_id, "w1", 1, "{}", is_error=False)
    with pytest.raises(running.BatchLost):
        running.beat(service.db, batch_id, "w1", lease_s=60.0)
    (going_on,) = running.lines_with_jobs(service.db, batch_id, has_ended=False)
    assert going_on.job_id == made and running.begin_lines(service.db, batch_id, "w2", 9) == []
    assert running.end_line(service.db, batch_id, "w2", 1, "{}", is_error=False)
    assert not running.end_line(service.db, batch_id, "w2", 1, "{}", is_error=False)
    assert get(service, batch_id)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def _specs() -> Iterator[Any]:
    from media_server.batches.lines import read_lines

    yield from read_lines(iter([json.dumps(line("a")).encode()]), "/v1/videos", max_body_bytes=1000)


def test_cancel_keeps_what_was_made_and_ends_the_rest(service: Any) -> None:
    batch_id = start(service, *(line(f"n{index}") for index in range(8)))
    with batch_worker(service):
        wait_until(lambda: count_jobs(service) == 4)
        first = service.worker.claim("video")
        service.worker.do(first)
        second = service.worker.claim("video")
        answer = service.http.post(f"/v1/batches/{batch_id}/cancel")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelling" and answer.json()["cancelling_at"]
        # a running clip is asked to stop, and the batch waits until it has
        wait_until(lambda: store.get(service.db, second.job.id).cancel_requested_at)
        assert get(service, batch_id)["status"] == "cancelling"
        assert claims.confirm_cancel(service.db, second)
        batch = ended(service, batch_id)
    assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["completed_at"] is None
    assert batch["request_counts"] == {"total": 8, "completed": 1, "failed": 7}
    (made,) = records(service, batch["output_file_id"])
    assert made["response"]["body"]["id"] == first.job.id
    failed = records(service, batch["error_file_id"])
    assert {record["error"]["code"] for record in failed} == {"batch_cancelled"} and len(failed) == 7
    # a fifth may have been sent when the first had ended
    assert [record["response"] is None for record in failed].count(True) in (3, 4)


def test_a_batch_past_its_window_expires(service: Any) -> None:
    batch_id = start(service, *(line(f"n{index}") for index in range(6)), completion_window="1m")
    with batch_worker(service):
        wait_until(lambda: count_jobs(service) == 4)
        with service.db.write() as tx:
            tx.conn.execute(batches.update().values(expires_at=tx.now() - 1))
        batch = ended(service, batch_id)
    assert batch["status"] == "expired" and batch["expired_at"] and batch["output_file_id"] is None
    failed = records(service, batch["error_file_id"])
    assert {record["error"]["code"] for record in failed} == {"batch_expired"} and len(failed) == 6
    with service.db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.status))) == {"cancelled"}


def test_a_job_that_is_deleted_or_cancelled_ends_its_line(service: Any) -> None:
    batch_id = start(service, line("gone"), line("stopped"))
    with batch_worker(service):
        wait_until(lambda: count_jobs(service) == 2)
        with service.db.read() as tx:
            query = sa.select(batch_lines.c.job_id).order_by(batch_lines.c.number)
            gone, stopped = tx.conn.scalars(query).all()
        service.http.delete(f"/v1/videos/{gone}")
        service.http.post(f"/v1/jobs/{stopped}/cancel")
        batch = ended(service, batch_id)
    first, second = records(service, batch["error_file_id"])
    assert (first["error"]["code"], first["response"]) == ("job_deleted", None)
    assert (second["error"]["code"], second["response"]["body"]["status"]) == ("job_cancelled", "cancelled")


def test_storyboards_and_films_are_lines_too(working: Any) -> None:
    for endpoint, kind in (("/v1/storyboards", "storyboard"), ("/v1/films", "film")):
        item = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"idea": "a ball", "shots": 2}}
        batch_id = start(working, item, endpoint=endpoint)
        with batch_worker(working):
            batch = ended(working, batch_id)
        (record,) = records(working, batch["output_file_id"])
        assert record["response"]["body"]["object"] == kind
        assert record["response"]["body"]["status"] == "completed"
