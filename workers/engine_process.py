"""One replica of a language model: requests from its stream in Valkey, one pipeline of tokens out a step.

Life: convert the embedded model if it is needed -> load -> publish the card -> announce -> serve. On SIGTERM it says
that it drains, finishes what runs within DRAIN_S, fails the rest and leaves.

Valkey may vanish at any moment: events are kept until their stream has lingered, and a server that comes back empty is
given them again. Invariants: a request id is accepted once; its last event has `is_last`; nothing of it follows.
"""

import argparse
import logging
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import redis
import torch
import transformers
from pydantic import TypeAdapter, ValidationError

from llm.checkpoints.embedded import NAME as EMBEDDED_NAME
from llm.checkpoints.embedded import ensure_embedded
from llm.engine import Engine
from llm.errors import EngineError, RequestRefused
from llm.load import load_engine
from llm.request import FinishReason, Output, OutputError
from media_server.artifacts.store import open_artifacts
from media_server.errors import ConfigurationError
from media_server.jobs.database import Database, open_database
from media_server.models.registry import publish, seen
from media_server.settings import ModelEntry, Settings, load_settings
from media_server.text.messages import (
    ANNOUNCE_TTL_S,
    ENGINES_KEY,
    Abort,
    Announcement,
    Failure,
    Generate,
    Message,
    TextEvent,
    Usage,
    engine_key,
    inbox_key,
)
from media_server.tracing import open_tracing
from workers.device_memory import device_memory
from workers.engine_border import to_event, to_request
from workers.engine_outbox import Outbox
from workers.engine_traces import RequestTraces
from workers.logging_setup import setup_logging
from workers.text_card import publish_files, text_card

logger = logging.getLogger(__name__)

DRAIN_S = 20.0
ANNOUNCE_S = 2.0
SEEN_S = 5.0
# a loop that has not turned for so long is hung: it no longer announces itself
HUNG_S = 30.0
_IDLE_WAIT_S = 0.5
# in the data folder, as the video program's weights.json; each writer has a file of its own
_WEIGHT_HASHES = "text-weights.json"
_READ_BLOCK_MS = 1000
_RECONNECT_S = 0.2
_THREADS_S = 5.0
_MESSAGE: TypeAdapter[Generate | Abort] = TypeAdapter(Message)


def main(argv: Sequence[str]) -> int:
    """Serve one language model until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="media-server engine", description=main.__doc__)
    parser.add_argument("--name", default="engine-0", help="name of this replica (default engine-0)")
    parser.add_argument("--model", help="name of a text model in the configuration (default: the first)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default cpu)")
    parser.add_argument("--threads", type=int, help="threads of the CPU (default: the settings', or all)")
    parser.add_argument("--invariant", action="store_true", help="the same bits whatever the batch, at a price")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    setup_logging(settings, arguments.name)
    if (threads := arguments.threads or settings.engine_threads) is not None:
        torch.set_num_threads(threads)
    entry = find_entry(settings, arguments.model)
    folder = settings.model_path(entry)
    try:
        if entry.path is None:
            if entry.name != EMBEDDED_NAME:
                raise ConfigurationError(f"The model {entry.name} needs a path: only {EMBEDDED_NAME} is embedded.")
            ensure_embedded(folder)
        # its progress bars are for terminals
        transformers.utils.logging.disable_progress_bar()
        engine = load_engine(
            folder,
            arguments.device,
            is_invariant=settings.invariant or arguments.invariant,
            has_guard=settings.collapse_guard,
        )
    except (EngineError, ConfigurationError) as error:
        logger.error("%s cannot be served: %s", entry.name, error)
        return 1
    # several machines may each have an engine-0
    process = EngineProcess(engine, settings, f"{arguments.name}@{socket.gethostname()}", entry.name)
    signal.signal(signal.SIGTERM, process.request_stop)
    signal.signal(signal.SIGINT, process.request_stop)
    db = open_database(settings.database)
    card = text_card(engine, entry, folder, hash_cache=settings.data_dir / _WEIGHT_HASHES)
    publish_files(open_artifacts(settings), card, folder)
    publish(db, card, process.worker)
    logger.info("%s serves %s on %s", process.name, entry.name, arguments.device)
    return process.run(db)


def find_entry(settings: Settings, name: str | None) -> ModelEntry:
    """Find a text model of the configuration. Raises ConfigurationError if there is none of that name."""
    entries = [entry for entry in settings.models if entry.kind == "text"]
    for entry in entries:
        if name in (None, entry.name):
            return entry
    names = ", ".join(entry.name for entry in entries) or "none"
    raise ConfigurationError(f"No text model is named {name!r}; configured: {names}.", param="models", value=name)


class EngineProcess:
    """The loop around one engine: its inbox, its outbox, its sign of life."""

    def __init__(self, engine: Engine, settings: Settings, name: str, model: str) -> None:
        self.engine = engine
        self.name = name
        self.model = model
        self.instance = secrets.token_hex(8)
        self.worker = f"{name}:{self.instance}"
        self.redis = redis.Redis.from_url(settings.redis_url, socket_connect_timeout=3, socket_timeout=10)
        self.outbox = Outbox(self.redis, self.worker)
        self.inbox: queue.Queue[Generate | Abort] = queue.Queue()
        self.deadlines: dict[str, float] = {}
        self.usages: dict[str, list[Usage]] = {}
        self.traces = RequestTraces(open_tracing(settings, name), name, model)
        self.stopping = threading.Event()
        self.has_ended = threading.Event()
        self.turned_at = time.monotonic()

    def request_stop(self, signal_number: int, _frame: FrameType | None) -> None:
        """Note a signal; the loop acts on it."""
        self.stopping.set()

    def run(self, db: Database | None = None) -> int:
        """Serve until a stop is asked for, then drain; returns the exit code."""
        self._clear_inbox()
        threads = [threading.Thread(target=self._read_inbox, daemon=True, name="inbox")]
        threads.append(threading.Thread(target=self._announce, args=(db,), daemon=True, name="announce"))
        for thread in threads:
            thread.start()
        drain_until: float | None = None
        try:
            while True:
                if self.stopping.is_set():
                    drain_until = drain_until or time.monotonic() + DRAIN_S
                    is_idle = self.inbox.empty() and not self.engine.has_work
                    if is_idle or time.monotonic() > drain_until:
                        break
                self._turn()
            self._fail_all("The engine is shutting down.")
            return 0
        except Exception:
            logger.exception("%s has failed", self.name)
            self._fail_all("The engine has failed; it is being restarted.")
            return 1
        finally:
            self.has_ended.set()
            for thread in threads:
                thread.join(_THREADS_S)
            self.redis.close()
            self.traces.tracing.close()
            logger.info("%s has stopped", self.name)

    def _turn(self) -> None:
        """Take what has come, make one step, send what it gave."""
        self.turned_at = time.monotonic()
        self._take_messages()
        self._end_late()
        if self.engine.has_work:
            self.engine.launch()
            for output in self.engine.collect():
                self._send(output)
        self.outbox.flush()

    def _take_messages(self) -> None:
        is_idle = not self.engine.has_work and not self.outbox.has_unsent
        try:
            message = self.inbox.get(timeout=_IDLE_WAIT_S) if is_idle else self.inbox.get_nowait()
            while True:
                self._take(message)
                message = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, message: Generate | Abort) -> None:
        if isinstance(message, Abort):
            if self.engine.abort(message.id):
                logger.debug("request %s: aborted", message.id)
                self._end(message.id, Failure(code="aborted", message="The request was aborted."))
            return
        if message.id in self.outbox:
            # sent again, since the sender did not hear of its acceptance
            return
        self.outbox.open(message)
        try:
            self.engine.add_request(to_request(message))
        except RequestRefused as refused:
            self._end(message.id, Failure(code=refused.code, message=refused.message, param=refused.param))
            return
        except Exception:
            # one request's fault is not the others'
            logger.exception("request %s: cannot be begun", message.id)
            self._end(message.id, Failure(code="model_error", message="The engine cannot begin this request."))
            return
        self.outbox.add(message.id, TextEvent(is_accepted=True))
        self.deadlines[message.id] = message.deadline
        self.usages[message.id] = []
        self.traces.begin(message)

    def _end_late(self) -> None:
        now = time.time()
        for request_id in [id for id, deadline in self.deadlines.items() if deadline < now]:
            self.engine.abort(request_id)
            self._end(request_id, Failure(code="deadline_exceeded", message="The request took longer than allowed."))

    def _send(self, output: Output) -> None:
        request_id = output.request_id
        if request_id not in self.deadlines:
            # another answer of the same request has failed
            return
        if output.finish_reason is FinishReason.ERROR:
            self.engine.abort(request_id)
            error = output.error or OutputError("The model failed.")
            self._end(request_id, Failure(code=error.code, message=error.message, param=error.param))
            return
        usage = None
        if output.usage is not None:
            finished = self.usages[request_id]
            counts = output.usage
            finished.append(
                Usage(
                    prompt_tokens=counts.prompt_tokens,
                    completion_tokens=counts.completion_tokens,
                    cached_tokens=counts.cached_tokens,
                )
            )
            if len(finished) == self.outbox.num_answers(request_id):
                written = sum(part.completion_tokens for part in finished)
                # answers that began later share the prompt of the first
                cached = min(part.cached_tokens for part in finished)
                usage = Usage(prompt_tokens=finished[0].prompt_tokens, completion_tokens=written, cached_tokens=cached)
        self.outbox.add(request_id, to_event(output, self.engine.tokenizer, usage))
        self.traces.token(request_id)
        if usage is not None:
            self._forget(request_id, usage=usage)

    def _end(self, request_id: str, failure: Failure) -> None:
        self.outbox.add(request_id, TextEvent(error=failure, is_last=True))
        self._forget(request_id, error=failure.code)

    def _forget(self, request_id: str, *, usage: Usage | None = None, error: str | None = None) -> None:
        """Drop what is known of a request that has ended, and span it."""
        self.deadlines.pop(request_id, None)
        self.usages.pop(request_id, None)
        self.traces.end(request_id, usage=usage, error=error)

    def _fail_all(self, reason: str) -> None:
        """End what is still running, and tell its readers."""
        for request_id in list(self.deadlines):
            self.engine.abort(request_id)
            self._end(request_id, Failure(code="engine_unavailable", message=reason))
        self.outbox.flush()

    def _clear_inbox(self) -> None:
        """Drop messages to the instance before: their senders see that it has gone."""
        try:
            self.redis.delete(inbox_key(self.name))
        except redis.RedisError as error:
            logger.warning("Valkey does not answer yet: %s", error)

    def _read_inbox(self) -> None:
        """Move messages from the stream to the loop's queue."""
        key, last = inbox_key(self.name), "0-0"
        while not self.has_ended.is_set():
            try:
                # redis-py types a reply by all protocols at once
                reply: Any = self.redis.xread({key: last}, block=_READ_BLOCK_MS, count=100)
                for _, entries in reply or []:
                    for entry_id, fields in entries:
                        last = entry_id
                        self._receive(fields[b"m"])
                    self.redis.xdel(key, *(entry_id for entry_id, _ in entries))
            except (redis.RedisError, OSError) as error:
                logger.debug("the inbox cannot be read: %s", error)
                self.has_ended.wait(_RECONNECT_S)

    def _receive(self, text: bytes) -> None:
        try:
            self.inbox.put(_MESSAGE.validate_json(text))
        except ValidationError as error:
            logger.error("a message to %s is malformed: %s", self.name, error.errors(include_input=False)[0])

    def _announce(self, db: Database | None) -> None:
        """Say every few seconds that this replica lives, for as long as its loop turns."""
        seen_at = time.monotonic()
        while not self.has_ended.is_set():
            if time.monotonic() - self.turned_at < HUNG_S:
                try:
                    self.redis.sadd(ENGINES_KEY, self.name)
                    self.redis.set(engine_key(self.name), self._announcement().model_dump_json(), ex=ANNOUNCE_TTL_S)
                except (redis.RedisError, OSError) as error:
                    logger.debug("Valkey does not answer: %s", error)
                if db is not None and time.monotonic() - seen_at >= SEEN_S:
                    seen_at = time.monotonic()
                    try:
                        seen(db, self.worker, device_memory(self.engine.runner.device))
                    except Exception as error:
                        logger.warning("the model's card cannot be refreshed: %s", error)
            # a drain is announced at once
            was_stopping = self.stopping.is_set()
            (self.has_ended if was_stopping else self.stopping).wait(ANNOUNCE_S)
        try:
            self.redis.delete(engine_key(self.name))
            self.redis.srem(ENGINES_KEY, self.name)
        except (redis.RedisError, OSError):
            # it expires by itself
            return

    def _announcement(self) -> Announcement:
        return Announcement(
            name=self.name,
            instance=self.instance,
            model=self.model,
            running=self.engine.num_running,
            waiting=self.engine.num_waiting + self.inbox.qsize(),
            is_draining=self.stopping.is_set(),
            kv_tokens=self.engine.scheduler.kv_cache.num_tokens,
            kv_used_tokens=self.engine.scheduler.kv_cache.num_used_tokens,
            greedy_choices=self.engine.num_greedy,
            near_ties=self.engine.num_near_ties,
            second_tries=self.engine.writer.num_second_tries,
            collapses=self.engine.writer.num_collapsed,
        )
