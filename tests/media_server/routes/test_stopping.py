"""A stop: whatever waits is answered, and a stream ends where its listener can go on."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from media_server import http_acceptance, http_events
from media_server.keys import create_key, revoke_key
from media_server.serve import ApiServer

# nothing here waits so long, unless it does not hear of the stop
FOREVER_S = 3600
CLIENT_S = 300


@dataclass
class Serving:
    """The application behind the server that `media-server api` runs."""

    url: str
    server: ApiServer
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True


@pytest.fixture
def serving(app: FastAPI) -> Iterator[Serving]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ApiServer(app, log_config=None, timeout_graceful_shutdown=FOREVER_S)
        # its own run() would take this process's signals
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
        server.should_exit = True
        thread.join()


def _listeners(app: FastAPI) -> int:
    return sum(map(len, app.state.event_feed._listeners.values()))


def _wait_for_listener(app: FastAPI, server: Serving) -> None:
    while not _listeners(app):
        assert server.thread.is_alive()
        server.thread.join(0.01)


def test_prefer_wait_is_answered_with_the_job_as_it_stands(
    app: FastAPI, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_acceptance, "MAX_WAIT_S", FOREVER_S)
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=serving.url, trust_env=False, timeout=CLIENT_S) as http:
            answers.append(http.post("/v1/videos", json={"prompt": "a"}, headers={"prefer": f"wait={FOREVER_S}"}))

    asking = threading.Thread(target=ask)
    asking.start()
    _wait_for_listener(app, serving)
    serving.stop()
    asking.join()
    assert (answers[0].status_code, answers[0].json()["status"]) == (200, "queued")


def test_streams_end_between_two_events(app: FastAPI, serving: Serving) -> None:
    with httpx.Client(base_url=serving.url, trust_env=False, timeout=CLIENT_S) as http:
        made = http.post("/v1/videos", json={"prompt": "a"}).json()
        with http.stream("GET", f"/v1/jobs/{made['id']}/events") as answer:
            _wait_for_listener(app, serving)
            serving.stop()
            # a body that is cut raises here
            text = answer.read().decode()
    assert "event: job.queued" in text and text.endswith("\n\n")


def test_a_storyboards_stream_ends_too(app: FastAPI, serving: Serving) -> None:
    asked = {"idea": "a", "stream": True}
    with (
        httpx.Client(base_url=serving.url, trust_env=False, timeout=CLIENT_S) as http,
        http.stream("POST", "/v1/storyboards", json=asked) as answer,
    ):
        _wait_for_listener(app, serving)
        serving.stop()
        text = answer.read().decode()
    assert "storyboard.created" in text and "[DONE]" not in text


def test_a_key_that_is_revoked_ends_its_streams(service: Any, live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_events, "KEY_EVERY_S", 0.0)
    key, text = create_key(service.db, "studio")
    other, _ = create_key(service.db, "other")
    headers = {"authorization": f"Bearer {text}"}
    with httpx.Client(base_url=live, trust_env=False, timeout=CLIENT_S, headers=headers) as http:
        made = http.post("/v1/videos", json={"prompt": "a"}).json()
        with http.stream("GET", f"/v1/jobs/{made['id']}/events") as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("event: job.queued"):
                pass
            revoke_key(service.db, other.id)
            service.worker.do(claim := service.worker.claim("video"))
            assert claim.job.id == made["id"]
            assert any(line.startswith("event: video.completed") for line in lines)
        waiting = http.post("/v1/videos", json={"prompt": "a"}).json()
        with http.stream("GET", f"/v1/jobs/{waiting['id']}/events") as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("event: job.queued"):
                pass
            revoke_key(service.db, key.id)
            rest = list(lines)
        assert not any(line.startswith("event:") for line in rest)
        assert http.get(f"/v1/jobs/{waiting['id']}").status_code == 401
