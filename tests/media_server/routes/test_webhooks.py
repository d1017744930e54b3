"""Webhooks from end to end: the unmodified openai package manages and unwraps, standardwebhooks verifies, the delivery
worker sends over real sockets."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
import sqlalchemy as sa
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from media_server.jobs import outbox as outbox_module
from media_server.jobs.tables import outbox, webhook_endpoints
from media_server.settings import Settings
from media_server.webhooks import log
from media_server.webhooks.endpoints import EVENT_TYPES
from media_server.webhooks.objects import EventType
from workers.delivery_worker import Courier

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


@dataclass
class Hook:
    """A receiver that keeps what it gets."""

    url: str
    status: int = 200
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def await_messages(self, count: int) -> list[tuple[dict[str, str], bytes]]:
        deadline = time.monotonic() + 20
        while len(self.got) < count:
            assert time.monotonic() < deadline, self.got
            time.sleep(0.02)
        return self.got


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Receivers of the tests have private addresses."""
    return Settings(data_dir=tmp_path / "data", broker_url="redis://127.0.0.1:1/0", allow_private_urls=True)


@pytest.fixture
def hook() -> Iterator[Hook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            here.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(here.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here = Hook(f"http://127.0.0.1:{server.server_port}/hook")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield here
    server.shutdown()
    server.server_close()


@pytest.fixture
def courier(service: Any) -> Iterator[Courier]:
    """The delivery worker, at work in a thread."""
    loop = asyncio.new_event_loop()
    courier = Courier(service.settings, service.db, "deliveries@test:1")
    thread = threading.Thread(target=lambda: loop.run_until_complete(courier.run()))
    thread.start()
    yield courier
    loop.call_soon_threadsafe(courier.stop)
    thread.join()
    loop.close()


@pytest.fixture
def client(live: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live}/v1", api_key="anything", max_retries=0) as client:
        yield client


def _until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_openai_package_manages_endpoints(client: openai.OpenAI, hook: Hook) -> None:
    types = client.webhooks.event_types.list().data
    assert set(types) == set(EVENT_TYPES) == set(get_args(EventType))
    made = client.webhooks.create(name="room", url=hook.url, event_types=["video.completed"])
    assert made.signing_secret.startswith("whsec_") and made.object == "webhook_endpoint"
    found = client.webhooks.retrieve(made.id)
    assert "signing_secret" not in (found.model_extra or {})
    assert found.signing_secret_hint is not None and made.signing_secret.endswith(found.signing_secret_hint[-5:])
    assert (found.name, found.url, found.event_types) == ("room", hook.url, ["video.completed"])

    # an update that changes nothing leaves the time of the last one
    assert client.webhooks.update(made.id, name="room").updated_at == found.updated_at
    changed = client.webhooks.update(made.id, name="other", event_types=["video.failed", "video.completed"])
    assert (changed.name, changed.url, changed.event_types) == ("other", hook.url, ["video.failed", "video.completed"])

    more = [client.webhooks.create(name=f"{n}", url=hook.url, event_types=["video.failed"]).id for n in range(4)]
    assert [endpoint.id for endpoint in client.webhooks.list(limit=2)] == [*more[::-1], made.id]
    deleted = client.webhooks.delete(more[0])
    assert (deleted.id, deleted.deleted, deleted.object) == (more[0], True, "webhook_endpoint.deleted")
    for call in (client.webhooks.retrieve, client.webhooks.delete, client.webhooks.rotate_secret):
        with pytest.raises(openai.NotFoundError):
            call(more[0])
    with pytest.raises(openai.BadRequestError) as unknown:
        client.webhooks.create(name="a", url=hook.url, event_types=["response.completed"])
    assert unknown.value.param is not None and unknown.value.param.startswith("event_types")


def test_a_finished_job_is_told_and_both_packages_verify_it(
    client: openai.OpenAI, hook: Hook, working: Any, courier: Courier
) -> None:
    made = client.webhooks.create(name="room", url=hook.url, event_types=["video.completed"])
    client.webhooks.create(name="others", url=hook.url, event_types=["video.failed"])
    video = client.videos.create(prompt="a")
    ((headers, body),) = hook.await_messages(1)
    event = client.webhooks.unwrap(body, headers, secret=made.signing_secret)
    assert (event.to_dict()["type"], event.to_dict()["data"]) == ("video.completed", {"id": video.id})
    assert Webhook(made.signing_secret).verify(body, headers)["id"] == headers["webhook-id"]
    assert len(body) < 20_000
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, {**headers, "webhook-timestamp": "1"}, secret=made.signing_secret)
    # a film is told of once, its shots never
    client.webhooks.update(made.id, extra_body={"event_types": ["*"]})
    film = working.http.post("/v1/films", json={"idea": "a", "seconds": 2}).json()["id"]
    told = json.loads(hook.await_messages(2)[1][1])
    assert (told["type"], told["data"]["id"]) == ("film.completed", film)


def test_a_rotated_secret_signs_for_a_day(client: openai.OpenAI, hook: Hook, service: Any) -> None:
    first = client.webhooks.create(name="room", url=hook.url, event_types=["video.completed"])
    second = client.webhooks.rotate_secret(first.id, keep_old_secret_active_for_24_hours=True)
    third = client.webhooks.rotate_secret(first.id, keep_old_secret_active_for_24_hours=True)
    secrets = [third.signing_secret, second.signing_secret, first.signing_secret]
    assert len(set(secrets)) == 3

    def told() -> tuple[dict[str, str], bytes]:
        client.webhooks.test(first.id, event_type="video.completed")
        return hook.got[-1]

    headers, body = told()
    for secret in secrets:
        Webhook(secret).verify(body, headers)
    with service.db.write() as tx:
        row = tx.conn.execute(sa.select(webhook_endpoints)).one()
        assert all(86300 < until - tx.now() <= 86400 for _, until in row.old_secrets)
        aged = [[secret, until - 86400 * (number == 1)] for number, (secret, until) in enumerate(row.old_secrets)]
        tx.conn.execute(webhook_endpoints.update().values(old_secrets=aged))
    headers, body = told()
    Webhook(secrets[1]).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secrets[2]).verify(body, headers)
    # by default the old ones end at once
    last = client.webhooks.rotate_secret(first.id)
    headers, body = told()
    Webhook(last.signing_secret).verify(body, headers)
    for secret in secrets:
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, headers)


def test_a_test_tells_what_was_answered(client: openai.OpenAI, hook: Hook) -> None:
    made = client.webhooks.create(name="room", url=hook.url, event_types=["video.completed"])
    hook.status = 503
    result = client.webhooks.test(made.id, event_type="video.failed")
    assert (result.status_code, result.success, result.event_type) == (503, True, "video.failed")
    assert result.webhook_endpoint_id == made.id
    event = client.webhooks.unwrap(hook.got[0][1], hook.got[0][0], secret=made.signing_secret)
    assert event.to_dict()["type"] == "video.failed"
    # a test is no try: nothing is logged, retried or held against the endpoint
    assert client.get("/webhook_deliveries", cast_to=dict[str, Any])["data"] == []
    # what is answered with a redirect has not arrived: none is followed
    hook.status = 302
    with pytest.raises(openai.UnprocessableEntityError) as moved:
        client.webhooks.test(made.id, event_type="video.failed")
    assert (moved.value.code, moved.value.param) == ("webhook_redirected", "url") and "302" in moved.value.message
    client.webhooks.update(made.id, url="http://127.0.0.1:9/nobody")
    with pytest.raises(openai.UnprocessableEntityError) as silent:
        client.webhooks.test(made.id, event_type="video.failed")
    assert silent.value.code == "webhook_not_answered" and "127.0.0.1" not in silent.value.message


def test_a_refused_url_is_named_by_the_field_that_it_came_in(
    service: Any, client: openai.OpenAI, courier: Courier
) -> None:
    names = "https://name.invalid/hook"
    made = client.webhooks.create(name="room", url=names, event_types=["video.completed"])
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.webhooks.test(made.id, event_type="video.completed")
    assert " url: " in refused.value.message and "webhook_url" not in refused.value.message
    assert service.http.post("/v1/videos", json={"prompt": "a", "webhook_url": names}).status_code == 200
    service.worker.run_all()

    def said() -> dict[bool, str]:
        log = client.get("/webhook_deliveries", cast_to=dict[str, Any])["data"]
        return {item["webhook_endpoint_id"] is None: item["attempts"][0]["error"] for item in log if item["attempts"]}

    _until(lambda: len(said()) == 2)
    assert said()[True].startswith("webhook_url: ") and said()[False].startswith("url: ")


def test_the_log_says_what_became_of_a_message_and_it_can_be_sent_again(
    service: Any, hook: Hook, courier: Courier
) -> None:
    hook.status = 500
    body = {"prompt": "a", "webhook_url": hook.url}
    job_id = service.http.post("/v1/videos", json=body).json()["id"]
    service.worker.run_all()

    def entries(**query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = service.http.get("/v1/webhook_deliveries", params=query).json()["data"]
        return found

    _until(lambda: entries(job_id=job_id)[0]["attempts"])
    (entry,) = entries(job_id=job_id)
    assert (entry["status"], entry["event_type"], entry["url"]) == ("pending", "video.completed", hook.url)
    assert entry["webhook_endpoint_id"] is None
    (attempt,) = entry["attempts"]
    assert (attempt["number"], attempt["status_code"], attempt["error"]) == (1, 500, "HTTP 500")
    assert 4 <= entry["next_attempt_at"] - attempt["started_at"] <= 8

    # one that waits is tried now, as its next try
    hook.status = 200
    again = service.http.post(f"/v1/webhook_deliveries/{entry['id']}/replay")
    assert again.status_code == 200, again.text
    _until(lambda: entries(status="delivered"))
    assert entries(status="pending") == entries(status="dead") == entries(event_type="film.failed") == []
    # one that was delivered is sent once more: the same bytes under the same id
    service.http.post(f"/v1/webhook_deliveries/{entry['id']}/replay")
    messages = hook.await_messages(3)
    assert len({(headers["webhook-id"], content) for headers, content in messages}) == 1
    _until(lambda: entries(status="delivered"))
    final = service.http.get(f"/v1/webhook_deliveries/{entry['id']}").json()
    assert [item["status_code"] for item in final["attempts"]] == [500, 200, 200]
    assert final["payload"].encode() == messages[0][1]
    assert service.http.get("/v1/webhook_deliveries/evt_none").status_code == 404
    # the URL goes with the job, and then there is nowhere to send it
    assert service.http.delete(f"/v1/videos/{job_id}").status_code == 200
    gone = service.http.post(f"/v1/webhook_deliveries/{entry['id']}/replay")
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "erased")


def test_an_endpoint_that_fails_for_days_is_disabled_and_gets_what_it_missed_once_enabled(
    service: Any, hook: Hook, courier: Courier
) -> None:
    hook.status = 500
    body = {"name": "room", "url": hook.url, "event_types": ["video.completed"]}
    path = f"/v1/webhook_endpoints/{service.http.post('/v1/webhook_endpoints', json=body).json()['id']}"
    service.completed_video()
    _until(lambda: service.http.get(path).json()["failing_since"])
    assert service.http.get(path).json()["is_enabled"]
    five_days = outbox_module.DISABLE_AFTER_S
    with service.db.write() as tx:
        tx.conn.execute(webhook_endpoints.update().values(failing_since=tx.now() - five_days))
        tx.conn.execute(outbox.update().values(next_at=tx.now()))
    _until(lambda: not service.http.get(path).json()["is_enabled"])
    assert service.http.get(path).json()["disabled_reason"] == "every message has failed for 5 days"
    # what ends now is not for it; what was on its way waits
    service.completed_video()
    seen = len(hook.got)
    (entry,) = service.http.get("/v1/webhook_deliveries").json()["data"]
    for refused in (f"/v1/webhook_deliveries/{entry['id']}/replay", f"{path}/replay"):
        answer = service.http.post(refused, json={"since": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "endpoint_disabled")
    hook.status = 200
    enabled = service.http.post(path, json={"is_enabled": True}).json()
    assert (enabled["is_enabled"], enabled["disabled_reason"], enabled["failing_since"]) == (True, None, None)
    with service.db.write() as tx:
        tx.conn.execute(outbox.update().values(next_at=tx.now()))
    hook.await_messages(seen + 1)


def test_all_that_an_endpoint_missed_is_replayed_by_a_fresh_schedule(
    service: Any, hook: Hook, courier: Courier
) -> None:
    hook.status = 500
    body = {"name": "room", "url": hook.url, "event_types": ["video.completed"]}
    endpoint_id = service.http.post("/v1/webhook_endpoints", json=body).json()["id"]
    for _ in range(3):
        service.completed_video()
    hook.await_messages(3)
    _until(lambda: all(item["attempts"] for item in service.http.get("/v1/webhook_deliveries").json()["data"]))
    with service.db.write() as tx:
        # one was given up after ten tries, one lies before the span
        ids = list(tx.conn.scalars(sa.select(outbox.c.id).order_by(outbox.c.created_at)))
        dead = {"state": "dead", "attempts": 10, "next_at": None, "settled_at": tx.now()}
        tx.conn.execute(outbox.update().where(outbox.c.id == ids[1]).values(**dead))
        tx.conn.execute(outbox.update().where(outbox.c.id == ids[0]).values(created_at=10.0))
    answer = service.http.post(f"/v1/webhook_endpoints/{endpoint_id}/replay", json={"since": 100})
    assert answer.json() == {
        "object": "webhook_endpoint.replay", "webhook_endpoint_id": endpoint_id, "replayed": 2,
    }  # fmt: skip
    _until(lambda: _attempts(service) == [1, 11, 2])
    with service.db.read() as tx:
        rows = {row.id: row for row in tx.conn.execute(sa.select(outbox))}
        # the eleventh try is the first of a fresh schedule: the next is in seconds
        assert (rows[ids[1]].state, rows[ids[1]].uncounted) == ("pending", 10)
        assert rows[ids[1]].next_at - tx.now() < 7 < rows[ids[2]].next_at - tx.now()
    for bad in ({"since": 5, "until": 5}, {}, {"since": -1}, {"since": True}):
        assert service.http.post(f"/v1/webhook_endpoints/{endpoint_id}/replay", json=bad).status_code == 400


def _attempts(service: Any) -> list[int]:
    with service.db.read() as tx:
        return list(tx.conn.scalars(sa.select(outbox.c.attempts).order_by(outbox.c.id)))


def test_the_log_is_forgotten_after_a_month(service: Any) -> None:
    service.http.post("/v1/videos", json={"prompt": "a", "webhook_url": "http://127.0.0.1:9/"})
    service.worker.run_all()
    with service.db.write() as tx:
        tx.conn.execute(outbox.update().values(state="dead", settled_at=tx.now() - log.KEEP_S + 60))
    assert log.forget_settled(service.db) == 0
    with service.db.write() as tx:
        tx.conn.execute(outbox.update().values(settled_at=tx.now() - log.KEEP_S))
    assert log.forget_settled(service.db) == 1
    assert service.http.get("/v1/webhook_deliveries").json()["data"] == []
    body = {"name": "room", "url": "https://example.com/hook", "event_types": ["*"]}
    path = f"/v1/webhook_endpoints/{service.http.post('/v1/webhook_endpoints', json=body).json()['id']}"
    service.completed_video()
    with service.db.write() as tx:
        tx.conn.execute(outbox.update().values(created_at=tx.now() - log.KEEP_S))
    assert log.forget_settled(service.db) == 0
    service.http.post(path, json={"is_enabled": False})
    assert log.forget_settled(service.db) == 1


def test_pages_of_the_log(service: Any) -> None:
    for _ in range(5):
        service.http.post("/v1/videos", json={"prompt": "a", "webhook_url": "http://127.0.0.1:9/"})
    service.worker.run_all()
    with service.db.read() as tx:
        wanted = list(tx.conn.scalars(sa.select(outbox.c.id).order_by(outbox.c.created_at.desc(), outbox.c.id.desc())))
    found: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        after = {} if page["last_id"] is None else {"after": page["last_id"]}
        page = service.http.get("/v1/webhook_deliveries", params={"limit": 2, **after}).json()
        found += [item["id"] for item in page["data"]]
    assert found == wanted
    for path, rule in (("deliveries", "the id of a delivery"), ("endpoints", "the id of a webhook endpoint")):
        refused = service.http.get(f"/v1/webhook_{path}", params={"after": "x"})
        assert refused.status_code == 400
        assert (refused.json()["param"], refused.json()["rule"], refused.json()["value"]) == ("after", rule, "x")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://example.com/hook", "https"),
        ("https://127.0.0.1/hook", "public"),
        ("https://[::ffff:10.0.0.1]/hook", "public"),
        ("https://169.254.169.254/latest", "public"),
        ("https://user:pass@example.com/", "user name"),
        ("nonsense", "https"),
        ("https://example.com:65536/", "port"),
        ("https://example.com:0/", "port"),
    ],
)
def test_urls_inside_are_refused(service: Any, url: str, rule: str) -> None:
    # the same application with the rules of the open internet
    object.__setattr__(service.settings, "allow_private_urls", False)
    answer = service.http.post("/v1/webhook_endpoints", json={"name": "n", "url": url, "event_types": ["*"]})
    assert (answer.status_code, answer.json()["param"]) == (400, "url")
    assert rule in answer.json()["rule"]
    assert service.contents()[0]["webhook_endpoints"] == 0


def test_there_are_at_most_so_many_endpoints(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.webhooks.endpoints.MAX_ENDPOINTS", 2)
    body = {"name": "n", "url": "https://example.com/hook", "event_types": ["*"]}

    def create() -> httpx.Response:
        answer: httpx.Response = service.http.post("/v1/webhook_endpoints", json=body)
        return answer

    assert [create().status_code for _ in range(3)] == [200, 200, 409]
