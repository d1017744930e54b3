"""The delivery worker: sends the outbox's messages as signed webhooks and plans their retries.

Each message is taken under a lease and sent at least once; its id lets the receiver notice a second copy. A receiver
gets few messages at once and each has a deadline, so a slow or dead one holds up its own messages only.
"""

import argparse
import asyncio
import contextlib
import logging
import queue
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from celery import Celery

from media_server import crash_points
from media_server.jobs.database import Database, open_database
from media_server.jobs.doorbell import make_celery
from media_server.jobs.outbox import DELIVERIES_POOL, Message, claim_due, settle
from media_server.settings import Settings, load_settings
from media_server.tracing import Tracing, open_tracing
from media_server.webhooks.retries import Verdict, judge
from media_server.webhooks.sending import Sender
from media_server.webhooks.signing import service_secret
from workers.leases import worker_id
from workers.logging_setup import setup_logging

logger = logging.getLogger(__name__)

LEASE_S = 60.0
# room for dozens of receivers that are found dead, each of which holds MAX_A_RECEIVER places for TIMEOUT_S
MAX_AT_ONCE = 256
MAX_A_RECEIVER = 4
# once they are known they get one message at once each, and this many in all
MAX_FAILING = 128
_REMEMBERED = 4096
# without a doorbell; an idle look reads one row
_POLL_S = 1.0
_GATHER_S = 0.02
_DRAIN_S = 22.0


def main(argv: Sequence[str]) -> int:
    """Send webhooks, signed and retried."""
    parser = argparse.ArgumentParser(prog="media-server deliveries", description=main.__doc__)
    parser.add_argument("--name", default="deliveries", help="name of this worker in logs and leases")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    setup_logging(settings, arguments.name)
    asyncio.run(serve(settings, worker_id(arguments.name)))
    return 0


async def serve(settings: Settings, worker: str) -> None:
    """Deliver until SIGTERM."""
    loop = asyncio.get_running_loop()
    tracing = open_tracing(settings, "deliveries")
    courier = Courier(settings, open_database(settings.database), worker, tracing)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, courier.stop)
    listener = partial(_listen, make_celery(settings), partial(loop.call_soon_threadsafe, courier.news.set))
    threading.Thread(target=listener, daemon=True, name="doorbell").start()
    await courier.run()
    tracing.close()


class Courier:
    """Messages on their way, and how many of them go to each receiver."""

    def __init__(self, settings: Settings, db: Database, worker: str, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.db = db
        self.worker = worker
        self.news = asyncio.Event()
        self.is_stopping = False
        self.busy: Counter[str] = Counter()
        # receivers whose last try failed, the latest last
        self.failing: dict[str, None] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.jitter = random.Random()
        self.tracing = tracing or Tracing()

    def stop(self) -> None:
        """Take no more messages; those on their way are finished."""
        self.is_stopping = True
        self.news.set()

    async def run(self) -> None:
        """Take and send messages until stopped."""
        async with Sender(allow_private=self.settings.allow_private_urls, max_at_once=MAX_AT_ONCE) as sender:
            logger.info("%s delivers", self.worker)
            while not self.is_stopping:
                self.news.clear()
                for message in await self._take():
                    self._start(sender, message)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.news.wait(), _POLL_S)
                    # tries that end together are one reason to look
                    await asyncio.sleep(_GATHER_S)
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=_DRAIN_S)

    async def _take(self) -> list[Message]:
        room = MAX_AT_ONCE - len(self.tasks)
        if room == 0:
            return []
        take = partial(
            claim_due,
            lease_s=LEASE_S,
            limit=room,
            busy=dict(self.busy),
            per_receiver=MAX_A_RECEIVER,
            failing=list(self.failing),
            limit_failing=MAX_FAILING,
        )
        try:
            return await asyncio.to_thread(take, self.db, self.worker)
        except Exception:
            logger.exception("the outbox could not be read")
            return []

    def _start(self, sender: Sender, message: Message) -> None:
        receiver = message.receiver
        self.busy[receiver] += 1
        task = asyncio.create_task(self._deliver(sender, message))
        self.tasks.add(task)

        def finish(done: asyncio.Task[None]) -> None:
            self.tasks.discard(done)
            self.busy[receiver] -= 1
            if self.busy[receiver] == 0:
                del self.busy[receiver]
            if not done.cancelled() and (error := done.exception()) is not None:
                # the lease lapses and the message is sent again
                logger.error("message %s: the try was lost", message.id, exc_info=error)
            self.news.set()

        task.add_done_callback(finish)

    def _note(self, receiver: str, *, is_failing: bool) -> None:
        """Remember whether a receiver answers well."""
        self.failing.pop(receiver, None)
        if is_failing:
            self.failing[receiver] = None
            if len(self.failing) > _REMEMBERED:
                del self.failing[next(iter(self.failing))]

    async def _deliver(self, sender: Sender, message: Message) -> None:
        """Make one try and write down what follows from it."""
        started_at = time.time()
        begun = time.monotonic()
        secrets = message.secrets or [service_secret(self.settings)]
        attempt = message.attempts - message.uncounted + 1
        param = "webhook_url" if message.endpoint_id is None else "url"
        about: dict[str, str | int] = {"message_id": message.id, "attempt": attempt}
        if message.job_id is not None:
            about["job_id"] = message.job_id
        if message.batch_id is not None:
            about["batch_id"] = message.batch_id
        with self.tracing.span("webhook delivery", message.traceparent, kind="client", **about) as span:
            answer = await sender.send(
                message.url, message.payload, message_id=message.id, secrets=secrets, param=param
            )
            crash_points.reach("message.sent")
            try:
                outcome = judge(attempt, answer.status, answer.headers, time.time(), self.jitter)
            except Exception:
                # whatever a receiver may answer, its try counts
                logger.exception("message %s: the answer could not be read", message.id)
                outcome = judge(attempt, None, {}, time.time(), self.jitter)
            is_delivered = outcome.verdict is Verdict.DELIVERED
            span.set(http__response__status_code=answer.status, type=message.type, verdict=outcome.verdict.name.lower())
            if not is_delivered:
                span.fail(str(answer.status or "no answer"))
        self._note(message.receiver, is_failing=not is_delivered)
        error = None if is_delivered else answer.error or f"HTTP {answer.status}"
        await asyncio.to_thread(
            settle,
            self.db,
            message,
            self.worker,
            started_at=started_at,
            duration_s=time.monotonic() - begun,
            status_code=answer.status,
            error=error,
            retry_in_s=outcome.wait_s,
            disables="the receiver answered 410 Gone" if outcome.verdict is Verdict.DISABLED else None,
        )
        level = logging.INFO if is_delivered else logging.WARNING
        again = f", again in {outcome.wait_s:.0f} s" if outcome.wait_s is not None else ""
        subject = message.job_id or message.batch_id
        logger.log(level, "message %s of %s: %s%s", message.id, subject, error or "delivered", again)


def _listen(celery: Celery, wake: Callable[[], object]) -> None:
    """Take the doorbells of the deliveries' pool, for ever; what they say is to look."""
    while True:
        try:
            with celery.connection_for_read() as connection, connection.SimpleQueue(f"pool.{DELIVERIES_POOL}") as bell:
                while True:
                    with contextlib.suppress(queue.Empty):
                        bell.get(timeout=_POLL_S * 5).ack()
                        wake()
        except Exception as error:
            # the poll goes on without it
            logger.warning("the doorbell of deliveries is silent (%s)", type(error).__name__)
            time.sleep(_POLL_S * 5)
