"""Batches of text through the real application and worker, with a scripted engine behind a real Valkey."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from media_server.batches import lines
from media_server.jobs import ledger
from media_server.keys import create_key
from media_server.limits import KeyLimits
from media_server.text.messages import ENGINES_KEY, engine_key
from tests.media_server.text.conftest import MODEL, TextService
from workers.batch_worker import serve

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def worker(service: TextService) -> Iterator[None]:
    """Run the batch worker in a thread."""
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve(service.settings, "batches@test:1", stopping))
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


def wait_until(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def chat(custom_id: str, say: str, **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": f"say {say}"}], "max_tokens": 90, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


class Client:
    """What one caller does."""

    def __init__(self, service: TextService, text: str | None = None) -> None:
        self.service = service
        headers = {} if text is None else {"authorization": f"Bearer {text}"}
        self.http = httpx.Client(base_url=service.url, timeout=30, trust_env=False, headers=headers)

    def start(self, *items: dict[str, Any], endpoint: str = "/v1/chat/completions") -> str:
        content = "\n".join(map(json.dumps, items)).encode()
        made = self.http.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
        body = {"input_file_id": made.json()["id"], "endpoint": endpoint, "completion_window": "1h"}
        answer = self.http.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        batch_id: str = answer.json()["id"]
        return batch_id

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/batches/{batch_id}").json()
        return found

    def ended(self, batch_id: str) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            batch = self.batch(batch_id)
            return batch if batch["status"] in ("completed", "failed", "cancelled", "expired") else None

        found: dict[str, Any] = wait_until(find)
        return found

    def records(self, file_id: str) -> dict[str, dict[str, Any]]:
        text = self.http.get(f"/v1/files/{file_id}/content").text
        return {record["custom_id"]: record for record in map(json.loads, text.splitlines())}


def test_answers_are_those_of_the_route_itself(service: TextService) -> None:
    client = Client(service)
    asked = chat("two", "zwei", seed=1, temperature=0)
    batch_id = client.start(chat("one", "éins"), asked, chat("loud", "x", temperature=9), chat("odd", "x", stream=True))
    batch = client.ended(batch_id)
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2} and batch["model"] == MODEL
    made, failed = client.records(batch["output_file_id"]), client.records(batch["error_file_id"])
    assert {name: _content(record) for name, record in made.items()} == {"one": "éins", "two": "zwei"}
    direct = client.http.post("/v1/chat/completions", json=asked["body"]).json()
    body = made["two"]["response"]["body"]
    assert {**body, "id": 0, "created": 0} == {**direct, "id": 0, "created": 0}
    usages = [record["response"]["body"]["usage"] for record in made.values()]
    assert batch["usage"]["input_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert batch["usage"]["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert failed["loud"]["response"]["status_code"] == 400
    assert failed["loud"]["response"]["body"]["param"] == "temperature"
    assert (failed["odd"]["response"], failed["odd"]["error"]["param"]) == (None, "body.stream")
    # the engine hears of each that it may wait
    sent = service.engine.requests[-3:]
    assert sorted(request.priority for request in sent) == [lines.PRIORITY, lines.PRIORITY, 0]


def _content(record: dict[str, Any]) -> str:
    content: str = record["response"]["body"]["choices"][0]["message"]["content"]
    return content


def test_plain_completions_are_lines_too(service: TextService) -> None:
    client = Client(service)
    body = {"model": MODEL, "prompt": "say plain", "max_tokens": 20}
    item = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batch = client.ended(client.start(item, endpoint="/v1/completions"))
    (record,) = client.records(batch["output_file_id"]).values()
    assert record["response"]["body"]["choices"][0]["text"] == "plain"


def test_cancel_breaks_text_off_and_tells_the_engine(service: TextService) -> None:
    client = Client(service)
    batch_id = client.start(*(chat(f"n{index}", "endlessly") for index in range(6)))
    before = len(service.engine.requests)
    wait_until(lambda: len(service.engine.requests) >= before + service.settings.batch_lines_at_once)
    # one owner has so many under way, and no more
    time.sleep(1.0)
    assert len(service.engine.requests) == before + service.settings.batch_lines_at_once
    assert client.http.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
    batch = client.ended(batch_id)
    assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 6)
    assert {record["error"]["code"] for record in client.records(batch["error_file_id"]).values()} == {
        "batch_cancelled"
    }
    sent = {request.id for request in service.engine.requests[before:]}
    wait_until(lambda: sent <= set(service.engine.aborted))


def test_a_line_waits_for_an_engine_and_is_answered_then(service: TextService) -> None:
    client = Client(service)
    service.engine.redis.delete(engine_key("engine-0"))
    service.engine.redis.delete(ENGINES_KEY)
    try:
        batch_id = client.start(chat("a", "late"))
        wait_until(lambda: client.batch(batch_id)["status"] == "in_progress")
        time.sleep(1.5)
        assert client.batch(batch_id)["request_counts"] == {"total": 1, "completed": 0, "failed": 0}
    finally:
        service.engine.announce()
    batch = client.ended(batch_id)
    assert _content(client.records(batch["output_file_id"])["a"]) == "late"


# the last one: from its first key on the service takes no request without
def test_streams_and_budgets_of_a_key_hold_for_each_line(service: TextService) -> None:
    key, text = create_key(service.db, "mine", limits=KeyLimits(text_streams=2))
    client = Client(service, text)
    batch_id = client.start(chat("a", "endlessly"), chat("b", "endlessly"))
    before = len(service.engine.requests)
    wait_until(lambda: len(service.engine.requests) > before)
    # one of two places is left to whoever waits for an answer
    time.sleep(1.5)
    assert len(service.engine.requests) == before + 1
    answer = client.http.post("/v1/chat/completions", json=chat("now", "now")["body"])
    assert answer.status_code == 200
    client.http.post(f"/v1/batches/{batch_id}/cancel")
    client.ended(batch_id)
    budget = {"kind": "tokens", "amount": 30.0}
    key, text = create_key(service.db, "poor", limits=KeyLimits.model_validate({"budgets": [budget]}))
    poor = Client(service, text)
    batch = poor.ended(poor.start(*(chat(f"n{index}", "x" * 20) for index in range(9))))
    counts = batch["request_counts"]
    assert counts["completed"] >= 1 and counts["failed"] >= 9 - 1 - service.settings.batch_lines_at_once
    refused = poor.records(batch["error_file_id"])["n8"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (429, "budget_exhausted")
    with service.db.read() as tx:
        spent = ledger.read_tally(tx, key.id, "tokens", ledger.TOTAL)
    assert spent == batch["usage"]["total_tokens"]
    with contextlib.closing(poor.http):
        assert poor.http.get("/v1/batches").json()["data"][0]["id"] == batch["id"]
