"""Storyboards by a server at `engine_url` that is slow, refuses or writes nonsense: leases, cancels, no words kept."""

import io
import json
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from media_server.artifacts.store import open_artifacts
from media_server.jobs import claims, store
from media_server.jobs.doorbell import make_celery
from media_server.jobs.spec import Claim, JobSpec
from media_server.jobs.states import Status
from media_server.jobs.tables import attempts, events, jobs
from media_server.logging_setup import JsonFormatter, PlainFormatter
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.cards import CAPTIONED_CARD
from tests.fresh_database import open_migrated
from workers import pool_worker
from workers.pool_worker import PoolContext
from workers.storyboard_worker import Handler

CANARY = "xylophone"
# with a colour and a kind, so that nothing but the shots is asked for
IDEA = f"a red ball meets a {CANARY}"


class Server(ThreadingHTTPServer):
    """A server that answers as the test says; one that waits sees when it is left."""

    daemon_threads = True

    def __init__(self, answer: Callable[["Connection"], None]) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.answer = answer
        self.was_asked = threading.Event()
        self.was_left = threading.Event()


class Connection(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.was_asked.set()
        self.server.answer(self)

    def reply(self, status: int, content: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def write_text(self, text: str) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
        self.reply(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

    def wait_in_silence(self) -> None:
        # what can be read from one who has asked is its end
        while not select.select([self.connection], [], [], 0.05)[0]:
            pass
        self.server.was_left.set()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Callable[[Connection], None]], tuple[Server, PoolContext]]]:
    opened: list[tuple[Server, PoolContext, threading.Thread]] = []

    def run(answer: Callable[[Connection], None]) -> tuple[Server, PoolContext]:
        server = Server(answer)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        settings = Settings(
            data_dir=tmp_path,
            broker_url="redis://127.0.0.1:1/0",
            engine_url=f"http://127.0.0.1:{server.server_address[1]}",
            lease_s=5.0,
        )
        db = open_migrated(settings.database)
        publish(db, CAPTIONED_CARD, "video-0@test:1")
        context = PoolContext(
            settings, db, open_artifacts(settings), make_celery(settings), threading.Event(), "text", "text@test:1"
        )
        opened.append((server, context, thread))
        return server, context

    yield run
    for server, context, thread in opened:
        server.shutdown()
        thread.join()
        server.server_close()
        context.celery.close()
        context.db.close()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    """What the service's own formatters write."""
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    handlers = [logging.StreamHandler(stream), logging.StreamHandler(stream)]
    for handler, formatter in zip(handlers, (PlainFormatter(), JsonFormatter("test")), strict=True):
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(handler)
    yield stream
    for handler in handlers:
        logging.getLogger().removeHandler(handler)


def begin(context: PoolContext, max_attempts: int = 1) -> Claim:
    spec = JobSpec(
        kind="storyboard",
        pool="text",
        model="big",
        params={"num_frames": 80, "fps": 16, "seed": 1, "video_model": CAPTIONED_CARD.name, "shots": 2},
        prompts={"idea": IDEA},
        max_attempts=max_attempts,
    )
    store.submit(context.db, spec)
    claim = claims.claim_next(context.db, "text", context.worker, context.settings.lease_s)
    assert claim is not None
    return claim


def stored(context: PoolContext) -> str:
    """Everything that is kept of jobs, but for the prompts themselves."""
    with context.db.read() as tx:
        return "\n".join(str(row) for table in (jobs, attempts, events) for row in tx.conn.execute(sa.select(table)))


def test_a_silent_server_costs_no_lease_and_a_cancel_is_heard(
    serve: Callable[[Callable[[Connection], None]], tuple[Server, PoolContext]],
) -> None:
    server, context = serve(Connection.wait_in_silence)
    claim = begin(context)
    working = threading.Thread(target=Handler(context.settings), args=(context, claim), daemon=True)
    working.start()
    assert server.was_asked.wait(30)
    first = store.get(context.db, claim.job.id).lease_until
    assert first is not None
    deadline = time.monotonic() + 30
    while (store.get(context.db, claim.job.id).lease_until or 0.0) <= first:
        assert time.monotonic() < deadline, "no beat came"
        time.sleep(0.05)
    store.request_cancel(context.db, claim.job.id)
    working.join(30)
    assert store.get(context.db, claim.job.id).status is Status.CANCELLED
    # nor does the server write on for nobody
    assert server.was_left.wait(30)


def test_a_worker_that_stops_leaves_a_silent_server(
    serve: Callable[[Callable[[Connection], None]], tuple[Server, PoolContext]],
) -> None:
    server, context = serve(Connection.wait_in_silence)
    claim = begin(context)
    working = threading.Thread(target=Handler(context.settings), args=(context, claim), daemon=True)
    working.start()
    assert server.was_asked.wait(30)
    context.stopping.set()
    working.join(30)
    job = store.get(context.db, claim.job.id)
    assert (job.status, job.uncounted) == (Status.QUEUED, 1)
    assert server.was_left.wait(30)


def _refuse(status: int) -> Callable[[Connection], None]:
    body = json.dumps({"error": {"message": f"cannot read {IDEA!r}", "code": "bad"}}).encode()
    return lambda connection: connection.reply(status, body)


def _write(stream: str) -> Callable[[Connection], None]:
    return lambda connection: connection.reply(200, stream.encode(), "text/event-stream")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda connection: connection.write_text(f'{{"title": "the {CANARY}'), "storyboard_failed"),
        (lambda connection: connection.write_text(f'{{"shots": [{{"prompt": "{CANARY}"}}]}}'), "storyboard_failed"),
        (_refuse(400), "invalid_request"),
        (_refuse(429), "engine_unavailable"),
        (_refuse(502), "engine_unavailable"),
        # no JSON at all, and none that can be understood: nobody foresaw that
        (_write(f"data: {CANARY}\n\n"), "internal_error"),
        (_write(f'data: {{"usage": "{CANARY}"}}\n\n'), "internal_error"),
    ],
)
def test_no_words_reach_the_log_or_a_stored_error(
    serve: Callable[[Callable[[Connection], None]], tuple[Server, PoolContext]],
    logged: io.StringIO,
    answer: Callable[[Connection], None],
    code: str,
) -> None:
    _, context = serve(answer)
    claim = begin(context)
    pool_worker._handle(context, claim, Handler(context.settings))
    job = store.get(context.db, claim.job.id)
    assert (job.status, job.error_code) == (Status.FAILED, code)
    assert claim.job.id in logged.getvalue()
    assert CANARY not in logged.getvalue()
    # the text of a storyboard is sent to its readers as it is written, and erased with the job
    with context.db.write() as tx:
        tx.conn.execute(events.delete().where(events.c.type == "job.progress"))
    assert CANARY not in stored(context)
