"""Text requests by key: so many at a time, counted whole, in part or after their client left; each entered once."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio
import sqlalchemy as sa

from media_server.errors import RateLimited
from media_server.jobs.tables import usage
from media_server.keys import create_key, revoke_key
from media_server.limits import KeyLimits, parse_budget
from media_server.text.messages import RequestMeta, TextEvent, Usage
from media_server.text.reading import EngineUnavailable, Reading
from media_server.text.slots import Slot, count_slots, take_slot


@pytest.fixture(autouse=True)
def _no_keys(service: Any) -> Iterator[None]:
    """The service of this folder's other tests has no keys; give it back so."""
    yield
    with service.db.write() as tx:
        tx.conn.execute(sa.text("DELETE FROM api_keys"))
        tx.conn.execute(sa.text("DELETE FROM usage"))
        tx.conn.execute(sa.text("DELETE FROM tallies"))


def _client(service: Any, **limits: Any) -> tuple[str, httpx.Client]:
    key, text = create_key(service.db, "studio", limits=KeyLimits(**limits))
    headers = {"authorization": f"Bearer {text}"}
    return key.id, httpx.Client(base_url=service.url, timeout=30, trust_env=False, headers=headers)


def _ask(text: str, **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say {text}"}], **members}


def _entries(service: Any) -> list[tuple[Any, ...]]:
    columns = (usage.c.owner_key_id, usage.c.label, usage.c.model, usage.c.job_id, usage.c.kind, usage.c.amount)
    with service.db.read() as tx:
        return [tuple(row) for row in tx.conn.execute(sa.select(*columns).order_by(usage.c.id))]


def _wait_for_entries(service: Any, count: int) -> list[tuple[Any, ...]]:
    deadline = time.monotonic() + 20
    while len(found := _entries(service)) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_whole_answers_and_streams_are_entered_once(service: Any) -> None:
    owner, http = _client(service)
    with http:
        whole = http.post("/v1/chat/completions", json=_ask("hello", label="spot")).json()
        used = whole["usage"]
        entries = _wait_for_entries(service, 2)
        assert entries == [
            (owner, "spot", "scripted", whole["id"], "prompt_tokens", used["prompt_tokens"]),
            (owner, "spot", "scripted", whole["id"], "completion_tokens", used["completion_tokens"]),
        ]
        streamed = http.post("/v1/chat/completions", json=_ask("hello", stream=True)).text
        assert streamed.endswith("[DONE]\n\n")
        entries = _wait_for_entries(service, 4)
        assert [(entry[4], entry[5]) for entry in entries[2:]] == [
            ("prompt_tokens", used["prompt_tokens"]),
            ("completion_tokens", used["completion_tokens"]),
        ]
        http.post("/v1/completions", json={"prompt": "say hello", "max_tokens": 9})
        assert len(_wait_for_entries(service, 6)) == 6
        # what an engine refuses costs nothing
        assert http.post("/v1/chat/completions", json=_ask("refuse")).status_code == 400
        assert http.get("/v1/usage").json()["data"][0]["completion_tokens"] == sum(
            entry[5] for entry in _entries(service) if entry[4] == "completion_tokens"
        )


def test_a_request_without_a_key_is_entered_for_nobody(service: Any) -> None:
    service.http.post("/v1/chat/completions", json=_ask("hello"))
    assert [entry[0] for entry in _wait_for_entries(service, 2)] == [None, None]


def test_so_many_streams_at_a_time(service: Any) -> None:
    owner, http = _client(service, text_streams=1)
    with http:
        slow = _ask("slowly " + "x" * 40, stream=True)
        with http.stream("POST", "/v1/chat/completions", json=slow) as first:
            assert first.headers["x-ratelimit-limit-streams"] == "1"
            assert first.headers["x-ratelimit-remaining-streams"] == "0"
            for body in (_ask("hi"), _ask("hi", stream=True)):
                refused = http.post("/v1/chat/completions", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "stream_quota"), refused.text
                assert refused.headers["retry-after"] == "2"
                assert refused.headers["x-ratelimit-remaining-streams"] == "0"
            # others are not concerned
            assert service.http.post("/v1/chat/completions", json=_ask("hi")).status_code == 401
            for _ in first.iter_raw():
                pass
        deadline = time.monotonic() + 10
        while (answer := http.post("/v1/chat/completions", json=_ask("hi"))).status_code == 429:
            assert time.monotonic() < deadline
        assert answer.status_code == 200
    revoke_key(service.db, owner)


def test_a_client_that_leaves_frees_its_place_and_pays_for_what_was_written(service: Any) -> None:
    _, http = _client(service, text_streams=1)
    with http:
        with http.stream("POST", "/v1/chat/completions", json=_ask("slowly " + "x" * 200, stream=True)) as first:
            next(first.iter_raw())
        entries = _wait_for_entries(service, 1)
        # the scripted engine names no tokens before its end
        assert [entry[4] for entry in entries] == ["prompt_tokens"] and entries[0][5] > 0
        assert http.post("/v1/chat/completions", json=_ask("hi")).status_code == 200


def test_a_stream_that_goes_on_without_its_client_keeps_its_place_until_its_end(service: Any) -> None:
    _, http = _client(service, text_streams=1)
    with http:
        body = _ask("slowly " + "x" * 60, stream=True, resume_s=60)
        with http.stream("POST", "/v1/chat/completions", json=body) as first:
            chunk = next(line for line in first.iter_lines() if line.startswith("data: {"))
        request_id = json.loads(chunk[6:])["id"]
        assert http.post("/v1/chat/completions", json=_ask("hi")).status_code == 429
        entries = _wait_for_entries(service, 2)
        assert [(entry[3], entry[4]) for entry in entries] == [
            (request_id, "prompt_tokens"),
            (request_id, "completion_tokens"),
        ]
        # taken up again by its own key alone, and not entered twice
        again = http.get(f"/v1/chat/completions/{request_id}/events").text
        assert again.endswith("[DONE]\n\n")
        _, text = create_key(service.db, "stranger")
        stranger = service.http.get(
            f"/v1/chat/completions/{request_id}/events", headers={"authorization": f"Bearer {text}"}
        )
        assert stranger.status_code == 404
        assert stranger.json()["error"]["code"] == "not_found"
        assert http.post("/v1/chat/completions", json=_ask("hi")).status_code == 200
        assert [entry[3] for entry in _entries(service)].count(request_id) == 2


def test_a_token_budget_refuses_with_the_figure(service: Any) -> None:
    _, http = _client(service, budgets=(parse_budget("tokens=10"),))
    with http:
        assert http.post("/v1/chat/completions", json=_ask("hello")).status_code == 200
        spent = sum(entry[5] for entry in _wait_for_entries(service, 2))
        refused = http.post("/v1/chat/completions", json=_ask("hello", stream=True))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exhausted")
        assert refused.json()["value"] == spent
        assert f"10 tokens, and {spent:g} are spent" in refused.json()["detail"]


def test_a_reader_counts_what_an_engine_wrote() -> None:
    """Of a request that is given up, the tokens that came; of one that ends, the engine's own count."""
    reading = Reading("req_1", RequestMeta(engine="e", instance="1", model="m", created=0))
    events = [TextEvent(is_accepted=True), TextEvent(text="a", token_ids=[1, 2]), TextEvent(token_ids=[3])]
    entries = [(f"{number}-0".encode(), {b"d": event.model_dump_json()}) for number, event in enumerate(events, 1)]
    assert not reading.is_accepted
    # one at a time, and one again
    for entry in (entries[0], entries[1], entries[1], entries[2]):
        reading.take([(b"", [entry])])
    assert (reading.is_accepted, reading.num_tokens, reading.usage) == (True, 3, None)
    last = TextEvent(usage=Usage(prompt_tokens=7, completion_tokens=4), finish_reason="stop", is_last=True)
    reading.take([(b"", [(b"4-0", {b"d": last.model_dump_json()})])])
    assert reading.usage == Usage(prompt_tokens=7, completion_tokens=4)


def test_places_run_out_and_are_renewed(service: Any) -> None:
    async def run() -> None:
        client = redis.asyncio.from_url(service.settings.redis_url)
        try:
            held = await take_slot(client, "key_t", "req_1", 1, hold_s=0.4)
            with pytest.raises(RateLimited):
                await take_slot(client, "key_t", "req_2", 1)
            # the same request again is no second one
            await take_slot(client, "key_t", "req_1", 1, hold_s=0.4)
            assert await count_slots(client, "key_t") == 1
            await asyncio.sleep(0.3)
            await held.renew()
            await asyncio.sleep(0.3)
            assert await count_slots(client, "key_t") == 1
            await asyncio.sleep(0.3)
            # its holder died
            assert await count_slots(client, "key_t") == 0
            await take_slot(client, "key_t", "req_2", 1)
            await held.give_back()
            assert await count_slots(client, "key_t") == 1
            await Slot(client, "key_t", "req_2", 1.0).give_back()
            # however many come at once
            taken = await asyncio.gather(
                *(take_slot(client, "key_t", f"req_{number}", 3) for number in range(10)), return_exceptions=True
            )
            assert sum(isinstance(item, Slot) for item in taken) == 3
        finally:
            await client.aclose()

    asyncio.run(run())


def test_a_valkey_that_does_not_answer_counts_nothing() -> None:
    async def run() -> None:
        client = redis.asyncio.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=1)
        with pytest.raises(EngineUnavailable):
            await take_slot(client, "key_t", "req_1", 1)
        assert await count_slots(client, "key_t") is None
        await Slot(client, "key_t", "req_1", 1.0).give_back()
        await client.aclose()

    asyncio.run(run())
