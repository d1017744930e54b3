"""A stop of the API while an engine writes: each client is answered, and the engine hears of what nobody waits for."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import uvicorn

from media_server.app import create_app
from media_server.jobs.tables import usage
from media_server.serve import ApiServer
from media_server.text.messages import inbox_key
from tests.media_server.text.conftest import MODEL, TextService

# nothing here waits so long, unless it does not hear of the stop
FOREVER_S = 3600
CLIENT_S = 300

MakeServer = Callable[[Any], uvicorn.Server]


@contextmanager
def _serve(service: TextService, make: MakeServer) -> Iterator[tuple[httpx.Client, uvicorn.Server, threading.Thread]]:
    """Serve the application once more, beside the one that this folder's other tests use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make(create_app(service.settings))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, trust_env=False, timeout=CLIENT_S) as http:
                yield http, server, thread
        finally:
            server.should_exit = True
            thread.join()


def _as_served(app: Any) -> uvicorn.Server:
    return ApiServer(app, log_config=None, timeout_graceful_shutdown=FOREVER_S)


def _without_patience(app: Any) -> uvicorn.Server:
    """A server that cuts every request at once, as ours does with those that have not ended in time."""
    return uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=0))


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "endlessly say xxx"}], **fields}


def _aborted(service: TextService) -> list[str]:
    """List what the engine was told to abort, from its inbox: it may not have read it yet."""
    entries: Any = service.engine.redis.xrange(inbox_key("engine-0"))
    messages = [json.loads(fields[b"m"]) for _, fields in entries]
    return [message["id"] for message in messages if message["type"] == "abort"]


def _ask_and_stop(service: TextService, make: MakeServer) -> tuple[str, httpx.Response | None]:
    """Ask for a whole answer that does not end, stop the API; gives the request's id and what came back."""
    answers: list[httpx.Response] = []
    with _serve(service, make) as (http, server, thread):

        def ask() -> None:
            try:
                answers.append(http.post("/v1/chat/completions", json=_body()))
            except httpx.TransportError:
                # cut
                return

        asked = len(service.engine.requests)
        asking = threading.Thread(target=ask)
        asking.start()
        while len(service.engine.requests) == asked:
            assert asking.is_alive()
            asking.join(0.01)
        server.should_exit = True
        asking.join()
        thread.join()
    return service.engine.requests[-1].id, answers[0] if answers else None


def test_a_whole_answer_becomes_503_and_its_request_ends(service: TextService) -> None:
    request_id, answer = _ask_and_stop(service, _as_served)
    assert answer is not None
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_stopping")
    assert int(answer.headers["retry-after"]) > 0
    assert request_id in _aborted(service)


def test_the_engine_hears_of_a_request_that_was_cut(service: TextService) -> None:
    request_id, _ = _ask_and_stop(service, _without_patience)
    assert request_id in _aborted(service)


@pytest.mark.parametrize("resume_s", [None, 60])
def test_a_stream_ends_with_its_request_unless_it_can_be_taken_up(service: TextService, resume_s: int | None) -> None:
    fields = {} if resume_s is None else {"resume_s": resume_s}
    with _serve(service, _as_served) as (http, server, thread):
        with http.stream("POST", "/v1/chat/completions", json=_body(stream=True, **fields)) as answer:
            lines = answer.iter_lines()
            while "content" not in (line := next(lines)):
                pass
            first = json.loads(line.removeprefix("data: "))
            server.should_exit = True
            # a body that is cut raises here
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        thread.join()
    assert "[DONE]" not in data
    errors = [json.loads(text)["error"]["code"] for text in data if "error" in json.loads(text)]
    with service.db.read() as tx:
        entered = tx.conn.execute(sa.select(usage.c.kind).where(usage.c.job_id == first["id"])).scalars().all()
    assert entered.count("prompt_tokens") == 1
    if resume_s is None:
        assert errors == ["service_stopping"]
        assert first["id"] in _aborted(service)
        return
    assert errors == []
    assert first["id"] not in _aborted(service)
    # another API takes it up
    with service.http as again, again.stream("GET", f"/v1/chat/completions/{first['id']}/events") as answer:
        assert any("content" in line for line in answer.iter_lines() if line.startswith("data: "))
