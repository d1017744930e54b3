"""The job API under load, beside a bare FastAPI route, in one run: `make bench-api` or

    python -m tests.benchmarks.bench_api [--queued 10000] [--requests 2000] [--out FILE]

The service's own processes (Valkey, API, deliveries) run on a fresh data folder; jobs are ended by a worker that makes
no clip, so that only the job system is measured. Server, client and disk share one machine: say which.
Figures: submits with `--queued` jobs waiting, as fast as they are taken and at a steady pace, status reads of those
jobs, events to 200 listeners of one job, and the time from a job's end to the arrival of its webhook.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from media_server.artifacts.store import open_artifacts
from media_server.jobs import claims, store
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.events import read_after
from media_server.jobs.rows import insert
from media_server.jobs.spec import JobSpec
from media_server.models.registry import publish
from media_server.settings import Settings, child_environment
from tests.benchmarks.load_client import Connection, Timings, burst, paced
from tests.cards import VIDEO_CARD
from tests.free_port import free_port
from tests.media_server.scripted_worker import ScriptedWorker, draw_picture, write_clip
from workers.valkey import valkey_command, wait_until_answering

CONNECTIONS = 8
# submits a second of the paced ones, and for how long
PACE = 10.0
PACED_S = 30.0
LISTENERS = 200
EVENTS = 100
DELIVERIES = 200
_ROWS_A_COMMIT = 500
PARAMS = {"num_frames": 32, "size": "160x96", "seed": 1, "num_inference_steps": 8}
PROMPTS = {"prompt": "a red ball"}


@dataclass
class Bench:
    """What is measured: the service on a folder of its own, and the bare routes."""

    db: Database
    worker: ScriptedWorker
    port: int
    bare_port: int
    requests: int


def main() -> None:
    """Run everything, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(), "queued": arguments.queued, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, running(Path(folder), arguments.requests) as bench:
        fill(bench.db, arguments.queued)
        figures |= asyncio.run(measure(bench))
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


async def measure(bench: Bench) -> dict[str, Any]:
    """Measure in turns, ours and the bare route's next to each other."""
    made: list[str] = []

    async def submit(connection: Connection, number: int) -> None:
        made.append(
            (await connection.ask("POST", "/v1/videos", {"prompt": f"a red ball {number}", "seconds": "2"}))["id"]
        )

    async def submit_bare(connection: Connection, number: int) -> None:
        await connection.ask("POST", "/rows", {"prompt": f"a red ball {number}", "seconds": "2"})

    async def read(connection: Connection, number: int) -> None:
        await connection.ask("GET", f"/v1/videos/{made[number % len(made)]}")

    async def read_bare(connection: Connection, number: int) -> None:
        await connection.ask("GET", f"/rows/{1 + number % bench.requests}")

    return {
        "submits": compare(
            await burst(bench.port, bench.requests, CONNECTIONS, submit),
            await burst(bench.bare_port, bench.requests, CONNECTIONS, submit_bare),
        ),
        # what one of several users at their tools would see, and not what a full server takes
        "submits_at_a_pace": compare(
            await paced(bench.port, PACE, PACED_S, CONNECTIONS, submit),
            await paced(bench.bare_port, PACE, PACED_S, CONNECTIONS, submit_bare),
        ),
        "status_reads": compare(
            await burst(bench.port, bench.requests, CONNECTIONS, read),
            await burst(bench.bare_port, bench.requests, CONNECTIONS, read_bare),
        ),
        "events": await measure_events(bench),
        "deliveries": await measure_deliveries(bench),
    }


def compare(ours: Timings, bare: Timings) -> dict[str, Any]:
    """Put both figures side by side; the ratio is of requests a second."""
    ratio = (len(ours.each_s) / ours.total_s) / (len(bare.each_s) / bare.total_s)
    return {"ours": ours.figures(), "bare": bare.figures(), "ours_to_bare": round(ratio, 3)}


async def measure_events(bench: Bench) -> dict[str, Any]:
    """Count the events a second that reach all listeners of one job."""
    async with hung_up(bench.port, LISTENERS) as listeners:
        video = await (await Connection.open(bench.port)).ask(
            "POST", "/v1/videos", {"prompt": "a red ball", "seconds": "2", "priority": 100}
        )
        claim = await asyncio.to_thread(bench.worker.claim, "video")
        assert claim is not None and claim.job.id == video["id"], "the job of the highest priority comes first"
        # those that are there already: queued, started
        path = f"/v1/jobs/{video['id']}/events"
        before = len(await asyncio.to_thread(events_of, bench.db, video["id"]))
        counting = [asyncio.create_task(one.count_events(path, before + EVENTS)) for one in listeners]
        await asyncio.sleep(2)
        started = time.perf_counter()

        def beat() -> None:
            for step in range(EVENTS):
                claims.beat(bench.db, claim, lease_s=60, stage="denoise", step=step, total_steps=EVENTS)

        beating = asyncio.create_task(asyncio.to_thread(beat))
        counts = await asyncio.gather(*counting)
        ours_s = time.perf_counter() - started
        await beating
        assert counts == [before + EVENTS] * LISTENERS
        await asyncio.to_thread(bench.worker.do, claim)
    async with hung_up(bench.bare_port, LISTENERS) as listeners:
        counting = [asyncio.create_task(one.count_events("/events", EVENTS)) for one in listeners]
        await asyncio.sleep(2)
        started = time.perf_counter()
        told = await (await Connection.open(bench.bare_port)).ask("POST", f"/events/{EVENTS}")
        assert told["listeners"] == LISTENERS
        assert await asyncio.gather(*counting) == [EVENTS] * LISTENERS
        bare_s = time.perf_counter() - started
    total = LISTENERS * EVENTS
    return {
        "listeners": LISTENERS,
        "ours": {"a_second": round(total / ours_s)},
        "bare": {"a_second": round(total / bare_s)},
        "ours_to_bare": round(bare_s / ours_s, 3),
    }


def events_of(db: Database, job_id: str) -> list[Any]:
    """Read the events that a job has by now."""
    return list(read_after(db, job_id=job_id, after=0, limit=100))


async def measure_deliveries(bench: Bench) -> dict[str, Any]:
    """Measure from a job's end to the arrival of its webhook."""
    arrived: dict[str, float] = {}

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                arrived.setdefault(body["data"]["id"], time.time())
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    hook = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    connection = await Connection.open(bench.port)
    body = {"prompt": "a red ball", "seconds": "2", "priority": 100, "webhook_url": hook}
    wanted = [(await connection.ask("POST", "/v1/videos", body))["id"] for _ in range(DELIVERIES)]

    def work() -> None:
        for _ in range(DELIVERIES):
            claim = bench.worker.claim("video")
            assert claim is not None
            bench.worker.do(claim)

    await asyncio.to_thread(work)
    deadline = time.monotonic() + 120
    while len(arrived) < DELIVERIES and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    server.close()
    # to the microsecond, from the database's clock: it is this machine's
    ended = {id: store.get(bench.db, id).completed_at or 0.0 for id in wanted}
    lags = sorted(arrived[id] - ended[id] for id in wanted if id in arrived)
    return {
        "sent": DELIVERIES,
        "arrived": len(lags),
        "p50_s": round(lags[len(lags) // 2], 3),
        "p99_s": round(lags[int(0.99 * len(lags))], 3),
    }


@contextlib.asynccontextmanager
async def hung_up(port: int, count: int) -> Any:
    """Open connections and close them in the end."""
    opened = [await Connection.open(port) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def fill(db: Database, count: int) -> None:
    """Queue jobs straight into the store."""
    for start in range(0, count, _ROWS_A_COMMIT):
        with db.write() as tx:
            for _ in range(min(_ROWS_A_COMMIT, count - start)):
                insert(tx, JobSpec(kind="video", pool="video", model="tiny-wan", params=PARAMS, prompts=PROMPTS))


@contextlib.contextmanager
def running(folder: Path, requests: int) -> Iterator[Bench]:
    """Start the service's processes and the bare routes; stop them in the end."""
    settings = Settings(
        data_dir=folder / "data",
        allow_private_urls=True,
        max_queue_jobs=None,
        max_queue_wait_s=None,
        log_level="WARNING",
    )
    settings.data_dir.mkdir()
    db = open_database(settings.database)
    migrate(db)
    publish(db, VIDEO_CARD, "bench@here:1")
    clip = write_clip(folder / "clip.mp4", 32)
    worker = ScriptedWorker(db, open_artifacts(settings), clip, draw_picture("JPEG", (64, 64)))
    port, bare_port = free_port(), free_port()
    python = [sys.executable, "-P", "-m"]
    commands = [
        valkey_command(settings),
        [*python, "media_server.cli", "api", "--port", str(port)],
        [*python, "media_server.cli", "deliveries"],
        [sys.executable, "-m", "tests.benchmarks.bare_api", str(bare_port), str(folder / "bare.db")],
    ]
    environment = child_environment(settings)
    processes = [subprocess.Popen(commands[0], stdout=subprocess.DEVNULL)]
    try:
        assert wait_until_answering(settings.redis_url, 60)
        processes += [subprocess.Popen(command, env=environment) for command in commands[1:]]
        wait_for(f"http://127.0.0.1:{port}/health/live")
        wait_for(f"http://127.0.0.1:{bare_port}/openapi.json")
        yield Bench(db, worker, port, bare_port, requests)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)
        db.close()


def wait_for(url: str) -> None:
    """Wait until a URL answers."""
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).is_success:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"bench_api: {url} does not answer")
        time.sleep(0.1)


def machine() -> str:
    """Say what this runs on."""
    return f"{os.cpu_count()} cores of {processor()}, Python {platform.python_version()}"


def processor() -> str:
    """Name the processor, where the system says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
