"""One claim of the video worker, from its inputs to its end.

Life: inputs and finished segments fetched -> run -> beats that follow the program's steps -> files uploaded ->
complete, fail, confirm_cancel or release.

Invariants: a lease is beaten only while the program makes progress; a cancel goes by pipe, then after `cancel_grace_s`
(or two predicted steps) by kill, and is confirmed when the work has stopped, never before; an attempt that is not ours
any more deletes its own files and leaves finished segments, which lie under `<job>/segments/`; when a claim ends, its
uploads have ended, and the program is done with its clip or dead.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import sqlalchemy.exc

from media_server import crash_points
from media_server.artifacts.reserve import with_reserve
from media_server.errors import JobError, NotFound
from media_server.jobs import claims, store
from media_server.jobs.database import is_disk_full
from media_server.jobs.spec import Claim, Result
from media_server.jobs.states import Status
from media_server.models.card import VideoCard
from workers.clip_files import ClipFiles
from workers.clip_news import News
from workers.clip_order import OrderError, make_order, predict_longest_s
from workers.clip_uploads import Uploads
from workers.gpu_process import GpuProcess, ProgramDied, ProgramFailed, ProgramLate
from workers.pool_worker import PoolContext
from workers.stages import StageClock

logger = logging.getLogger(__name__)

T = TypeVar("T")

# a beat with news at most this often; one without at least this often, so that a cancel is heard
NEWS_S = 0.5
QUIET_S = 1.0
# a job that needs longer than this at SIGTERM is given back; the pool worker leaves by force at 25 s
DRAIN_S = 18.0
DRAIN_GRACE_S = 4.0
# a cancel is heard between two steps: the grace is at least this many of them, lest each cancel reloads a large model
GRACE_STEPS = 2.0
# how long without a sign of life before the program counts as hung: at least this, and this many times the card's cost
HUNG_S = 120.0
HUNG_TIMES = 20.0
# between two tries to end a job whose database does not answer
COMPLETE_AGAIN_S = 1.0
# failures after which a program makes no other clip
_ENDS_PROGRAM = ("worker_crashed", "out_of_memory")
_REPORTED = ("model", "versions", "machine", "kernel_path", "seed", "segments", "drift", "file", "frames_sha256")


class ClaimEnded(Exception):
    """The claim has come to its end in the database, or is not ours any more."""


class Run:
    """One claim, from its inputs to its end; lives for one call of `handle`."""

    def __init__(
        self,
        context: PoolContext,
        claim: Claim,
        folder: Path,
        ensure_program: Callable[[PoolContext], tuple[GpuProcess, VideoCard]],
    ) -> None:
        self.ensure_program = ensure_program
        self.context = context
        self.claim = claim
        self.folder = folder
        self.files = ClipFiles(context, claim, folder)
        self.program: GpuProcess | None = None
        self.uploads = Uploads()
        self.news = News()
        self.beaten_at = time.monotonic()
        self.good_beat_at = time.monotonic()
        self.heard_at = time.monotonic()
        self.cancel_sent_at: float | None = None
        self.stopping_since: float | None = None
        self.is_released = False
        # when the program was given the clip, and what it says it took
        self.sent_at: float | None = None
        self.gpu_seconds: float | None = None
        # the program has the clip in its hands
        self.is_running = False
        # the program has done its part; what is left is ours
        self.is_made = False
        self.grace_s = context.settings.cancel_grace_s
        self.clock = StageClock(context, claim)

    def do(self) -> None:
        """Make the clip and publish it.

        Raises:
            ClaimEnded: the claim ended otherwise.
            ProgramFailed: the model does not load; the claim is given back, or failed if the load has hung.
        """
        # a program that died is loaded again under this claim's lease, which may take longer than the lease lasts
        try:
            self.program, card = self._meanwhile(lambda: self.ensure_program(self.context))
        except ProgramLate as error:
            claims.fail(self.context.db, self.claim, JobError("worker_crashed", error.message), retryable=True)
            raise
        except ProgramFailed:
            self._give_back()
            raise
        try:
            request = make_order(self.claim.job, card)
        except OrderError as error:
            self._fail(JobError("invalid_request", str(error)))
        inputs, resume = self._meanwhile(self.files.fetch)
        out_dir = self.folder / "out"
        out_dir.mkdir()
        self.sent_at = time.monotonic()
        self.is_running = True
        self._send(
            "run",
            **self._about(),
            request=request,
            inputs=inputs,
            resume=resume,
            out_dir=str(out_dir),
            lease_s=self.context.settings.lease_s,
        )
        longest_s = predict_longest_s(self.claim.job, card)
        self.grace_s = max(self.grace_s, GRACE_STEPS * longest_s)
        self._publish(self._watch(max(HUNG_S, HUNG_TIMES * longest_s)))

    def close(self) -> None:
        """Leave no thread behind, and no program that goes on with the clip: the next job is not to wait for it."""
        self.clock.end(error="not completed")
        try:
            self._abandon()
        finally:
            self.uploads.close()

    def _about(self) -> dict[str, Any]:
        return {"job_id": self.claim.job.id, "attempt": self.claim.attempt}

    def _watch(self, patience_s: float) -> dict[str, Any]:
        """Follow the program until it has made the clip; gives its `done` message.

        Raises:
            ClaimEnded: it failed, was stopped, died or hung.
        """
        assert self.program is not None
        self.heard_at = time.monotonic()
        while True:
            try:
                message = self.program.receive(0.1)
            except ProgramDied as error:
                self._died(str(error))
            if message is not None and message.get("job_id") == self.claim.job.id:
                self.heard_at = time.monotonic()
                if message["type"] == "progress":
                    said = self.news.take(message)
                    self.clock.enter(said.stage, said.segment, step=said.step, at=message.get("at"))
                elif message["type"] == "preview":
                    self.news.take_preview(message)
                elif message["type"] == "drift":
                    self._say_drift(message["finding"])
                elif message["type"] == "checkpoint":
                    segment, path, data = message["segment"], Path(message["path"]), message["data"]
                    self.uploads.begin(self.files.keep_segment, segment, path, data)
                elif message["type"] == "done":
                    self.is_running, self.is_made = False, True
                    self.gpu_seconds = message["gpu_seconds"]
                    self.clock.enter("finish")
                    return message
                elif message["type"] == "cancelled":
                    self.is_running = False
                    # of its own accord: it has not heard of us for most of a lease, which we may hold all the same
                    self.is_released = self.is_released or self.cancel_sent_at is None
                    self._stopped()
                elif message["type"] == "failed":
                    self.is_running = False
                    reason = JobError.from_wire(message["code"], message["message"])
                    if reason.code in _ENDS_PROGRAM:
                        # it is about to end; the next job must not meet it
                        self._kill()
                    self._fail(reason, retryable=reason.code == "worker_crashed")
            self._tick()
            if time.monotonic() - self.heard_at > patience_s:
                self._kill()
                self._fail(
                    JobError("worker_crashed", f"The video program made no progress for {patience_s:.0f} s."),
                    retryable=True,
                )

    def _say_drift(self, finding: dict[str, Any]) -> None:
        try:
            claims.say_drift(self.context.db, self.claim, finding)
        except sqlalchemy.exc.DBAPIError:
            # it stands in the manifest too; a clip is worth more than its news
            logger.warning("job %s: the database does not take a drift finding", self.claim.job.id)

    def _tick(self) -> None:
        """Beat, hear of a cancel or a lost lease, and keep the deadlines of both and of a drain."""
        now = time.monotonic()
        if now - self.beaten_at >= (NEWS_S if self.news.is_fresh else min(QUIET_S, self.context.settings.beat_s)):
            self._beat()
        grace_s = DRAIN_GRACE_S if self.is_released else self.grace_s
        if self.cancel_sent_at is not None and now - self.cancel_sent_at > grace_s and self.program is not None:
            logger.warning("job %s: not cancelled within %.1f s; the program is killed", self.claim.job.id, grace_s)
            self._kill()
            self._stopped()
        if self.context.stopping.is_set() and self.cancel_sent_at is None and not self.is_made:
            self.stopping_since = self.stopping_since or now
            # of a clip that has not begun nothing is lost, and how long it takes nobody knows
            eta_s = self.news.progress.eta_s if self.news.progress is not None else DRAIN_S
            if now - self.stopping_since + eta_s >= DRAIN_S:
                self.is_released = True
                self._send_cancel()

    def _beat(self) -> None:
        self.beaten_at = time.monotonic()
        members = self.news.beat()
        try:
            answer = claims.beat(self.context.db, self.claim, lease_s=self.context.settings.lease_s, **members)
        except sqlalchemy.exc.DBAPIError:
            # the lease holds for a while; past it another worker may have the job
            if time.monotonic() - self.good_beat_at > self.context.settings.lease_s:
                self._lost()
            logger.warning("job %s: the database does not answer a beat", self.claim.job.id)
            return
        self.news.is_fresh = False
        self.good_beat_at = time.monotonic()
        if not answer.is_ours:
            self._lost()
        if self.is_running:
            self._send("alive")
        if answer.cancel_requested and self.cancel_sent_at is None:
            self._send_cancel()

    def _send_cancel(self) -> None:
        self.cancel_sent_at = time.monotonic()
        if not self.is_running:
            self._stopped()
        self._send("cancel", **self._about())

    def _send(self, type: str, **members: Any) -> None:
        assert self.program is not None
        try:
            self.program.send(type, **members)
        except ProgramDied as error:
            self._died(str(error))

    def _kill(self) -> None:
        if self.program is not None:
            self.program.kill()
        self.is_running = False

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """Do something long in the helper thread, and beat meanwhile."""
        return self.uploads.meanwhile(work, self._tick)

    def _settle_uploads(self, *, keeps_segments: bool) -> None:
        """Have no upload go on behind us: what runs is waited for, and finished segments that wait, if they are kept.

        A worker that stops waits until DRAIN_S and the grace are over: a segment that is late is made again.
        """

        def goes_on() -> bool:
            now = time.monotonic()
            if self.stopping_since is not None and now - self.stopping_since > DRAIN_S + DRAIN_GRACE_S:
                return False
            if now - self.beaten_at >= min(QUIET_S, self.context.settings.beat_s):
                self._renew_lease()
            return True

        if num_failed := self.uploads.settle(keeps_waiting=keeps_segments, goes_on=goes_on):
            logger.warning("job %s: %d uploads have failed", self.claim.job.id, num_failed)

    def _renew_lease(self) -> None:
        """Beat for the lease alone: how the claim ends is settled."""
        self.beaten_at = time.monotonic()
        try:
            claims.beat(self.context.db, self.claim, lease_s=self.context.settings.lease_s)
        except sqlalchemy.exc.DBAPIError:
            logger.warning("job %s: the database does not answer a beat", self.claim.job.id)

    def _publish(self, done: dict[str, Any]) -> None:
        """Upload the files, then end the job in one transaction."""
        self.uploads.finish(self._tick)
        upload = self.uploads.begin(self.files.upload, done["artifacts"])
        records = self._meanwhile(upload.result)
        crash_points.reach("clip.uploaded")
        manifest = done["manifest"]
        result = Result(
            artifacts=records,
            result={name: manifest[name] for name in _REPORTED},
            gpu_seconds=self.gpu_seconds,
            peak_memory_bytes=done["peak_memory_bytes"],
        )
        if not self._complete(result):
            self._lost()
        crash_points.reach("clip.finished")
        self.clock.end()
        self.files.remove_segments()
        logger.info(
            "job %s attempt %d: completed, %.1f GPU seconds", self.claim.job.id, self.claim.attempt, self.gpu_seconds
        )

    def _complete(self, result: Result) -> bool:
        """End the job; a clip that is made is not made again for a moment without a database, while the lease holds."""
        complete = partial(claims.complete, self.context.db, self.claim, result)
        is_unanswered = False
        while True:
            try:
                # an end whose answer was lost stands all the same, and its files with it
                return with_reserve(self.context.settings, complete) or (is_unanswered and self._has_won())
            except sqlalchemy.exc.DBAPIError as error:
                is_over = time.monotonic() - self.good_beat_at > self.context.settings.lease_s
                if is_over or (isinstance(error, sqlalchemy.exc.OperationalError) and is_disk_full(error)):
                    raise
                is_unanswered = True
                logger.warning("job %s: the database does not take its end; it is asked again", self.claim.job.id)
                time.sleep(COMPLETE_AGAIN_S)

    def _has_won(self) -> bool:
        """Whether the job has ended by this attempt."""
        try:
            job = store.get(self.context.db, self.claim.job.id)
        except NotFound:
            return False
        return job.status is Status.COMPLETED and job.winning_attempt == self.claim.attempt

    def _fail(self, error: JobError, retryable: bool = False) -> NoReturn:
        # the next attempt goes on after the last segment that was finished
        self._settle_uploads(keeps_segments=retryable)
        fail = partial(claims.fail, self.context.db, self.claim, error)
        with_reserve(self.context.settings, partial(fail, retryable=retryable, gpu_seconds=self._spent_s()))
        self.files.remove()
        if not retryable:
            self.files.remove_segments()
        raise ClaimEnded(f"failed, {error.code}: {error.message}")

    def _died(self, how: str) -> NoReturn:
        self.is_running = False
        if self.cancel_sent_at is not None:
            self._stopped()
        self._fail(JobError("worker_crashed", f"While it made the clip, {how}."), retryable=True)

    def _stopped(self) -> NoReturn:
        """The program has stopped at our word."""
        self._settle_uploads(keeps_segments=self.is_released)
        self.files.remove()
        if self.is_released:
            self._give_back()
            raise ClaimEnded("given back, the worker stops")
        if claims.confirm_cancel(self.context.db, self.claim, gpu_seconds=self._spent_s()):
            self.files.remove_segments()
            raise ClaimEnded("cancelled")
        raise ClaimEnded("stopped; another attempt has it")

    def _lost(self) -> NoReturn:
        """Another attempt has the job: stop the work and delete our files, but not what it may continue from."""
        self._abandon()
        self.uploads.abandon()
        self.files.remove()
        raise ClaimEnded("lost to another attempt")

    def _abandon(self) -> None:
        """Have the program stop a run that nobody wants, by kill if it takes too long or cannot be spoken to."""
        if self.program is None or not self.is_running:
            return
        deadline = time.monotonic() + self.grace_s
        try:
            self.program.send("cancel", **self._about())
            while self.is_running and time.monotonic() < deadline:
                message = self.program.receive(0.1)
                if message is not None and message["type"] in ("cancelled", "done", "failed"):
                    self.is_running = False
        except ProgramDied:
            self.is_running = False
        finally:
            if self.is_running:
                self._kill()

    def _give_back(self) -> None:
        claims.release(self.context.db, self.claim, gpu_seconds=self._spent_s())

    def _spent_s(self) -> float | None:
        """Give the GPU seconds of this attempt: the program's figure, or how long it has had the clip."""
        if self.gpu_seconds is None and self.sent_at is not None:
            return time.monotonic() - self.sent_at
        return self.gpu_seconds
