"""The whole service as a person starts it, on the embedded defaults; one for all tests of this folder."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil
import pytest

from media_server.settings import Settings

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-m", "media_server.cli")
# enough for a test to look at a job, or to kill its worker, while it runs
SLOW_STEPS = 40
LAUNCHER = ROOT / "workers" / "child.py"
START_S = 500.0
# the service itself ends what has not drained within 30 s; a busy machine may take as long again to do so
STOP_S = 90.0
_READY = re.compile(r"ready at (\S+)")

Found = TypeVar("Found")


def pytest_itemcollected(item: pytest.Item) -> None:
    # a file's tests share services that take long to start: one process has them all
    item.add_marker(pytest.mark.xdist_group(item.location[0]))


def wait_for(find: Callable[[], Found | None], limit_s: float, what: str) -> Found:
    """Wait until `find` gives something."""
    deadline = time.monotonic() + limit_s
    while not (found := find()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.1)
    return found


def run_cli(*arguments: str, timeout_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s)


@dataclass
class Service:
    """A running `media-server up`."""

    data_dir: Path
    config: Path
    log: Path
    process: "subprocess.Popen[str]"
    url: str = ""

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0)

    def get(self, path: str) -> dict[str, Any]:
        with self.http as http:
            answer = http.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, job_id: str) -> dict[str, Any] | None:
        """Give a job once it has ended."""
        job = self.get(f"/v1/jobs/{job_id}")
        return job if job["status"] not in ("queued", "in_progress") else None

    def child(self, command: str) -> psutil.Process | None:
        """Find a process of this service by its command, such as `worker`."""
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = process.cmdline()
                if command in line or any(command in word for word in line[:1]):
                    return process
        return None

    def descendants(self) -> list[psutil.Process]:
        """List every process that this service consists of."""
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Send SIGTERM and wait for an end in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def start(data_dir: Path, config: Path) -> Service:
    """Start the service and wait until it says its address."""
    log = data_dir / "service.log"
    arguments = ("up", "--port", "0", "--data", str(data_dir), "--config", str(config))
    with log.open("a") as file:
        process = subprocess.Popen(
            # the launcher: a test run that is killed takes the service with it
            [sys.executable, str(LAUNCHER), str(os.getpid()), *COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    service = Service(data_dir, config, log, process)
    said: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        said.extend(process.stdout)

    threading.Thread(target=listen, daemon=True).start()
    try:
        wait_for(lambda: said or process.poll() is not None, START_S, "the service is ready")
        found = _READY.search("".join(said))
        assert found is not None
    except AssertionError:
        process.kill()
        process.wait()
        pytest.fail(f"the service did not start:\n{service.log_tail()}")
    service.url = found[1]
    return service


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write settings: quick leases, loopback webhooks."""
    folder = tmp_path_factory.mktemp("config")
    lines = ["version = 1", 'gpus = "cpu"', "allow_private_urls = true"]
    lines += ["lease_s = 6.0", "beat_s = 1.5", "sweep_s = 1.0", "doorbell_s = 2.0"]
    path = folder / "media-server.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def running(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Hold the one service; a test that restarts it puts the new one in its place."""
    services = [start(tmp_path_factory.mktemp("data"), config)]
    yield services
    service = services[-1]
    children = service.descendants()
    service.stop()
    _, left = psutil.wait_procs(children, timeout=60)
    assert left == [], "processes outlived their service"
    # pytest keeps the folders of three runs; the converted language model is most of them
    shutil.rmtree(service.data_dir / "models")
    shutil.rmtree(Settings(data_dir=service.data_dir).runtime_dir)


@pytest.fixture
def service(running: list[Service], request: pytest.FixtureRequest) -> Iterator[Service]:
    yield running[-1]
    if getattr(request.node, "has_failed", False):
        sys.stderr.write(running[-1].log_tail(120))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    report = yield
    if call.when == "call":
        item.has_failed = report.failed  # type: ignore[attr-defined]
    return report


@dataclass
class Hook:
    """A webhook receiver on loopback."""

    url: str
    got: list[tuple[dict[str, str], bytes]]


@pytest.fixture
def hook() -> Iterator[Hook]:
    got: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield Hook(f"http://127.0.0.1:{server.server_port}/done", got)
    server.shutdown()
    server.server_close()
