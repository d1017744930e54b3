"""Batches of clips over the real application and store, with the real batch worker and a scripted video worker."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
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
from media_server.jobs.tables import batch_lines, batches, files, garbage, jobs, tallies
from media_server.keys import create_key, revoke_key
from media_server.limits import KeyLimits
from workers.batch_worker import serve
from workers.sweeper import sweep_once

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

PENDING = ("validating", "in_progress", "finalizing", "cancelling")
WAIT_S = 60.0


@contextlib.contextmanager
def batch_worker(service: Any, name: str = "batches@test:1") -> Iterator[None]:
    """Run the batch worker in a thread of its own; stopped in order at the end."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        ready.set()
        loop.run_until_complete(serve(service.settings, name, stopping))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()


def wait_until(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def line(custom_id: str, url: str = "/v1/videos", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a red ball", **body}}


def upload(service: Any, *lines: Any, headers: dict[str, str] | None = None) -> str:
    content = b"\n".join(item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines)
    answer = service.http.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def start(service: Any, *lines: Any, headers: dict[str, str] | None = None, **fields: Any) -> str:
    file_id = upload(service, *lines, headers=headers)
    body = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h", **fields}
    answer = service.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    batch_id: str = answer.json()["id"]
    return batch_id


def get(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    batch: dict[str, Any] = service.http.get(f"/v1/batches/{batch_id}", headers=headers).json()
    return batch


def ended(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    def find() -> dict[str, Any] | None:
        batch = get(service, batch_id, headers)
        return None if batch["status"] in PENDING else batch

    batch: dict[str, Any] = wait_until(find)
    return batch


def done(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Do every job that comes, until the batch has ended."""

    def find() -> dict[str, Any] | None:
        service.worker.run_all()
        batch = get(service, batch_id, headers)
        return None if batch["status"] in PENDING else batch

    batch: dict[str, Any] = wait_until(find)
    return batch


def records(service: Any, file_id: str | None, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    answer = service.http.get(f"/v1/files/{file_id}/content", headers=headers)
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    return [json.loads(text) for text in answer.text.splitlines()]


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
        wait_until(lambda: _count_jobs(service) == 4)
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
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0} and _count_jobs(service) == 6
    made = records(service, batch["output_file_id"])
    assert [record["custom_id"] for record in made] == [f"n{index}" for index in range(6)]
    assert len({record["response"]["body"]["id"] for record in made}) == 6


def _count_jobs(service: Any) -> int:
    with service.db.read() as tx:
        return int(tx.conn.scalar(sa.select(sa.func.count()).select_from(jobs)) or 0)


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
    assert _count_jobs(service) == 1
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
        wait_until(lambda: _count_jobs(service) == 4)
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
        wait_until(lambda: _count_jobs(service) == 4)
        with service.db.write() as tx:
            tx.conn.execute(batches.update().values(expires_at=tx.now() - 1))
        batch = ended(service, batch_id)
    assert batch["status"] == "expired" and batch["expired_at"] and batch["output_file_id"] is None
    failed = records(service, batch["error_file_id"])
    assert {record["error"]["code"] for record in failed} == {"batch_expired"} and len(failed) == 6
    with service.db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.status))) == {"cancelled"}


def key_of(service: Any, name: str, **options: Any) -> tuple[str, dict[str, str]]:
    key, text = create_key(service.db, name, **options)
    return key.id, {"authorization": f"Bearer {text}"}


def test_a_batch_belongs_to_its_key_and_its_lines_have_its_scopes_and_quotas(working: Any) -> None:
    limits = KeyLimits(queued_jobs=4, work_per_day=40e6)
    key_id, mine = key_of(working, "mine", limits=limits)
    _, other = key_of(working, "other")
    _, admin = key_of(working, "boss", scopes=("admin",))
    _, reader = key_of(working, "reader", scopes=("read",))
    # each takes 8 x 160 x 96 x 33: nine fit into a day, and the tenth alone is more than one
    lines = [line("huge", num_frames=57 * 4, num_inference_steps=50), *(line(f"n{i}") for i in range(3))]
    batch_id = start(working, *lines, headers=mine)
    file_id = get(working, batch_id, mine)["input_file_id"]
    for path in (f"/v1/batches/{batch_id}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert working.http.get(path, headers=other).status_code == 404
        assert working.http.get(path, headers=admin).status_code == 200
        assert working.http.get(path).status_code == 401
    assert working.http.post(f"/v1/batches/{batch_id}/cancel", headers=other).status_code == 404
    assert working.http.delete(f"/v1/files/{file_id}", headers=other).status_code == 404
    stolen = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h"}
    refused = working.http.post("/v1/batches", json=stolen, headers=other)
    assert refused.status_code == 404 and refused.json()["param"] == "input_file_id"
    assert working.http.post("/v1/batches", json=stolen, headers=reader).status_code == 403
    for path in ("/v1/batches", "/v1/files"):
        assert working.http.get(path, headers=other).json()["data"] == []
        assert len(working.http.get(path, headers=admin).json()["data"]) == 1
        after = {"after": batch_id if "batches" in path else file_id}
        assert working.http.get(path, params=after, headers=other).status_code == 400
    # who deletes what is read breaks it
    assert working.http.delete(f"/v1/files/{file_id}", headers=mine).status_code == 409
    with batch_worker(working):
        batch = ended(working, batch_id, mine)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    (huge,) = records(working, batch["error_file_id"], mine)
    assert (huge["custom_id"], huge["response"]["status_code"]) == ("huge", 403)
    assert huge["response"]["body"]["error"]["code"] == "over_work_quota"
    with working.db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.owner_key_id))) == {key_id}
        kept = tx.conn.scalar(sa.select(tallies.c.amount).where(tallies.c.kind == "storage_bytes"))
        stored = tx.conn.execute(sa.select(files.c.size_bytes)).scalars().all()
    assert kept is not None and kept > sum(stored) and len(stored) == 3


def test_a_line_waits_for_a_quota_that_comes_back_and_leaves_room_for_others(service: Any) -> None:
    _, mine = key_of(service, "mine", limits=KeyLimits(queued_jobs=2))
    batch_id = start(service, *(line(f"n{index}") for index in range(3)), headers=mine)
    with batch_worker(service):
        wait_until(lambda: _count_jobs(service) == 1)
        # half of what may wait is the batch's: a request that somebody waits for is taken, and goes first
        answer = service.http.post("/v1/videos", json={"prompt": "now"}, headers=mine)
        assert answer.status_code == 200
        claim = service.worker.claim("video")
        assert claim.job.id == answer.json()["id"]
        service.worker.do(claim)
        batch = done(service, batch_id, mine)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


def test_a_revoked_key_ends_its_lines(service: Any) -> None:
    _, mine = key_of(service, "mine")
    _, admin = key_of(service, "boss", scopes=("admin",))
    batch_id = start(service, line("a"), headers=mine)
    revoke_key(service.db, "mine")
    with batch_worker(service):
        batch = ended(service, batch_id, admin)
    (failed,) = records(service, batch["error_file_id"], admin)
    assert failed["response"]["status_code"] == 401 and "revoked" in failed["response"]["body"]["detail"]
    assert _count_jobs(service) == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "25"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
        ({"wings": 2}, "wings"),
    ],
)
def test_what_a_batch_may_not_be(service: Any, fields: dict[str, Any], param: str) -> None:
    file_id = upload(service, line("a"))
    body = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h", **fields}
    before = service.contents()
    answer = service.http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["param"]) == (400, param)
    assert service.contents() == before


def test_what_a_file_may_not_be(service: Any) -> None:
    before = service.contents()
    for data, files_, status, param in (
        ({"purpose": "vision"}, {"file": ("a", b"x")}, 400, "purpose"),
        ({"purpose": "batch"}, {"other": ("a", b"x")}, 400, "file"),
        ({"purpose": "batch", "file": "text"}, None, 400, "file"),
        ({"purpose": "batch"}, {"file": ("n" * 256, b"x")}, 400, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, {"file": ("a", b"x")}, 400, "expires_after.anchor"),
        ({"purpose": "batch"}, {"file": ("a", b"x" * (5 << 20))}, 413, None),
    ):
        answer = service.http.post("/v1/files", data=data, files=files_)
        assert (answer.status_code, answer.json().get("param")) == (status, param), answer.text
    assert service.contents() == before
    _, poor = key_of(service, "poor", limits=KeyLimits(storage_bytes=10))
    before = service.contents()
    answer = service.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * 11)}, headers=poor)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "storage_quota")
    # only the tally that a quota is held to may have been touched
    assert service.contents()[1] == before[1]


def test_a_name_is_only_shown_and_a_file_expires(service: Any) -> None:
    answer = service.http.post(
        "/v1/files",
        data={"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
        files={"file": ("../../etc/passwd", b"{}")},
    ).json()
    assert answer["filename"] == ".._.._etc_passwd" and answer["expires_at"] - answer["created_at"] == 3600
    assert service.contents()[1] >= {f"{answer['id']}/content.jsonl"}
    sweep_once(service.settings, service.db, service.artifacts)
    assert service.http.get(f"/v1/files/{answer['id']}").status_code == 200
    with service.db.write() as tx:
        tx.conn.execute(files.update().values(expires_at=tx.now() - 1))
    sweep_once(service.settings, service.db, service.artifacts)
    assert service.http.get(f"/v1/files/{answer['id']}").status_code == 404
    sweep_once(service.settings, service.db, service.artifacts)
    assert not any(answer["id"] in path for path in service.contents()[1])


def test_an_old_batch_goes_and_its_files_by_their_own_time(working: Any) -> None:
    batch_id = start(working, line("a"))
    with batch_worker(working):
        batch = ended(working, batch_id)
    sweep_once(working.settings, working.db, working.artifacts)
    assert get(working, batch_id) == batch
    with working.db.write() as tx:
        tx.conn.execute(batches.update().values(ended_at=tx.now() - 31 * 86400))
    sweep_once(working.settings, working.db, working.artifacts)
    assert working.http.get(f"/v1/batches/{batch_id}").status_code == 404
    assert records(working, batch["output_file_id"])


def test_the_same_request_makes_one_file_and_one_batch(service: Any) -> None:
    headers = {"idempotency-key": "k1"}
    first = upload(service, line("a"), headers=headers)
    assert upload(service, line("a"), headers=headers) == first
    body = {"input_file_id": first, "endpoint": "/v1/videos", "completion_window": "24h"}
    again = [service.http.post("/v1/batches", json=body, headers={"idempotency-key": "k2"}) for _ in range(2)]
    assert again[0].json() == again[1].json() and again[1].headers["idempotent-replayed"] == "true"
    other = service.http.post("/v1/batches", json={**body, "metadata": {"a": "b"}}, headers={"idempotency-key": "k2"})
    assert other.status_code == 422
    assert len(service.http.get("/v1/batches").json()["data"]) == 1


def test_pages_of_batches_and_files(service: Any) -> None:
    made = [start(service, line("a")) for _ in range(3)][::-1]
    for path, ids in (
        ("/v1/batches", made),
        ("/v1/files", [get(service, batch_id)["input_file_id"] for batch_id in made]),
    ):
        page = service.http.get(path, params={"limit": 2}).json()
        assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:2], True)
        rest = service.http.get(path, params={"limit": 2, "after": page["last_id"]}).json()
        assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2:], False)
        assert service.http.get(path, params={"after": "nobody"}).status_code == 400
    oldest = service.http.get("/v1/files", params={"order": "asc", "limit": 1}).json()["data"]
    assert [item["id"] for item in oldest] == [get(service, made[-1])["input_file_id"]]


def test_a_job_that_is_deleted_or_cancelled_ends_its_line(service: Any) -> None:
    batch_id = start(service, line("gone"), line("stopped"))
    with batch_worker(service):
        wait_until(lambda: _count_jobs(service) == 2)
        with service.db.read() as tx:
            query = sa.select(batch_lines.c.job_id).order_by(batch_lines.c.number)
            gone, stopped = tx.conn.scalars(query).all()
        service.http.delete(f"/v1/videos/{gone}")
        service.http.post(f"/v1/jobs/{stopped}/cancel")
        batch = ended(service, batch_id)
    first, second = records(service, batch["error_file_id"])
    assert (first["error"]["code"], first["response"]) == ("job_deleted", None)
    assert (second["error"]["code"], second["response"]["body"]["status"]) == ("job_cancelled", "cancelled")


def test_one_owner_keeps_no_other_waiting(service: Any) -> None:
    _, mine = key_of(service, "mine")
    _, other = key_of(service, "other")
    many = [start(service, line("a"), headers=mine) for _ in range(6)]
    one = start(service, line("a"), headers=other)
    taken = running.claim(service.db, "w", lease_s=60.0, room=9)
    assert [batch.id for batch in taken] == [*many[: running.MAX_PER_OWNER], one]
    assert running.claim(service.db, "w", lease_s=60.0, room=9) == []
    assert claims.end_leases(service.db, "w") == 5
    assert len(running.claim(service.db, "w2", lease_s=60.0, room=2)) == 2


def test_storyboards_and_films_are_lines_too(working: Any) -> None:
    for endpoint, kind in (("/v1/storyboards", "storyboard"), ("/v1/films", "film")):
        item = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"idea": "a ball", "shots": 2}}
        batch_id = start(working, item, endpoint=endpoint)
        with batch_worker(working):
            batch = ended(working, batch_id)
        (record,) = records(working, batch["output_file_id"])
        assert record["response"]["body"]["object"] == kind
        assert record["response"]["body"]["status"] == "completed"


