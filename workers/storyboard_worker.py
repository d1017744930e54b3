"""Storyboard jobs: claims pool "text", has a language engine write, streams the text as it is written, publishes it.

The text goes out as `job.progress` events (`data.text`, a few a second); the result is `storyboard` and the file
storyboard.json. A text that cannot be used is written again, differently, within the attempt; an engine that goes away
puts the job back for another attempt.
"""

import argparse
import json
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import redis

from media_server.errors import JobError, MediaServerError, NotFound, NotReady
from media_server.ids import new_id
from media_server.jobs import claims, ledger
from media_server.jobs.spec import Beat, Claim, Result, UsageRecord
from media_server.models.registry import get_card
from media_server.settings import Settings, load_settings
from media_server.text.engine import GRAMMAR_TOO_COMPLEX, EngineClient, EngineUnavailable, Prompt, failure_error
from media_server.text.messages import Sampling, Usage
from media_server.text.remote_writing import write_remotely
from media_server.text.storyboard import Ask, StoryboardError, Task, Writer, write_storyboard
from media_server.text.templates import TextModels
from workers.pool_worker import PoolContext, run_pool_worker
from workers.stages import StageClock

logger = logging.getLogger(__name__)

POOL = "text"
CONCURRENCY = 4
# how often the text written since is sent on, and a cancel noticed
BEAT_S = 0.3
TRIES = 3
# how long a job waits for an engine that is loading or restarting
ENGINE_WAIT_S = 90.0
# characters of JSON that a shot takes, for the share that is done
_CHARS_PER_SHOT = 170


class _Stopped(Exception):
    """The job is not ours any more, was cancelled, or the worker ends."""


def main(argv: Sequence[str]) -> int:
    """Write storyboards until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="media-server storyboards", description=main.__doc__)
    parser.add_argument("--name", default="storyboards", help="name of this worker (default storyboards)")
    parser.add_argument("--pool", default=POOL, help=f"pool whose jobs it takes (default {POOL})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    handler = Handler(settings)
    return run_pool_worker(settings, arguments.pool, arguments.name, CONCURRENCY, handler)


class Handler:
    """Does storyboard jobs; shared by the worker's threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._engine = EngineClient(
            redis.Redis.from_url(settings.redis_url, socket_connect_timeout=3, socket_timeout=10)
        )
        self._models: TextModels | None = None

    def __call__(self, context: PoolContext, claim: Claim) -> None:
        """Do one job, to its end in the database."""
        if self._models is None:
            self._models = TextModels(context.artifacts)
        usages: list[Usage] = []
        try:
            self._write(context, claim, usages)
        except _Stopped:
            # its end is written; what it took is entered below
            pass
        except (EngineUnavailable, NotReady, httpx.HTTPError) as error:
            message = error.message if isinstance(error, MediaServerError) else "The language engine does not answer."
            claims.fail(context.db, claim, JobError("engine_unavailable", message), retryable=True)
        except StoryboardError as error:
            claims.fail(context.db, claim, JobError("storyboard_failed", str(error)))
        except NotFound as error:
            claims.fail(context.db, claim, JobError("invalid_request", error.message))
        except MediaServerError as error:
            # an engine's own words may quote what it was writing; a grammar is ours, and no fault of the caller's
            is_ours = error.status >= 500 or error.code == GRAMMAR_TOO_COMPLEX
            failed = JobError("model_error", f"The language engine failed ({error.code}).")
            claims.fail(context.db, claim, failed if is_ours else JobError("invalid_request", error.message))
        if usages:
            ledger.enter_attempt(context.db, claim.job, _records(usages))

    def _write(self, context: PoolContext, claim: Claim, usages: list[Usage]) -> None:
        """Write a storyboard and publish it; `usages` is left with what was used and is not entered yet."""
        job, params = claim.job, claim.job.params
        task = Task(
            idea=job.prompts["idea"],
            num_frames=int(params["num_frames"]),
            fps=int(params["fps"]),
            seed=int(params["seed"]),
            card=get_card(context.db, params["video_model"], "video"),
            num_shots=params["shots"],
            style=job.prompts.get("style"),
        )
        progress = _Progress(context, claim, task.shots * _CHARS_PER_SHOT)
        started = time.monotonic()
        clock = StageClock(context, claim)
        clock.enter("storyboard")
        storyboard = self._try(context, claim, task, progress, usages)
        clock.end()
        content = json.dumps(storyboard, ensure_ascii=False, indent=2).encode()
        stored = context.artifacts.put_bytes(f"{job.id}/{claim.attempt}/storyboard.json", content, "application/json")
        records = _records(usages)
        result = Result(
            artifacts=[stored.record("storyboard")],
            result={
                "storyboard": storyboard,
                "usage": {record.kind: int(record.amount) for record in records},
                "seconds": round(time.monotonic() - started, 3),
            },
            usage=records,
        )
        if claims.complete(context.db, claim, result):
            usages.clear()
        else:
            context.artifacts.delete_prefix(f"{job.id}/{claim.attempt}/")
        logger.info(
            "job %s attempt %d: storyboard of %d shots in %.1f s",
            job.id,
            claim.attempt,
            task.shots,
            time.monotonic() - started,
        )

    def _try(
        self, context: PoolContext, claim: Claim, task: Task, progress: "_Progress", usages: list[Usage]
    ) -> dict[str, Any]:
        """Write until a text can be used, TRIES times at most."""
        write: Writer = partial(self._write_text, context, claim, usages)
        for number in range(TRIES):
            # the number of the job's attempt counts too: what failed before is not written again
            attempt = (claim.attempt - 1) * TRIES + number
            try:
                return progress.follow(write_storyboard(replace(task, attempt=attempt), write))
            except StoryboardError as error:
                logger.warning("job %s attempt %d: %s", claim.job.id, claim.attempt, error)
                if number == TRIES - 1:
                    raise
        raise AssertionError("the last try returns or raises")

    def _write_text(self, context: PoolContext, claim: Claim, usages: list[Usage], ask: Ask) -> Iterator[str]:
        """Have an engine write one text; "" for a sign of life."""
        if self.settings.engine_url is not None:
            yield from write_remotely(self.settings, ask, claim.job.model, usages)
            return
        assert self._models is not None
        deadline = time.monotonic() + ENGINE_WAIT_S
        while True:
            try:
                card = get_card(context.db, claim.job.model, "text")
                model = self._models.load(card)
                token_ids = model.encode_chat(ask.messages)
                prompt = Prompt(
                    id=new_id("req"),
                    model=card.name,
                    token_ids=token_ids,
                    sampling=Sampling(
                        max_tokens=ask.max_tokens,
                        seed=ask.seed,
                        temperature=ask.temperature,
                        top_p=ask.top_p,
                        collapse_guard=True,
                    ),
                    grammar=ask.grammar,
                    trace=claim.job.traceparent,
                    # a film waits for its storyboard, a chat for itself
                    priority=claim.job.priority,
                    is_forgotten=claim.job.answer_s is not None,
                )
                reading = self._engine.submit(prompt)
                break
            except NotReady:
                # an engine that starts takes a while; the job keeps its lease meanwhile
                if time.monotonic() > deadline:
                    raise
                yield ""
                time.sleep(0.5)
        try:
            for entry in self._engine.events(reading):
                if entry is None:
                    yield ""
                    continue
                if entry.event.error is not None:
                    raise failure_error(entry.event.error)
                yield entry.event.text
        finally:
            self._engine.abort(reading)
            if reading.is_accepted:
                # of a text that was broken off, what was read of it
                read = Usage(prompt_tokens=len(token_ids), completion_tokens=reading.num_tokens)
                usages.append(reading.usage or read)


def _records(usages: Sequence[Usage]) -> list[UsageRecord]:
    return [
        UsageRecord("prompt_tokens", sum(usage.prompt_tokens for usage in usages)),
        UsageRecord("completion_tokens", sum(usage.completion_tokens for usage in usages)),
    ]


class _Progress:
    """Beats for a job while its text is written: keeps the lease, sends the text on, notices a cancel and a drain."""

    def __init__(self, context: PoolContext, claim: Claim, expected_chars: int) -> None:
        self.context = context
        self.claim = claim
        self.expected_chars = expected_chars
        self._num_chars = 0
        self._unsent: list[str] = []
        self._beat_at = 0.0

    def follow(self, steps: Generator[str, None, dict[str, Any]]) -> dict[str, Any]:
        """Run the writing to its end. Raises _Stopped after the job was ended, given back or lost."""
        try:
            while True:
                self._take(next(steps))
        except StopIteration as end:
            self._beat(is_due=True)
            storyboard: dict[str, Any] = end.value
            return storyboard
        finally:
            steps.close()

    def _take(self, delta: str) -> None:
        self._num_chars += len(delta)
        if delta:
            self._unsent.append(delta)
        now = time.monotonic()
        if self.context.stopping.is_set():
            claims.release(self.context.db, self.claim)
            raise _Stopped
        if now - self._beat_at >= (BEAT_S if self._unsent else 1.0):
            self._beat(is_due=False)

    def _beat(self, *, is_due: bool) -> None:
        text = "".join(self._unsent)
        self._unsent.clear()
        self._beat_at = time.monotonic()
        # the last percent is the publishing
        progress = min(99.0, 100.0 * self._num_chars / self.expected_chars)
        lease_s = self.context.settings.lease_s
        said: Beat
        if text or is_due:
            said = claims.beat(
                self.context.db,
                self.claim,
                lease_s=lease_s,
                stage="storyboard",
                progress=progress,
                data={"text": text} if text else None,
            )
        else:
            said = claims.beat(self.context.db, self.claim, lease_s=lease_s)
        if not said.is_ours:
            raise _Stopped
        if said.cancel_requested:
            claims.confirm_cancel(self.context.db, self.claim)
            raise _Stopped
