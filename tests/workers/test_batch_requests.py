"""A line of a batch as a request: which refusals are its end, and which are worth another try, when."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from media_server.auth import ACTING_FOR, ActingFor
from media_server.batches.lines import request_body
from media_server.batches.store import BatchRow
from media_server.errors import RateLimited
from media_server.http_acceptance import BATCH_LINE
from media_server.http_errors import problem_response
from media_server.jobs.idempotency import HeldLine
from workers.batch_requests import _retry_in_s, send_line

NAMES = BatchRow.__dataclass_fields__


def answer(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("given", "tries", "left_s", "expected"),
    [
        (answer(200), 1, 100.0, None),
        (answer(400), 1, 100.0, None),
        (answer(401), 1, 100.0, None),
        (answer(403), 1, 100.0, None),
        (answer(422), 1, 100.0, None),
        # a queue that is full says when to come back
        (answer(429, retry_after="7"), 9, 100.0, 7.0),
        (answer(429, retry_after="3000"), 1, 5000.0, 60.0),
        # tomorrow's quota is of no use to a batch that ends today
        (answer(429, retry_after="7200", x_should_retry="false"), 1, 3600.0, None),
        # a budget that is spent, and an engine by URL that is busy
        (answer(429, x_should_retry="false"), 1, 100.0, None),
        (answer(429), 3, 100.0, 4.0),
        (answer(503), 1, 100.0, 1.0),
        (answer(503), 5, 100.0, 16.0),
        (answer(503, retry_after="5"), 1, 100.0, 5.0),
        (answer(507), 50, 100.0, 60.0),
        (answer(409, x_should_retry="true", retry_after="1"), 1, 100.0, 1.0),
        (answer(409, x_should_retry="false"), 1, 100.0, None),
        (answer(500), 1, 100.0, 1.0),
        (answer(500), 2, 100.0, 2.0),
        (answer(500), 3, 100.0, None),
    ],
)
def test_what_is_worth_another_try(given: httpx.Response, tries: int, left_s: float, expected: float | None) -> None:
    assert _retry_in_s(given, tries, left_s) == expected


def test_our_own_refusals_are_read_as_they_are_meant() -> None:
    for wait_s, expected in ((None, None), (30.0, 30.0), (200.0, None)):
        sent = problem_response(RateLimited("no", retry_after_s=wait_s))
        assert _retry_in_s(httpx.Response(429, headers=dict(sent.headers)), 1, 100.0) == expected


def test_a_line_goes_to_the_application_for_its_owner() -> None:
    seen: list[Any] = []
    app = FastAPI()

    @app.post("/v1/videos")
    async def take(request: Request) -> JSONResponse:
        state = request.scope["state"]
        seen.append((state[ACTING_FOR], state[BATCH_LINE], dict(request.headers), await request.json()))
        return JSONResponse({"ok": True}, status_code=202)

    values = dict.fromkeys(NAMES)
    values |= {"id": "batch_1", "owner_key_id": "key_1", "endpoint": "/v1/videos", "traceparent": "00-a-b-00"}
    batch = BatchRow(**values)  # type: ignore[arg-type]
    line = json.dumps({"body": {"prompt": "é"}}).encode()
    body = request_body(line, priority=None)
    got = asyncio.run(send_line(app, batch, "w", 7, body, tries=1, left_s=10.0))
    assert (got.status_code, got.body, got.retry_in_s, got.is_success) == (202, {"ok": True}, None, True)
    ((acting, held, headers, sent),) = seen
    assert acting == ActingFor("key_1") and held == HeldLine("batch_1", 7, "w") and sent == {"prompt": "é"}
    assert (headers["x-request-id"], headers["traceparent"]) == ("batch_1:7", "00-a-b-00")


def test_no_request_from_outside_says_for_whom_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server makes the scope: what a client sends arrives in its headers, query and body alone."""
    found: list[Any] = []
    app = FastAPI()

    @app.get("/")
    async def look(request: Request) -> JSONResponse:
        found.append(request.scope.get("state", {}).get(ACTING_FOR))
        return JSONResponse({})

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", trust_env=False) as client:
            await client.get(f"/?{ACTING_FOR}=key_1", headers={ACTING_FOR.replace("_", "-"): "key_1"})

    asyncio.run(ask())
    assert found == [None]
