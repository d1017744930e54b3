"""A worker of one pool: Celery receives doorbells, SQL hands out the jobs, a handler does them.

A doorbell carries no job; `claim_next` decides what is next. The broker may lose every doorbell: each worker also
looks into the database at its start and every `doorbell_s`, so a dead or silent broker costs seconds, never a job.

Life of a claim: claimed -> handler (beats, then complete, fail, confirm_cancel or release) -> next claim.
On SIGTERM `stopping` is set, nothing more is claimed, and the handler finishes or releases within DRAIN_S.
"""

import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import celery.signals
import sqlalchemy as sa
from celery import Celery
from celery.platforms import SecurityWarning

from media_server.artifacts.reserve import with_reserve
from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.errors import InsufficientStorage, JobError
from media_server.figures import Counts
from media_server.jobs.claims import claim_next, end_leases, fail
from media_server.jobs.database import Database, open_database
from media_server.jobs.doorbell import make_celery, ring
from media_server.jobs.spec import Claim
from media_server.jobs.tables import attempts
from media_server.logging_setup import log_context
from media_server.settings import Settings
from media_server.tracing import Span, Tracing, open_tracing
from workers.leases import worker_id
from workers.logging_setup import setup_logging

logger = logging.getLogger(__name__)

# the supervisor kills at 30 s; what is not finished or released by now goes to another worker
DRAIN_S = 25.0
EXIT_DRAIN_TIMEOUT = 75


@dataclass(frozen=True)
class PoolContext:
    """What a handler needs of its process; `worker` is the lease owner, `stopping` is set by SIGTERM."""

    settings: Settings
    db: Database
    artifacts: ArtifactStore
    celery: Celery
    stopping: threading.Event
    pool: str
    worker: str
    tracing: Tracing = field(default_factory=Tracing)

    def write_counts(self, counts: Counts) -> None:
        """Add to the figures of /metrics; a database that is away costs them, and nothing else."""
        try:
            if counts.amounts:
                self.db.add_counts(counts.amounts)
        except sa.exc.SQLAlchemyError as error:
            logger.warning("figures are lost (%s)", type(error).__name__)


Handler = Callable[[PoolContext, Claim], None]
Hook = Callable[[PoolContext], None]


def run_pool_worker(
    settings: Settings,
    pool: str,
    name: str,
    concurrency: int,
    handler: Handler,
    on_start: Hook | None = None,
    on_stop: Hook | None = None,
) -> int:
    """Serve one pool until SIGTERM; returns the exit code.

    `on_start` runs before the first claim (load a model, publish its card), `on_stop` after the last one.
    """
    setup_logging(settings, name)
    app = make_celery(settings)
    context = PoolContext(
        settings=settings,
        db=open_database(settings.database, ring=partial(ring, app)),
        artifacts=open_artifacts(settings),
        celery=app,
        stopping=threading.Event(),
        pool=pool,
        worker=worker_id(name),
        tracing=open_tracing(settings, name),
    )
    slots = threading.Semaphore(concurrency)

    @app.task(name="pool.wake")  # type: ignore[untyped-decorator]
    def wake(_pool: str) -> None:
        _look(context, slots, handler)

    # what root may do wrong is to unpickle what others send; here it is JSON only
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # a receiver of this signal makes Celery leave logging alone
    celery.signals.setup_logging.connect(_keep_logging, weak=False)
    celery.signals.worker_shutting_down.connect(partial(_stop, context), weak=False)
    if on_start is not None:
        on_start(context)
    threading.Thread(target=_enforce_drain, args=(context,), daemon=True, name="drain-limit").start()
    poller = threading.Thread(target=_poll, args=(context, slots, handler), daemon=True, name="poll")
    poller.start()
    logger.info("%s serves pool %s, %d at a time", context.worker, pool, concurrency)
    worker = app.Worker(
        pool="threads",
        concurrency=concurrency,
        queues=[f"pool.{pool}"],
        hostname=f"{name}-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
        redirect_stdouts=False,
    )
    try:
        worker.start()
    finally:
        context.stopping.set()
        poller.join(DRAIN_S)
        if on_stop is not None:
            on_stop(context)
        context.tracing.close()
        logger.info("%s has stopped", context.worker)
    return int(worker.exitcode or 0)


def drain_pool(context: PoolContext, slots: threading.Semaphore, handler: Handler) -> None:
    """Claim and do jobs of the pool until none is left or the worker stops."""
    while not context.stopping.is_set():
        with slots:
            # the wait for a slot may have been long
            if context.stopping.is_set():
                return
            claim = claim_next(context.db, context.pool, context.worker, context.settings.lease_s)
            if claim is None:
                return
            _handle(context, claim, handler)


def _handle(context: PoolContext, claim: Claim, handler: Handler) -> None:
    job, attempt = claim.job, claim.attempt
    about: dict[str, str | int] = {"job_id": job.id, "attempt": attempt}
    with (
        log_context(**about),
        context.tracing.span(
            f"job {job.kind}",
            job.traceparent,
            kind="consumer",
            **about,
            pool=context.pool,
            model=job.model,
            worker=context.worker,
            since_created_s=max(0.0, time.time() - job.created_at),
        ) as span,
    ):
        # what the handler does is under this attempt
        claim = replace(claim, job=replace(job, traceparent=span.traceparent))
        logger.info("job %s attempt %d: started (%s)", job.id, attempt, job.kind)
        try:
            handler(context, claim)
        except InsufficientStorage as error:
            # what is made again does not fit either
            logger.error("job %s attempt %d: %s", job.id, attempt, error.message)
            reason = JobError("insufficient_storage", error.message)
            with_reserve(context.settings, partial(fail, context.db, claim, reason))
            context.artifacts.delete_prefix(f"{job.id}/{attempt}/")
        except Exception as error:
            logger.exception("job %s attempt %d: the worker failed", job.id, attempt)
            message = f"The worker failed unexpectedly ({type(error).__name__}); its log has the details."
            reason = JobError("internal_error", message)
            with_reserve(context.settings, partial(fail, context.db, claim, reason, retryable=True))
        if context.tracing.is_on:
            _say_outcome(context, claim, span)


def _say_outcome(context: PoolContext, claim: Claim, span: Span) -> None:
    """Put on the attempt's span how it ended."""
    mine = sa.and_(attempts.c.job_id == claim.job.id, attempts.c.attempt == claim.attempt)
    with context.db.read() as tx:
        row = tx.conn.execute(sa.select(attempts.c.outcome, attempts.c.error_code).where(mine)).first()
    if row is not None:
        span.set(outcome=row.outcome, error_code=row.error_code)
        if row.outcome in ("failed", "lost"):
            span.fail(row.error_code or row.outcome)


def _poll(context: PoolContext, slots: threading.Semaphore, handler: Handler) -> None:
    """Look for work without a doorbell, at the start and then every `doorbell_s`."""
    while True:
        _look(context, slots, handler)
        if context.stopping.wait(context.settings.doorbell_s):
            return


def _look(context: PoolContext, slots: threading.Semaphore, handler: Handler) -> None:
    """Do as `drain_pool`; a database that does not answer is asked again later."""
    try:
        drain_pool(context, slots, handler)
    except Exception:
        logger.exception("%s could not look for jobs", context.worker)


def _stop(context: PoolContext, **_: object) -> None:
    context.stopping.set()


def _keep_logging(**_: object) -> None:
    return None


def _enforce_drain(context: PoolContext) -> None:
    """Leave by force if a handler neither finishes nor releases in time; its lease ends at once."""
    context.stopping.wait()
    if not threading.Event().wait(DRAIN_S):
        try:
            ended = end_leases(context.db, context.worker)
            logger.error("%s did not drain within %.0f s; %d leases ended", context.worker, DRAIN_S, ended)
        finally:
            # also without a database: then the leases lapse
            os._exit(EXIT_DRAIN_TIMEOUT)
