"""POSTs that create: at most once for their Idempotency-Key, and answered when `Prefer: wait` says."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from media_server import http_clips
from media_server.jobs.tables import idempotency_keys
from media_server.settings import child_environment
from tests.free_port import free_port

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

CLIP = {"prompt": "a red ball", "seed": 7}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/videos": CLIP,
    "/v1/films": {"idea": "a", "seconds": 2},
    "/v1/storyboards": {"idea": "a", "seconds": 2},
    "/v1/webhook_endpoints": {"name": "n", "url": "https://example.com/hook", "event_types": ["*"]},
}


def _post(service: Any, path: str, body: Any, key: str | None = None, **headers: str) -> httpx.Response:
    named = {} if key is None else {"idempotency-key": key}
    answer: httpx.Response = service.http.post(path, json=body, headers={**named, **headers})
    return answer


def _count(service: Any) -> dict[str, int]:
    rows: dict[str, int] = service.contents()[0]
    return {name: rows[name] for name in ("jobs", "webhook_endpoints")}


@pytest.mark.parametrize("path", BODIES)
def test_the_same_request_gets_the_same_answer(service: Any, path: str) -> None:
    first = _post(service, path, BODIES[path], "k-1")
    assert first.status_code in (200, 202), first.text
    assert "idempotent-replayed" not in first.headers
    before = _count(service)
    for key in ("k-1", '"k-1"'):
        again = _post(service, path, BODIES[path], key)
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers.get("location") == first.headers.get("location")
    other = _post(service, path, {**BODIES[path], "name" if "name" in BODIES[path] else "seed": "8"}, "k-1")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert _count(service) == before
    # without a key, and with another one, it is another request
    assert _post(service, path, BODIES[path]).json()["id"] != first.json()["id"]
    assert _post(service, path, BODIES[path], "k-2").json()["id"] != first.json()["id"]


def test_the_answer_stays_what_it_was_when_the_job_has_moved_on(service: Any) -> None:
    first = _post(service, "/v1/videos", CLIP, "k")
    service.worker.run_all()
    assert _post(service, "/v1/videos", CLIP, "k").content == first.content
    # a request that waits is answered with how the job stands
    waited = _post(service, "/v1/videos", CLIP, "k", prefer="wait=5").json()
    assert (waited["id"], waited["status"]) == (first.json()["id"], "completed")


def test_remix_and_extension_have_keys_too(service: Any) -> None:
    source = service.completed_video()["id"]
    for path, body in (
        (f"/v1/videos/{source}/remix", {"prompt": "blue"}),
        ("/v1/videos/extensions", {"prompt": "on", "seconds": 2, "video": {"id": source}}),
    ):
        first = _post(service, path, body, path)
        assert first.status_code == 200, first.text
        assert _post(service, path, body, path).content == first.content
    # one key for another path is another request
    assert _post(service, f"/v1/videos/{source}/remix", {"prompt": "blue"}, "/v1/videos/extensions").status_code == 422
    assert _count(service)["jobs"] == 3


def test_an_upload_is_compared_by_its_bytes(service: Any) -> None:
    def post(picture: bytes) -> httpx.Response:
        answer: httpx.Response = service.http.post(
            "/v1/videos",
            data={"prompt": "a"},
            files={"input_reference": ("a.jpg", picture)},
            headers={"idempotency-key": "k"},
        )
        return answer

    first = post(service.worker.picture)
    assert first.status_code == 200, first.text
    # another boundary, the same form
    assert post(service.worker.picture).content == first.content
    assert post(service.worker.picture + b" ").status_code == 422


def test_a_refused_request_leaves_its_key_free(service: Any) -> None:
    assert _post(service, "/v1/videos", {"prompt": "a", "size": "161x96"}, "k").status_code == 400
    assert _post(service, "/v1/videos", {"prompt": "a", "model": "none"}, "k").status_code == 404
    assert service.contents()[0]["idempotency_keys"] == 0
    assert _post(service, "/v1/videos", CLIP, "k").status_code == 200


def test_a_stream_is_taken_up_by_the_same_key(working: Any) -> None:
    body = {**BODIES["/v1/storyboards"], "stream": True}
    texts = [_post(working, "/v1/storyboards", body, "k").text for _ in range(2)]
    assert all("event: storyboard.completed" in text for text in texts)
    assert _count(working)["jobs"] == 1


def test_a_deleted_job_is_not_made_again(service: Any) -> None:
    first = _post(service, "/v1/videos", CLIP, "k").json()["id"]
    assert service.http.delete(f"/v1/videos/{first}").status_code == 200
    spent = _post(service, "/v1/videos", CLIP, "k")
    assert (spent.status_code, spent.json()["error"]["code"]) == (409, "idempotency_key_spent")
    assert spent.headers["x-should-retry"] == "false"
    endpoint = BODIES["/v1/webhook_endpoints"]
    made = _post(service, "/v1/webhook_endpoints", endpoint, "e").json()["id"]
    assert service.http.delete(f"/v1/webhook_endpoints/{made}").status_code == 200
    assert _post(service, "/v1/webhook_endpoints", endpoint, "e").status_code == 409


@pytest.mark.parametrize("key", ["", " ", '"', '"a', 'a"b', "a b", "x" * 256, "ü"])
def test_a_malformed_key_is_refused(service: Any, key: str) -> None:
    answer = service.http.post("/v1/videos", json=CLIP, headers={"idempotency-key": key.encode()})
    assert (answer.status_code, answer.json()["param"]) == (400, "Idempotency-Key")
    assert _count(service)["jobs"] == 0


def test_a_key_in_use_answers_409_and_asks_to_come_again(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow_store(*arguments: Any) -> Any:
        reached.set()
        assert go_on.wait(10)
        return store(*arguments)

    store = http_clips._store
    monkeypatch.setattr(http_clips, "_store", slow_store)
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(_post(service, "/v1/videos", CLIP, "k")))
    first.start()
    assert reached.wait(10)
    early = _post(service, "/v1/videos", CLIP, "k")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    assert (early.headers["retry-after"], early.headers["x-should-retry"]) == ("1", "true")
    assert _post(service, "/v1/videos", {**CLIP, "seed": 8}, "k").status_code == 422
    go_on.set()
    first.join()
    assert _post(service, "/v1/videos", CLIP, "k").content == answers[0].content


def test_prefer_wait_answers_when_the_job_has_ended(working: Any) -> None:
    done = _post(working, "/v1/videos", CLIP, prefer="respond-async, wait=20").json()
    assert (done["status"], done["progress"]) == ("completed", 100)
    board = _post(working, "/v1/storyboards", BODIES["/v1/storyboards"], prefer="wait")
    assert (board.status_code, board.headers["preference-applied"]) == (200, "wait=60")
    assert board.json()["storyboard"]["shots"]
    film = _post(working, "/v1/films", BODIES["/v1/films"], prefer='wait="30"').json()
    assert film["status"] == "completed"


def test_prefer_wait_gives_up_in_time(service: Any) -> None:
    started = time.monotonic()
    answer = _post(service, "/v1/storyboards", BODIES["/v1/storyboards"], prefer="wait=1")
    assert 0.9 < time.monotonic() - started < 10
    assert (answer.status_code, answer.json()["status"]) == (202, "queued")
    assert answer.headers["preference-applied"] == "wait=1"
    assert "preference-applied" not in _post(service, "/v1/videos", CLIP, prefer="return=minimal").headers
    assert _post(service, "/v1/videos", CLIP, "k", prefer="wait=0").headers["preference-applied"] == "wait=0"
    service.worker.run_all()
    # more than the service waits is said to be less
    assert _post(service, "/v1/videos", CLIP, "k", prefer="wait=600").headers["preference-applied"] == "wait=60"
    bad = _post(service, "/v1/videos", CLIP, prefer="wait=soon")
    assert (bad.status_code, bad.json()["param"]) == (400, "Prefer")


START_S = 240.0
_PROGRAM = """
import os, sys, uvicorn
from media_server.app import create_app
from media_server.jobs import idempotency, store
from media_server.settings import load_settings

def die(*arguments, **more):
    os._exit(9)

# however long the next process takes to start: the test says when the hold is over
idempotency.HOLD_S = 3600.0
if sys.argv[2] == "before the commit":
    idempotency.bind = die
elif sys.argv[2] == "after the commit":
    idempotency.keep_answer = die
uvicorn.run(create_app(load_settings()), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextmanager
def _serve(service: Any, port: int, crash: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(port), crash], env=child_environment(service.settings)
    )
    try:
        # imports of a whole service, beside whatever else this machine does
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health/live", trust_env=False)
                break
            except httpx.TransportError:
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield child
    finally:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGTERM)
        child.wait(30)


@pytest.mark.timeout(4 * START_S)
@pytest.mark.parametrize("crash", ["before the commit", "after the commit"])
def test_a_post_that_is_sent_again_after_a_crash_makes_one_job(service: Any, crash: str) -> None:
    """The process ends between holding the key, committing the job and answering; the openai package asks again."""
    port = free_port()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def create() -> openai.types.Video:
        return client.videos.create(prompt="a", extra_headers={"Idempotency-Key": "once"}, extra_body={"seed": 7})

    with _serve(service, port, crash) as child:
        with pytest.raises(openai.APIConnectionError):
            create()
        assert child.wait(START_S) == 9
    assert _count(service)["jobs"] == (1 if crash == "after the commit" else 0)
    with _serve(service, port, "never"):
        if crash == "before the commit":
            # the dead process holds the key until its time is over, and not as if it had answered
            with pytest.raises(openai.ConflictError):
                create()
            with service.db.write() as tx:
                tx.conn.execute(idempotency_keys.update().values(expires_at=tx.now()))
        made = create()
        assert create().id == made.id
        service.worker.run_all()
        assert client.videos.retrieve(made.id).status == "completed"
    assert _count(service)["jobs"] == 1
