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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import redis
import torch
import transformers

from llm.checkpoints.embedded import NAME as EMBEDDED_NAME
from llm.checkpoints.embedded import ensure_embedded
from llm.engine import Engine
from llm.errors import EngineError, RequestRefused
from llm.load import load_engine
from llm.request import FinishReason, Output, OutputError, Request
from media_server.artifacts.store import open_artifacts
from media_server.errors import ConfigurationError
from media_server.jobs.database import Database, open_database
from media_server.models.registry import publish, seen
from media_server.settings import ModelEntry, Settings, load_settings
from media_server.text.messages import (
    Abort,
    Announcement,
    Failure,
    Generate,
    TextEvent,
    Usage,
)
from media_server.tracing import open_tracing
from workers.device_memory import device_memory
from workers.engine_announcer import Announcer
from workers.engine_border import to_event, to_request
from workers.engine_grammars import COMPILE_S, Compiled, GrammarThreads
from workers.engine_inbox import Inbox, Unreadable
from workers.engine_outbox import Outbox
from workers.engine_traces import RequestTraces
from workers.logging_setup import setup_logging
from workers.text_card import publish_files, text_card

logger = logging.getLogger(__name__)

DRAIN_S = 20.0
_IDLE_WAIT_S = 0.5
# in the data folder, as the video program's weights.json; each writer has a file of its own
_WEIGHT_HASHES = "text-weights.json"
_THREADS_S = 5.0
_UNREADABLE = "The engine cannot read this request; it is of another version."


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
        self.inbox = Inbox(self.redis, name)
        self.grammars = GrammarThreads(engine.grammars, self.inbox.put)
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
        self.inbox.clear()
        threads = [threading.Thread(target=self.inbox.read, args=(self.has_ended,), daemon=True, name="inbox")]
        announcer = Announcer(self.redis, self._announcement, self._refresher(db))
        arguments = (self.stopping, self.has_ended, lambda: self.turned_at)
        threads.append(threading.Thread(target=announcer.run, args=arguments, daemon=True, name="announce"))
        for thread in threads:
            thread.start()
        drain_until: float | None = None
        try:
            while True:
                if self.stopping.is_set():
                    drain_until = drain_until or time.monotonic() + DRAIN_S
                    is_idle = self.inbox.empty() and not self.engine.has_work and not self.grammars
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
            self.grammars.close()
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

    def _take(self, message: Generate | Abort | Compiled | Unreadable) -> None:
        match message:
            case Abort():
                # the one whose grammar is being compiled is not the engine's yet
                if self.grammars.forget(message.id) or self.engine.abort(message.id):
                    logger.debug("request %s: aborted", message.id)
                    self._end(message.id, Failure(code="aborted", message="The request was aborted."))
            case Unreadable():
                if message.id not in self.outbox:
                    self.outbox.open(message.id, message.meta)
                    self._end(message.id, Failure(code="engine_unavailable", message=_UNREADABLE))
            case Compiled():
                # unless it was aborted or came too late
                if self.grammars.forget(message.request.id):
                    self._begin(message.request, message)
            case Generate():
                # or sent again, since the sender did not hear of its acceptance
                if message.id not in self.outbox:
                    self._open(message)

    def _open(self, message: Generate) -> None:
        self.outbox.open(message.id, message.meta, num_answers=message.sampling.n, resume_s=message.resume_s)
        self.deadlines[message.id] = message.deadline
        self.usages[message.id] = []
        self.traces.begin(message)
        try:
            request = to_request(message)
        except Exception:
            self._end_unforeseen(message.id)
            return
        if request.grammar is None:
            self._begin(request)
        else:
            self.grammars.begin(request)

    def _end_unforeseen(self, request_id: str) -> None:
        # one request's fault is not the others'
        logger.exception("request %s: cannot be begun", request_id)
        self._end(request_id, Failure(code="model_error", message="The engine cannot begin this request."))

    def _begin(self, request: Request, compiled: Compiled | None = None) -> None:
        try:
            if compiled is not None and compiled.error is not None:
                raise compiled.error
            self.engine.add_request(request, None if compiled is None else compiled.matcher)
        except RequestRefused as refused:
            self._end(request.id, Failure(code=refused.code, message=refused.message, param=refused.param))
        except Exception:
            self._end_unforeseen(request.id)
        else:
            self.outbox.add(request.id, TextEvent(is_accepted=True))

    def _end_late(self) -> None:
        now = time.time()
        for request_id in [id for id, deadline in self.deadlines.items() if deadline < now]:
            self._drop(request_id)
            self._end(request_id, Failure(code="deadline_exceeded", message="The request took longer than allowed."))
        for request_id in self.grammars.late():
            self.grammars.forget(request_id)
            message = f"grammar: takes longer than {COMPILE_S:.0f} s to compile"
            self._end(request_id, Failure(code="grammar_too_complex", message=message, param="grammar"))

    def _drop(self, request_id: str) -> None:
        """Stop working on a request, wherever it is."""
        if not self.grammars.forget(request_id):
            self.engine.abort(request_id)

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
            self._drop(request_id)
            self._end(request_id, Failure(code="engine_unavailable", message=reason))
        self.outbox.flush()

    def _refresher(self, db: Database | None) -> Callable[[], None]:
        return lambda: None if db is None else seen(db, self.worker, device_memory(self.engine.runner.device))

    def _announcement(self) -> Announcement:
        return Announcement(
            name=self.name,
            instance=self.instance,
            model=self.model,
            running=self.engine.num_running,
            waiting=self.engine.num_waiting + self.inbox.qsize() + len(self.grammars),
            is_draining=self.stopping.is_set(),
            kv_tokens=self.engine.scheduler.kv_cache.num_tokens,
            kv_used_tokens=self.engine.scheduler.kv_cache.num_used_tokens,
            greedy_choices=self.engine.num_greedy,
            near_ties=self.engine.num_near_ties,
            second_tries=self.engine.writer.num_second_tries,
            collapses=self.engine.writer.num_collapsed,
        )
