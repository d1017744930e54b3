"""The stages of one attempt, timed: seconds for /metrics when a stage ends, and a span of each."""

import time

from media_server.figures import STAGE_SECONDS, STEP_SECONDS, Counts
from media_server.jobs.spec import Claim
from workers.pool_worker import PoolContext

# the stage whose steps are a model's
_DENOISE = "denoise"


class StageClock:
    """Follows one attempt from stage to stage; times are this machine's monotonic clock, which its processes share."""

    def __init__(self, context: PoolContext, claim: Claim) -> None:
        self._context = context
        self._claim = claim
        self._counts = Counts()
        self._stage: tuple[str, int] | None = None
        self._began_at = 0.0
        self._step: tuple[int, float] | None = None

    def enter(self, stage: str, segment: int = 0, *, step: int | None = None, at: float | None = None) -> None:
        """Note that a stage of a segment is under way, and at which step; the one before has ended if it is another."""
        at = time.monotonic() if at is None else at
        if (stage, segment) != self._stage:
            self.end(at=at)
            self._stage, self._began_at, self._step = (stage, segment), at, None
        if stage == _DENOISE and step is not None:
            if self._step is not None and step == self._step[0] + 1:
                self._counts.observe(STEP_SECONDS, self._claim.job.model or "", seconds=max(0.0, at - self._step[1]))
            self._step = (step, at)

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """Note that the stage has ended; one that was broken off by an error is spanned and not counted."""
        if self._stage is None:
            return
        at = time.monotonic() if at is None else at
        (stage, segment), self._stage = self._stage, None
        if error is None:
            self._counts.observe(STAGE_SECONDS, self._claim.job.kind, stage, seconds=max(0.0, at - self._began_at))
        now, now_unix = time.monotonic(), time.time()
        self._context.tracing.record(
            f"stage {stage}",
            self._claim.job.traceparent,
            start_s=now_unix - (now - self._began_at),
            end_s=now_unix - (now - at),
            error=error,
            job_id=self._claim.job.id,
            attempt=self._claim.attempt,
            segment=segment,
        )
        counts, self._counts = self._counts, Counts()
        self._context.write_counts(counts)
