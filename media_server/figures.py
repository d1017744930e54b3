"""The counters and histograms that /metrics shows: their names, labels and bounds, and how a process counts.

Each is a sum over all processes of the service, kept in the table `counters`: it survives restarts, and every API
process shows the same. What belongs to a transaction (a job's end, a try at a delivery) is counted in it, exactly; what
does not (requests, steps) goes through a `Recorder`, which writes every few seconds: a process that is killed loses
what it has not written.

Invariant: a label has few values, all of them ours or the configuration's: never an id, a key, a path or a word of a
caller's.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

PREFIX = "media_server_"
FLUSH_S = 5.0
# the part of a histogram's row that is its sum; the others are upper bounds, the last one "+Inf"
SUM = "sum"
INF = "+Inf"
_QUICK = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SLOW = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)


@dataclass(frozen=True)
class Counter:
    """A sum; one that may sink is shown as a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    may_sink: bool = False


@dataclass(frozen=True)
class Histogram:
    """Seconds, counted by upper bounds."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]

    def part_of(self, value: float) -> str:
        """Name the bucket that a value falls into."""
        return next((f"{bound:g}" for bound in self.bounds if value <= bound), INF)


# name, label values in the order of the labels, part ("" of a counter)
Key = tuple[str, tuple[str, ...], str]

JOBS_ENDED = Counter("jobs_ended", "Jobs that have ended, by kind and how.", ("kind", "status"))
GPU_SECONDS = Counter("gpu_seconds", "GPU seconds of all attempts, as the ledger has them.")
TOKENS = Counter("text_tokens", "Tokens read (prompt) and written (completion), as the ledger has them.", ("kind",))
STORED_BYTES = Counter("stored_bytes", "Bytes of all inputs and results that are kept.", may_sink=True)
WEBHOOK_TRIES = Counter("webhook_tries", "Tries at webhook messages: delivered, retry, or dead.", ("outcome",))
WEBHOOK_TRY_SECONDS = Histogram("webhook_try_seconds", "Seconds a try at a message took.", ("outcome",), _QUICK)
WEBHOOK_LAG_SECONDS = Histogram(
    "webhook_lag_seconds", "Seconds from the end of a job until its message was delivered.", (), _SLOW
)
HTTP_SECONDS = Histogram(
    "http_request_seconds",
    "Seconds until a request's answer began, by the template of its route; status 499 is a client that left before.",
    ("route", "method", "status"),
    _QUICK,
)
STEP_SECONDS = Histogram("step_seconds", "Seconds of one denoise step.", ("model",), _SLOW)
STAGE_SECONDS = Histogram(
    "stage_seconds", "Seconds of a stage of a job; of a chain, of each segment.", ("kind", "stage"), _SLOW
)

COUNTERS = (JOBS_ENDED, GPU_SECONDS, TOKENS, STORED_BYTES, WEBHOOK_TRIES)
HISTOGRAMS = (WEBHOOK_TRY_SECONDS, WEBHOOK_LAG_SECONDS, HTTP_SECONDS, STEP_SECONDS, STAGE_SECONDS)


class Counts:
    """What was counted and is not written yet."""

    def __init__(self) -> None:
        self.amounts: dict[Key, float] = defaultdict(float)

    def count(self, counter: Counter, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        assert len(labels) == len(counter.labels), counter.name
        self.amounts[counter.name, labels, ""] += amount

    def observe(self, histogram: Histogram, *labels: str, seconds: float) -> None:
        """Count a span of time."""
        assert len(labels) == len(histogram.labels), histogram.name
        self.amounts[histogram.name, labels, histogram.part_of(seconds)] += 1.0
        self.amounts[histogram.name, labels, SUM] += seconds

    def add(self, amounts: Iterable[tuple[Key, float]]) -> None:
        """Add what another has counted."""
        for key, amount in amounts:
            self.amounts[key] += amount


class _Writer(Protocol):
    def add_counts(self, amounts: Mapping[Key, float]) -> None:
        """Write counts into the table."""


class Recorder:
    """Counts of one process that belong to no transaction; shared by its threads, written every FLUSH_S."""

    def __init__(self, db: _Writer) -> None:
        self._db = db
        self._counts = Counts()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="figures")
        self._thread.start()

    def count(self, counter: Counter, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts.count(counter, *labels, amount=amount)

    def observe(self, histogram: Histogram, *labels: str, seconds: float) -> None:
        """Count a span of time."""
        with self._lock:
            self._counts.observe(histogram, *labels, seconds=seconds)

    def flush(self) -> None:
        """Write what was counted; what cannot be written now is written with the next."""
        with self._lock:
            taken, self._counts = self._counts, Counts()
        if not taken.amounts:
            return
        try:
            self._db.add_counts(taken.amounts)
        except Exception as error:
            # figures are no reason to fail; a database that is away comes back
            logger.debug("figures wait for the database (%s)", type(error).__name__)
            with self._lock:
                self._counts.add(taken.amounts.items())

    def close(self) -> None:
        """Write the last counts."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def _keep(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self.flush()


def cumulated(histogram: Histogram, parts: Mapping[str, float]) -> tuple[Sequence[tuple[str, float]], float]:
    """Give a histogram's buckets as Prometheus has them, each with all below it, and its sum."""
    buckets = []
    total = 0.0
    for bound in (*(f"{bound:g}" for bound in histogram.bounds), INF):
        total += parts.get(bound, 0.0)
        buckets.append((bound, total))
    return buckets, parts.get(SUM, 0.0)
