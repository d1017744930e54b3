"""What /metrics shows: the service as a whole, whichever API process answers and wherever its workers are.

Each figure has one source that all processes share:
- the database: queues, jobs, messages, and the counters and histograms of all processes (figures.py);
- what workers write beside their cards each 5 s (`models.figures`): their device's memory;
- what engines announce in Valkey: answers in the making and waiting, places of K/V in use, near-ties, collapses;
- this machine: the disks that the API writes to.
A process writes what it counted every 5 s, so figures of others may lag by that. What has no living source is left
out, never shown as zero; an engine by URL has figures of its own, where it is.

Invariant: labels are pools, kinds, states, models, workers without their process ids, and routes' templates.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import disk_usage
from typing import Any

import sqlalchemy as sa
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from media_server.figures import COUNTERS, HISTOGRAMS, PREFIX, cumulated
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import FILMS_POOL
from media_server.jobs.states import Status
from media_server.jobs.tables import counters, jobs, models, outbox, webhook_endpoints
from media_server.models.registry import LIVE_S
from media_server.text.messages import Announcement

# what a worker may say of itself, and what each means
_WORKER_FIGURES = {
    "memory_bytes": "Bytes that the model's process holds now: of its GPU, or of the machine on a CPU.",
    "memory_peak_bytes": "The most bytes that it held during its last clip, or since it was loaded.",
    "memory_total_bytes": "Bytes that the device has.",
}


@dataclass(frozen=True)
class Gauge:
    """One value of one gauge."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


# name of a figure -> label values -> part -> value
Sums = dict[str, dict[tuple[str, ...], dict[str, float]]]


class Figures(Collector):
    """Everything that one scrape shows."""

    def __init__(self, gauges: Iterable[Gauge], sums: Sums) -> None:
        self.gauges = list(gauges)
        self.sums = sums

    def registry(self) -> CollectorRegistry:
        """Give a registry of these figures alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        """Yield every family, as Prometheus' client asks for them."""
        families: dict[str, GaugeMetricFamily] = {}
        for gauge in self.gauges:
            names, values = [name for name, _ in gauge.labels], [value for _, value in gauge.labels]
            if gauge.name not in families:
                families[gauge.name] = GaugeMetricFamily(PREFIX + gauge.name, gauge.help, labels=names)
            families[gauge.name].add_metric(values, gauge.value)
        yield from families.values()
        for counter in COUNTERS:
            make: Any = GaugeMetricFamily if counter.may_sink else CounterMetricFamily
            family = make(PREFIX + counter.name, counter.help, labels=counter.labels)
            for labels, parts in self.sums.get(counter.name, {}).items():
                family.add_metric(labels, parts[""])
            yield family
        for histogram in HISTOGRAMS:
            shown = HistogramMetricFamily(PREFIX + histogram.name, histogram.help, labels=histogram.labels)
            for labels, parts in self.sums.get(histogram.name, {}).items():
                buckets, total = cumulated(histogram, parts)
                shown.add_metric(labels, buckets, total)
            yield shown


def read_figures(db: Database, folders: dict[str, Path], announced: list[Announcement] | None) -> Figures:
    """Gather what is shown now; `announced` is None where Valkey does not answer. Blocking."""
    gauges = [Gauge("build_info", "The release that answers.", 1.0, (("version", _version()),))]
    gauges.append(Gauge("broker_up", "Whether Valkey answers.", float(announced is not None)))
    gauges += [gauge for item in announced or () for gauge in _engine(item)]
    gauges += [gauge for name, folder in folders.items() for gauge in _disk(name, folder)]
    with db.read() as tx:
        gauges += [*_queues(tx), *_jobs(tx), *_workers(tx), *_messages(tx)]
        sums: Sums = defaultdict(lambda: defaultdict(dict))
        for name, labels, part, value in tx.conn.execute(sa.select(counters)):
            sums[name][tuple(json.loads(labels))][part] = value
    return Figures(gauges, sums)


def _queues(tx: Transaction) -> Iterator[Gauge]:
    """Say of each pool what waits in it and since when; a retry that is put off waits too."""
    waiting = sa.select(jobs.c.pool, sa.func.count(), sa.func.min(jobs.c.created_at)).where(
        jobs.c.status == Status.QUEUED, jobs.c.pool != FILMS_POOL
    )
    found = {pool: (count, oldest) for pool, count, oldest in tx.conn.execute(waiting.group_by(jobs.c.pool))}
    known = tx.conn.scalars(sa.text("SELECT DISTINCT pool FROM turns")).all()
    for pool in sorted({*known, *found}):
        count, oldest = found.get(pool, (0, tx.now()))
        labels = (("pool", pool),)
        yield Gauge("queue_jobs", "Jobs that wait in a pool.", count, labels)
        age_s = max(0.0, tx.now() - oldest)
        yield Gauge("queue_oldest_seconds", "Age of the oldest job that waits in a pool.", age_s, labels)


def _jobs(tx: Transaction) -> Iterator[Gauge]:
    query = sa.select(jobs.c.kind, jobs.c.status, sa.func.count()).where(jobs.c.deleted_at.is_(None))
    for kind, status, count in tx.conn.execute(query.group_by(jobs.c.kind, jobs.c.status)):
        labels = (("kind", kind), ("status", status))
        yield Gauge("jobs", "Jobs that are kept, by kind and state.", count, labels)


def _workers(tx: Transaction) -> Iterator[Gauge]:
    """Say of each living worker that it is there, and what it said of itself."""
    is_live = models.c.seen_at > tx.now() - LIVE_S
    query = sa.select(models.c.worker, models.c.pool, models.c.name, models.c.figures, models.c.seen_at)
    latest: dict[tuple[str, str], Any] = {}
    for row in tx.conn.execute(query.where(is_live).order_by(models.c.seen_at)):
        # a worker that was started again is the same one
        latest[row.worker.partition(":")[0], row.name] = row
    for (worker, model), row in latest.items():
        labels = (("worker", worker), ("pool", row.pool), ("model", model))
        yield Gauge("worker_up", "Workers and engines that were seen lately.", 1.0, labels)
        for name, help in _WORKER_FIGURES.items():
            if (value := (row.figures or {}).get(name)) is not None:
                yield Gauge(f"worker_{name}", help, value, labels)


def _messages(tx: Transaction) -> Iterator[Gauge]:
    query = sa.select(outbox.c.state, sa.func.count().label("messages")).group_by(outbox.c.state)
    found = {row.state: int(row.messages) for row in tx.conn.execute(query)}
    for state in ("pending", "delivered", "dead"):
        labels = (("state", state),)
        yield Gauge("webhook_messages", "Webhook messages of the log, by state.", found.get(state, 0), labels)
    both = outbox.outerjoin(webhook_endpoints, outbox.c.endpoint_id == webhook_endpoints.c.id)
    due = sa.select(sa.func.min(outbox.c.next_at)).select_from(both)
    # what waits for an endpoint that is disabled is not late
    is_wanted = webhook_endpoints.c.is_enabled.is_not(False)
    first = tx.conn.scalar(due.where(outbox.c.state == "pending", is_wanted))
    late_s = max(0.0, tx.now() - first) if first is not None else 0.0
    yield Gauge("webhook_overdue_seconds", "How long the next try that is due has been due.", late_s)
    disabled = sa.select(sa.func.count()).select_from(webhook_endpoints).where(~webhook_endpoints.c.is_enabled)
    yield Gauge("webhook_endpoints_disabled", "Webhook endpoints that are disabled.", tx.conn.scalar(disabled) or 0)


def _engine(item: Announcement) -> Iterator[Gauge]:
    labels = (("engine", item.name), ("model", item.model))
    yield Gauge("engine_running", "Answers that an engine is writing.", item.running, labels)
    yield Gauge("engine_waiting", "Answers that wait in an engine.", item.waiting, labels)
    yield Gauge("engine_draining", "Whether an engine takes no more.", float(item.is_draining), labels)
    # a replica of an older release does not say
    if item.kv_tokens is not None and item.kv_used_tokens is not None:
        yield Gauge("engine_kv_tokens", "Token places of an engine's K/V cache.", item.kv_tokens, labels)
        yield Gauge("engine_kv_used_tokens", "Token places that are in use.", item.kv_used_tokens, labels)
    yield Gauge("engine_greedy_choices", "Choices at temperature 0, since it started.", item.greedy_choices, labels)
    yield Gauge("engine_near_ties", "Choices that another batch might make otherwise.", item.near_ties, labels)
    yield Gauge("engine_second_tries", "Answers that collapsed and were tried again.", item.second_tries, labels)
    yield Gauge("engine_collapses", "Answers that collapsed again and were cut.", item.collapses, labels)


def _disk(name: str, folder: Path) -> Iterator[Gauge]:
    while not folder.exists():
        folder = folder.parent
    usage = disk_usage(folder)
    labels = (("folder", name),)
    yield Gauge("disk_free_bytes", "Bytes that are free where a folder lies.", usage.free, labels)
    yield Gauge("disk_size_bytes", "Bytes of the disk that a folder lies on.", usage.total, labels)


def _version() -> str:
    try:
        return version("media-server")
    except PackageNotFoundError:
        return "unknown"
