"""/v1/storyboards with the real worker behind it: job, stream, cancel, drain, an engine that goes away or is late."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from media_server.artifacts.store import open_artifacts
from media_server.jobs import store
from media_server.jobs.claims import claim_next
from media_server.jobs.database import open_database
from media_server.jobs.doorbell import make_celery
from media_server.jobs.events import read_after
from media_server.jobs.tables import usage
from media_server.text.messages import engine_key
from tests.media_server.text.conftest import TextService
from workers import storyboard_worker
from workers.pool_worker import PoolContext
from workers.storyboard_worker import Handler

IDEA = {"idea": "a red ball finds a blue friend", "seconds": 5, "shots": 2, "seed": 7}


@pytest.fixture
def context(service: TextService) -> Iterator[PoolContext]:
    db = open_database(service.settings.database)
    celery = make_celery(service.settings)
    yield PoolContext(
        service.settings, db, open_artifacts(service.settings), celery, threading.Event(), "text", "storyboards@test:1"
    )
    celery.close()
    db.close()


@pytest.fixture
def handler(service: TextService) -> Handler:
    return Handler(service.settings)


def work(context: PoolContext, handler: Handler) -> int:
    """Do what waits; returns how many jobs that was."""
    count = 0
    while (claim := claim_next(context.db, "text", context.worker, 20.0)) is not None:
        handler(context, claim)
        count += 1
    return count


def create(service: TextService, **fields: Any) -> dict[str, Any]:
    with service.http as http:
        answer = http.post("/v1/storyboards", json={**IDEA, **fields})
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return body


def get(service: TextService, path: str) -> httpx.Response:
    with service.http as http:
        return http.get(path)


def test_from_idea_to_file(service: TextService, context: PoolContext, handler: Handler) -> None:
    created = create(service, metadata={"project": "demo"}, style="noir")
    assert (created["object"], created["status"]) == ("storyboard", "queued")
    assert created["storyboard"] is None
    assert get(service, f"/v1/storyboards/{created['id']}/content").status_code == 409
    assert work(context, handler) == 1
    made = get(service, f"/v1/storyboards/{created['id']}").json()
    assert (made["status"], made["progress"]) == ("completed", 100)
    board = made["storyboard"]
    assert sum(shot["num_frames"] for shot in board["shots"]) == 80 == made["num_frames"]
    assert board["idea"] == IDEA["idea"]
    assert board["style"] == "noir"
    assert get(service, f"/v1/storyboards/{created['id']}/content").json() == board
    listed = get(service, "/v1/storyboards").json()
    assert listed["data"][0]["id"] == created["id"]
    # the events hold the text as it was written
    text = "".join(event.data.get("text", "") for event in read_after(context.db, job_id=created["id"]))
    assert json.loads(text)["shots"][0]["prompt"] == board["shots"][0]["prompt"]
    # neither idea nor style is a parameter
    assert "noir" not in json.dumps(store.get(context.db, created["id"]).params)
    with service.http as http:
        assert http.delete(f"/v1/storyboards/{created['id']}").json()["deleted"] is True
        assert http.get(f"/v1/storyboards/{created['id']}").status_code == 404


def test_a_stream_shows_the_text_and_ends_with_the_storyboard(
    service: TextService, context: PoolContext, handler: Handler
) -> None:
    def work_once_it_is_there() -> None:
        deadline = time.monotonic() + 120
        while work(context, handler) == 0 and time.monotonic() < deadline:
            time.sleep(0.3)

    worker = threading.Thread(target=work_once_it_is_there)
    worker.start()
    with service.http as http:
        answer = http.post("/v1/storyboards", json={**IDEA, "stream": True})
    worker.join()
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in answer.text.strip().split("\n\n")]
    names = [block.get("event") for block in blocks if "data" in block]
    assert names[0] == "storyboard.created"
    assert names[-2:] == ["storyboard.completed", None]
    assert blocks[-1]["data"] == "[DONE]"
    text = "".join(json.loads(block["data"])["delta"] for block in blocks if block.get("event") == "storyboard.delta")
    end = json.loads(blocks[-2]["data"])
    assert [shot["prompt"] for shot in json.loads(text)["shots"]] == [
        shot["prompt"] for shot in end["storyboard"]["shots"]
    ]


def test_cancel_while_it_is_written(
    service: TextService, context: PoolContext, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storyboard_worker, "BEAT_S", 0.01)
    created = create(service, idea="endlessly a red ball finds a friend")
    claim = claim_next(context.db, "text", context.worker, 20.0)
    assert claim is not None
    before = len(service.engine.aborted)
    thread = threading.Thread(target=handler, args=(context, claim))
    thread.start()
    deadline = time.monotonic() + 120
    while store.get(context.db, created["id"]).progress == 0:
        assert thread.is_alive() and time.monotonic() < deadline, "nothing was written"
        time.sleep(0.01)
    with service.http as http:
        asked = http.post(f"/v1/storyboards/{created['id']}/cancel").json()
    assert asked["is_cancel_requested"] is True
    thread.join(120)
    assert not thread.is_alive()
    assert store.get(context.db, created["id"]).status == "cancelled"
    # what was read until then is in the ledger
    with context.db.read() as tx:
        read = sa.select(usage.c.amount).where(usage.c.job_id == created["id"], usage.c.kind == "prompt_tokens")
        assert tx.conn.scalars(read).one() > 0
    # the engine does not go on for nobody; the message may reach it after the row has ended
    deadline = time.monotonic() + 120
    while len(service.engine.aborted) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(service.engine.aborted) == before + 1


def test_a_worker_that_ends_gives_the_job_back(service: TextService, context: PoolContext, handler: Handler) -> None:
    created = create(service)
    claim = claim_next(context.db, "text", context.worker, 20.0)
    assert claim is not None
    context.stopping.set()
    handler(context, claim)
    job = store.get(context.db, created["id"])
    assert (job.status, job.uncounted) == ("queued", 1)
    context.stopping.clear()
    work(context, handler)
    assert store.get(context.db, created["id"]).status == "completed"


def test_an_engine_that_is_late_is_waited_for(service: TextService, context: PoolContext, handler: Handler) -> None:
    service.engine.redis.delete(engine_key("engine-0"))
    created = create(service)
    late = threading.Timer(1.0, service.engine.announce)
    late.start()
    work(context, handler)
    late.join()
    assert store.get(context.db, created["id"]).status == "completed"


def test_without_an_engine_the_job_is_tried_again_then_fails(
    service: TextService, context: PoolContext, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storyboard_worker, "ENGINE_WAIT_S", 0.1)
    monkeypatch.setattr("media_server.jobs.claims._RETRY_WAIT_S", {})
    service.engine.redis.delete(engine_key("engine-0"))
    try:
        created = create(service)
        work(context, handler)
    finally:
        service.engine.announce()
    job = store.get(context.db, created["id"])
    assert (job.status, job.error_code, job.attempt) == ("failed", "engine_unavailable", 3)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"idea": " "}, 400, "idea"),
        ({"idea": "x" * 5000}, 400, "idea"),
        ({"seconds": 0}, 400, "seconds"),
        ({"seconds": True}, 400, "seconds"),
        ({"priority": True}, 400, "priority"),
        ({"seconds": 0.1, "shots": 9}, 400, "seconds"),
        ({"seconds": 61, "shots": 2}, 400, "seconds"),
        ({"shots": 0}, 400, "shots"),
        ({"fps": 99}, 400, "fps"),
        ({"seed": -1}, 400, "seed"),
        ({"color": "red"}, 400, "color"),
        ({"video_model": "sora"}, 404, "model"),
        ({"model": "gpt-9"}, 404, "model"),
    ],
)
def test_bad_input_names_the_field_and_writes_nothing(
    service: TextService, context: PoolContext, fields: dict[str, Any], status: int, param: str
) -> None:
    before = len(store.list_jobs(context.db, limit=1000).data)
    with service.http as http:
        answer = http.post("/v1/storyboards", json={**IDEA, **fields})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(store.list_jobs(context.db, limit=1000).data) == before


def test_a_grammar_of_ours_that_is_too_complex_is_no_fault_of_the_callers(
    service: TextService, context: PoolContext, handler: Handler
) -> None:
    created = create(service, idea="a ball and a rope entangle")
    work(context, handler)
    job = store.get(context.db, created["id"])
    assert (job.status, job.error_code) == ("failed", "model_error")
    assert "grammar_too_complex" in (job.error_message or "")
