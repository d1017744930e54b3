"""An OpenAI-compatible server by URL in the place of our engine: passed on, streamed, and its errors made ours."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from media_server.app import create_app
from media_server.jobs.database import open_database
from media_server.jobs.tables import usage
from media_server.serve import ApiServer
from media_server.settings import Settings
from media_server.text.messages import Usage
from media_server.text.remote_writing import write_remotely
from media_server.text.storyboard import Task, write_storyboard
from tests.cards import CAPTIONED_CARD
from tests.fresh_database import open_migrated
from tests.media_server.text.conftest import RandomWriter

QUESTION = {"model": "big", "messages": [{"role": "user", "content": "hello"}]}


class Server(ThreadingHTTPServer):
    """Speaks just enough of the protocol; what it was sent is in `bodies`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        # whoever asks it to hang waits for this
        self.going_on = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "big"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["authorization"])
        content = body["messages"][-1]["content"]
        if content == "fail":
            self._json(400, {"error": {"message": "context too long", "code": "context_length_exceeded", "param": "x"}})
        elif content == "broken":
            self._json(502, {"detail": "no"})
        elif content == "hang":
            if body.get("stream"):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b'data: {"choices": [{"index": 0, "delta": {"content": "h"}}]}\n\n')
            self.server.going_on.wait()
        elif body.get("stream"):
            self._stream(body)
        else:
            counted = {"usage": {"prompt_tokens": 5, "completion_tokens": 1}} if content == "count" else {}
            self._json(200, {"id": "remote-1", "choices": [{"index": 0, "message": {"content": "hi"}}], **counted})

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        text = "hello"
        if "response_format" in body:
            schema = body["response_format"]["json_schema"]["schema"]
            from media_server.text.messages import Grammar

            text = "".join(RandomWriter(1).write(Grammar(type="json_schema", value=json.dumps(schema))))
        for start in range(0, len(text), 3):
            chunk = {"choices": [{"index": 0, "delta": {"content": text[start : start + 3]}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        counted = {"prompt_tokens": 3, "completion_tokens": 4}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': counted})}\n\ndata: [DONE]\n\n".encode())

    def _json(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def settings(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root: Path = tmp_path_factory.mktemp("remote")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return Settings(data_dir=root, broker_url="redis://127.0.0.1:1/0", engine_url=url, engine_api_key="k")


@pytest.fixture(scope="module")
def http(settings: Settings) -> Iterator[TestClient]:
    db = open_migrated(settings.database)
    db.close()
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:
        yield client


def test_answers_pass_through(http: TestClient, server: Server) -> None:
    answer = http.post("/v1/chat/completions", json={**QUESTION, "temperature": 0.5, "tools": []})
    assert answer.json()["id"] == "remote-1"
    assert server.bodies[-1] == {**QUESTION, "temperature": 0.5}
    assert server.keys[-1] == "Bearer k"
    streamed = http.post("/v1/chat/completions", json={**QUESTION, "stream": True})
    deltas = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["delta"]["content"] for chunk in deltas for choice in chunk["choices"]) == "hello"


def test_what_the_server_counts_is_entered(http: TestClient, settings: Settings, server: Server) -> None:
    """A stream is asked for its usage in any case, and shows it to those alone who asked for it."""
    question = {**QUESTION, "messages": [{"role": "user", "content": "count"}], "label": "spot"}
    http.post("/v1/chat/completions", json=question)
    assert "label" not in server.bodies[-1]
    quiet = http.post("/v1/chat/completions", json={**question, "stream": True}).text
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    asked = {**question, "stream": True, "stream_options": {"include_usage": True}}
    loud = http.post("/v1/chat/completions", json=asked).text
    assert ('"usage"' in quiet, '"usage"' in loud) == (False, True)
    assert quiet.endswith("data: [DONE]\n\n") and loud.endswith("data: [DONE]\n\n")
    db = open_database(settings.database)
    with db.read() as tx:
        found = tx.conn.execute(
            sa.select(usage.c.model, usage.c.kind, usage.c.amount).where(usage.c.label == "spot").order_by(usage.c.id)
        ).all()
    db.close()
    figures = [(5, 1), (3, 4), (3, 4)]
    assert [tuple(row) for row in found] == [
        ("big", kind, amount)
        for pair in figures
        for kind, amount in zip(("prompt_tokens", "completion_tokens"), pair, strict=True)
    ]


def test_errors_become_ours(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "fail"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "broken"}]}
    ).status_code == 503  # fmt: skip
    refused = http.post("/v1/chat/completions", json={**QUESTION, "resume_s": 5})
    assert refused.json()["error"]["param"] == "resume_s"


@pytest.mark.parametrize("idea", ["a red ball", "hope"])
def test_a_storyboard_by_structured_output(settings: Settings, server: Server, idea: str) -> None:
    usages: list[Usage] = []
    task = Task(idea, num_frames=80, fps=16, seed=1, card=CAPTIONED_CARD, num_shots=2)
    steps = write_storyboard(task, lambda ask: write_remotely(settings, ask, None, usages))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            board = end.value
            break
    assert sum(shot["num_frames"] for shot in board["shots"]) == 80
    assert len(usages) == (1 if idea == "a red ball" else 2)
    assert server.bodies[-1]["model"] == "big"
    assert server.bodies[-1]["response_format"]["json_schema"]["strict"] is True


def test_a_server_that_is_not_there(settings: Settings) -> None:
    gone = settings.model_copy(update={"engine_url": "http://127.0.0.1:1/v1"})
    steps = write_storyboard(
        Task("a red ball", 80, 16, 1, CAPTIONED_CARD, 2), lambda ask: write_remotely(gone, ask, "m", [])
    )
    with pytest.raises(httpx.ConnectError):
        list(steps)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_does_not_wait_for_the_server(
    server: Server, settings: Settings, http: TestClient, stream: bool
) -> None:
    server.going_on.clear()
    before = len(server.bodies)
    answers: list[httpx.Response] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = ApiServer(create_app(settings), log_config=None, timeout_graceful_shutdown=3600)
        running = threading.Thread(target=api.run, args=([listener],))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        body = {"model": "big", "messages": [{"role": "user", "content": "hang"}], "stream": stream}

        def ask() -> None:
            answers.append(httpx.post(url, json=body, trust_env=False, timeout=300))

        asking = threading.Thread(target=ask)
        running.start()
        asking.start()
        try:
            while len(server.bodies) == before:
                assert running.is_alive() and asking.is_alive()
                asking.join(0.01)
            api.should_exit = True
            asking.join()
        finally:
            server.going_on.set()
            api.should_exit = True
            running.join()
    (answer,) = answers
    if answer.status_code == 200:
        # its first byte had come
        assert stream
        assert json.loads(answer.text.strip().rpartition("data: ")[2])["error"]["code"] == "service_stopping"
        return
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_stopping")
    assert int(answer.headers["retry-after"]) > 0
