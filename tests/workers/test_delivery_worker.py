"""Deliveries over real sockets: signed, retried, disabled by 410, and none held up by another's slowness."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from standardwebhooks.webhooks import Webhook

from media_server.http_fetch import resolve
from media_server.jobs import store
from media_server.jobs.claims import claim_next, complete
from media_server.jobs.database import Database
from media_server.jobs.outbox import claim_due, settle
from media_server.jobs.spec import JobSpec, Result
from media_server.jobs.tables import deliveries, outbox, webhook_endpoints
from media_server.settings import Settings
from media_server.webhooks.signing import new_secret, service_secret
from tests.fresh_database import open_migrated
from workers.delivery_worker import MAX_A_RECEIVER, Courier

WORKER = "deliveries@test:1"
# the base64 of 24 zeros
MINE = "whsec_" + "A" * 32


@dataclass
class Receiver:
    """A webhook receiver that answers as it is told to."""

    url: str
    answer: Callable[[], tuple[int, dict[str, str]]]
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0


@contextmanager
def receiver(answer: Callable[[], tuple[int, dict[str, str]]]) -> Iterator[Receiver]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with lock:
                here.at_once += 1
                here.most_at_once = max(here.most_at_once, here.at_once)
            body = self.rfile.read(int(self.headers["content-length"]))
            here.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status, headers = here.answer()
            with lock:
                here.at_once -= 1
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    here = Receiver(f"http://127.0.0.1:{server.server_port}/hook", answer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, allow_private_urls=True)


@pytest.fixture
def db(settings: Settings) -> Iterator[Database]:
    db = open_migrated(settings.database)
    yield db
    db.close()


def finish_job(db: Database, webhook_url: str | None, owner: str | None = None) -> str:
    spec = JobSpec(kind="video", pool="video", prompts={"prompt": "a"}, webhook_url=webhook_url, owner_key_id=owner)
    job = store.submit(db, spec)
    claim = claim_next(db, "video", "w", 20.0)
    assert claim is not None and complete(db, claim, Result())
    return job.id


def add_endpoint(db: Database, url: str, id: str = "whe_1", owner: str | None = None) -> str:
    secret = new_secret()
    with db.write() as tx:
        tx.conn.execute(
            webhook_endpoints.insert().values(
                id=id,
                owner_key_id=owner,
                name="e",
                url=url,
                event_types=["video.completed"],
                secret=secret,
                old_secrets=[],
                is_enabled=True,
                created_at=0.0,
                updated_at=0.0,
            )
        )
    return secret


def deliver_until(settings: Settings, db: Database, is_done: Callable[[], bool], limit_s: float = 10.0) -> None:
    async def run() -> None:
        courier = Courier(settings, db, WORKER)
        task = asyncio.create_task(courier.run())
        deadline = time.monotonic() + limit_s
        while not is_done() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        courier.stop()
        await task

    asyncio.run(run())
    assert is_done()


def states(db: Database) -> list[str]:
    with db.read() as tx:
        return list(tx.conn.scalars(sa.select(outbox.c.state).order_by(outbox.c.created_at, outbox.c.id)))


def test_a_finished_job_is_announced_with_a_signature_that_verifies(settings: Settings, db: Database) -> None:
    with receiver(lambda: (204, {})) as hook:
        job_id = finish_job(db, hook.url)
        deliver_until(settings, db, lambda: states(db) == ["delivered"])
        ((headers, body),) = hook.got
    event = Webhook(service_secret(settings)).verify(body, headers)
    assert event["type"] == "video.completed" and event["data"] == {"id": job_id}
    assert headers["webhook-id"] == event["id"] and headers["host"] == hook.url.split("/")[2]
    assert len(body) < 20_000
    with db.read() as tx:
        (row,) = tx.conn.execute(sa.select(deliveries)).all()
    assert (row.number, row.status_code, row.error) == (1, 204, None)


def test_the_service_secret_is_kept_and_private(settings: Settings) -> None:
    secret = service_secret(settings)
    assert service_secret(settings) == secret
    assert (settings.data_dir / "webhook-secret").stat().st_mode & 0o777 == 0o600
    assert service_secret(settings.model_copy(update={"webhook_secret": MINE})) == MINE


def test_a_failure_is_tried_again_later_with_the_same_id_and_bytes(settings: Settings, db: Database) -> None:
    answers = [(500, {}), (302, {"location": "/elsewhere"}), (200, {})]
    with receiver(lambda: answers[len(hook.got) - 1]) as hook:
        finish_job(db, hook.url)
        for number in (1, 2):
            deliver_until(settings, db, lambda number=number: len(hook.got) == number and next_try(db) is not None)  # type: ignore[misc]
            wait_s = next_try(db)
            # Standard Webhooks: 5 s, then 5 min, with up to a fifth on top
            assert wait_s is not None and {1: 4 < wait_s <= 6, 2: 299 < wait_s <= 360}[number]
            with db.write() as tx:
                tx.conn.execute(outbox.update().values(next_at=0.0))
        deliver_until(settings, db, lambda: states(db) == ["delivered"])
    assert len({(headers["webhook-id"], body) for headers, body in hook.got}) == 1
    with db.read() as tx:
        assert list(tx.conn.scalars(sa.select(deliveries.c.status_code).order_by(deliveries.c.number))) == [
            500,
            302,
            200,
        ]


def next_try(db: Database) -> float | None:
    with db.read() as tx:
        row = tx.conn.execute(sa.select(outbox).where(outbox.c.lease_owner.is_(None), outbox.c.attempts > 0)).first()
        return None if row is None or row.next_at is None else row.next_at - tx.now()


def test_410_disables_the_endpoint_and_nothing_more_is_sent(settings: Settings, db: Database) -> None:
    with receiver(lambda: (410, {})) as hook:
        secret = add_endpoint(db, hook.url)
        finish_job(db, None)
        deliver_until(settings, db, lambda: states(db) == ["dead"])
        finish_job(db, None)
        assert len(hook.got) == 1
        Webhook(secret).verify(hook.got[0][1], hook.got[0][0])
    with db.read() as tx:
        row = tx.conn.execute(sa.select(webhook_endpoints)).one()
    assert not row.is_enabled and "410" in row.disabled_reason and row.failing_since is not None


def test_a_message_waits_while_its_endpoint_is_disabled(db: Database) -> None:
    add_endpoint(db, "http://127.0.0.1:9/")
    finish_job(db, None)
    with db.write() as tx:
        tx.conn.execute(webhook_endpoints.update().values(is_enabled=False))
    assert claim_due(db, WORKER, lease_s=60) == []
    with db.write() as tx:
        tx.conn.execute(webhook_endpoints.update().values(is_enabled=True))
    assert len(claim_due(db, WORKER, lease_s=60)) == 1


def test_a_slow_receiver_slows_nothing_else(settings: Settings, db: Database) -> None:
    release = threading.Event()

    def slow() -> tuple[int, dict[str, str]]:
        release.wait(10)
        return 200, {}

    with receiver(slow) as stuck, receiver(lambda: (200, {})) as quick:
        for _ in range(12):
            finish_job(db, stuck.url)
        for _ in range(12):
            finish_job(db, quick.url)
        started = time.monotonic()

        def is_done() -> bool:
            # the quick one must have all while the slow one still holds its first
            if len(quick.got) == 12:
                release.set()
            return set(states(db)) == {"delivered"}

        try:
            deliver_until(settings, db, is_done)
        finally:
            release.set()
        assert time.monotonic() - started < 8
        assert stuck.most_at_once <= MAX_A_RECEIVER
        assert len({headers["webhook-id"] for headers, _ in quick.got}) == 12


def test_a_slow_receiver_slows_no_other_of_its_host(settings: Settings, db: Database) -> None:
    """An endpoint, the same owner's URL and another owner's, all on one host and port: the slow one is alone in it."""
    release = threading.Event()
    lock = threading.Lock()
    arrived: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with lock:
                arrived.append(self.path)
            if self.path == "/slow":
                release.wait(30)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    add_endpoint(db, f"{host}/slow", id="whe_slow", owner="key_a")
    for _ in range(MAX_A_RECEIVER + 2):
        finish_job(db, None, owner="key_a")
    add_endpoint(db, f"{host}/endpoint", id="whe_quick", owner="key_b")
    for _ in range(3):
        finish_job(db, f"{host}/own", owner="key_b")
    finish_job(db, f"{host}/other", owner="key_c")
    quick = ["/endpoint"] * 3 + ["/other"] + ["/own"] * 3

    def is_done() -> bool:
        with lock:
            came = sorted(path for path in arrived if path != "/slow")
        if came == quick:
            # they have come while the slow one still holds its first
            assert arrived.count("/slow") <= MAX_A_RECEIVER or release.is_set()
            release.set()
        return set(states(db)) == {"delivered"}

    try:
        deliver_until(settings, db, is_done, 30)
    finally:
        release.set()
        server.shutdown()
        server.server_close()


def test_those_that_fail_share_their_places_and_leave_the_others_free(db: Database) -> None:
    dead = [f"http://dead-{number}.test:80" for number in range(6)]
    for url in dead:
        for _ in range(2):
            finish_job(db, url)
    finish_job(db, "http://good.test/")
    take = partial(claim_due, db, WORKER, lease_s=60, limit=8, per_receiver=4, failing=dead)
    assert take(busy=dict.fromkeys(dead[:3], 1), limit_failing=3)[0].receiver == "http://good.test:80"
    got = [message.receiver for message in take(busy={dead[0]: 1}, limit_failing=4)]
    assert len(got) == len(set(got)) == 3 and set(got) <= set(dead[1:])


def test_who_fails_is_known_until_it_answers_well(settings: Settings, db: Database) -> None:
    courier = Courier(settings, db, WORKER)

    async def run(hook: Receiver) -> list[list[str]]:
        task = asyncio.create_task(courier.run())
        known = []
        for count, status in enumerate((500, 200), start=1):
            hook.answer = lambda status=status: (status, {})  # type: ignore[misc]
            await asyncio.to_thread(finish_job, db, hook.url)
            while len(hook.got) < count or courier.tasks:
                await asyncio.sleep(0.02)
            known.append(list(courier.failing))
        courier.stop()
        await task
        return known

    with receiver(lambda: (200, {})) as hook:
        assert asyncio.run(run(hook)) == [[hook.url.removesuffix("/hook")], []]


def test_a_receiver_gets_its_share_and_the_queue_behind_it_is_reached(db: Database) -> None:
    for _ in range(6):
        finish_job(db, "http://one.test/a")
    for _ in range(2):
        finish_job(db, "http://two.test/a")
    first = claim_due(db, WORKER, lease_s=60, limit=8, per_receiver=4)
    assert [message.url for message in first] == ["http://one.test/a"] * 4 + ["http://two.test/a"] * 2
    assert claim_due(db, WORKER, lease_s=60, limit=8, busy={"http://one.test:80": 4}, per_receiver=4) == []
    assert len(claim_due(db, WORKER, lease_s=60, limit=8, busy={"http://one.test:80": 3}, per_receiver=4)) == 1


def test_however_many_wait_for_one_receiver_the_others_are_found(db: Database) -> None:
    for number in range(30):
        # each its own URL, as programs that wait for one answer have them; a host's case and default port are no other
        finish_job(db, f"https://{'ONE' if number % 2 else 'one'}.test{':443' if number % 3 else ''}/{number}")
    finish_job(db, "https://one.test.example/a")
    first = claim_due(db, WORKER, lease_s=60, limit=16, per_receiver=4)
    assert [message.receiver for message in first] == ["https://one.test:443"] * 4 + ["https://one.test.example:443"]
    # a name that begins with a busy one's is another's
    finish_job(db, "https://one.test.example/b")
    (other,) = claim_due(db, WORKER, lease_s=60, limit=16, busy={"https://one.test:443": 4}, per_receiver=4)
    assert other.url == "https://one.test.example/b"


def test_a_dead_name_server_holds_up_nobody_else(
    settings: Settings, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More look-ups hang than the pool has threads in which the store is asked."""
    release = threading.Event()

    def hang(url: str, **more: Any) -> Any:
        if "dead" in url:
            release.wait(30)
        return resolve(url, **more)

    monkeypatch.setattr("media_server.webhooks.sending.resolve", hang)
    with receiver(lambda: (200, {})) as quick:
        for number in range(48):
            finish_job(db, f"http://dead-{number % 12}.test/a")
        for _ in range(4):
            finish_job(db, quick.url)

        def is_done() -> bool:
            if states(db).count("delivered") < 4:
                return False
            # the worker ends once its look-ups have
            release.set()
            return True

        try:
            deliver_until(settings, db, is_done, 20)
        finally:
            release.set()
        assert len(quick.got) == 4


@pytest.mark.parametrize("url", ["https://one.test:99999/", "https://one]test/", "https://[one/", "nonsense", ""])
def test_a_url_that_is_none_keeps_no_job_from_ending_and_no_other_message(
    settings: Settings, db: Database, url: str
) -> None:
    with receiver(lambda: (200, {})) as hook:
        finish_job(db, url)
        finish_job(db, hook.url)
        deliver_until(settings, db, lambda: states(db).count("delivered") == 1)


def test_only_who_took_a_message_may_settle_it(db: Database) -> None:
    finish_job(db, "http://one.test/a")
    (message,) = claim_due(db, WORKER, lease_s=60)
    assert not settle(db, message, "another", started_at=0.0, duration_s=0.0, status_code=200)
    assert settle(db, message, WORKER, started_at=0.0, duration_s=0.0, status_code=200)
    assert not settle(db, message, WORKER, started_at=0.0, duration_s=0.0, status_code=200)


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9/hook", "scheme is https"), ("https://127.0.0.1:9/hook", "public address")],
)
def test_private_addresses_are_not_called(tmp_path: Path, db: Database, url: str, reason: str) -> None:
    finish_job(db, url)
    deliver_until(Settings(data_dir=tmp_path), db, lambda: next_try(db) is not None)
    with db.read() as tx:
        (row,) = tx.conn.execute(sa.select(deliveries)).all()
    assert row.status_code is None and reason in row.error and "127.0.0.1" not in row.error


def test_payload_names_the_job_and_nothing_of_its_prompt(db: Database) -> None:
    job_id = finish_job(db, "http://one.test/a")
    (message,) = claim_due(db, WORKER, lease_s=60)
    payload = json.loads(message.payload)
    assert payload == {
        "id": message.id,
        "object": "event",
        "created_at": payload["created_at"],
        "type": "video.completed",
        "data": {"id": job_id},
    }
