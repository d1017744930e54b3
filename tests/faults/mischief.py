"""What a campaign does to its service: drawn at random, done, and undone in time, while others are being done."""

import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults import small_disk
from tests.faults.customer import TERMINAL, Customer, Entry
from tests.faults.front import Front
from tests.faults.proxy import Mode, Proxy
from tests.faults.receiver import Receiver
from tests.faults.service import SECOND, Broker, Service

# parts that are killed and stopped, and how often each
VICTIMS = {
    "api": 4, "worker": 5, "program": 5, "media": 2, "storyboards": 1, "deliveries": 4, "sweeper": 3, "valkey": 4,
    "engine": 1, "supervisor": 2, "second": 4,
}  # fmt: skip
ACTIONS = {"kill": 10, "stop": 5, "tree": 2, "api_line": 4, "broker_line": 3, "disk": 2, "clock": 2, "measure": 3}
# a worker's death to the next attempt at its job: the lease and so much more before the model loads, and in all
BEYOND_LEASE_S, IN_ALL_S = 10.0, 60.0
# how often the service has the lease that it is shipped with; else one of which a campaign meets more ends
SHIPPED = 0.25


class Mischief:
    """Draws and does one action after another; what it has done is in `done`, what was wrong in `findings`."""

    def __init__(
        self,
        draw: random.Random,
        service: Service,
        broker: Broker,
        customer: Customer,
        front: Front,
        receiver: Receiver,
    ) -> None:
        self.random = draw
        self.service = service
        self.broker = broker
        self.customer = customer
        self.front = front
        self.receiver = receiver
        self.broker_line = Proxy(("127.0.0.1", broker.port))
        self.api_line = Proxy(service.address)
        # the small disk; None if there is none
        self.disk: Path | None = None
        self.is_real = False
        # stretches the limits of waiting
        self.slack = 1.0
        self.done: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self.recoveries: list[dict[str, Any]] = []
        self.began = time.monotonic()
        # faults that last: when each is over, and what ends it
        self._lasting: list[tuple[float, Callable[[], None]]] = []

    def act(self) -> None:
        """Do one action, after a moment."""
        self.pause(self.random.uniform(0.1, 1.5))
        self.keep_running()
        self.service.keep_second()
        action = self.random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        getattr(self, f"_{action}")()

    def pause(self, seconds: float) -> None:
        """Wait, and end what is over meanwhile."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for item in [item for item in self._lasting if item[0] <= now]:
                self._lasting.remove(item)
                item[1]()
            if now >= end:
                return
            time.sleep(min(0.05, end - now))

    def settle(self) -> None:
        """Wait until each fault that lasts is over."""
        while self._lasting:
            self.pause(max(0.0, min(at for at, _ in self._lasting) - time.monotonic()))

    def start(self) -> None:
        """Start the service, with a broker of its own or on the one behind the proxy, with one lease or another."""
        url = f"redis://127.0.0.1:{self.broker_line.port}/0"
        self.service.start(None if self.random.random() < 0.4 else url, is_quick=self.random.random() >= SHIPPED)

    def keep_running(self) -> None:
        """Start the service again if it has ended; nobody but us may end it, and we start it at once."""
        process = self.service.process
        if process is not None and process.poll() is not None:
            self.findings.append(f"the supervisor ended by itself, with {process.returncode}")
            self.start()

    def close(self) -> None:
        """Close the lines."""
        for proxy in (self.api_line, self.broker_line):
            proxy.close()

    def _note(self, action: str, target: str = "", **details: Any) -> None:
        self.done.append({"at": round(time.monotonic() - self.began, 1), "action": action, "target": target, **details})

    def _last(self, seconds: float, end: Callable[[], None]) -> None:
        self._lasting.append((time.monotonic() + seconds, end))

    def _victim(self) -> tuple[str, psutil.Process | None]:
        part = self.random.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        return part, self.service.find(part)

    def _kill(self) -> None:
        part, process = self._victim()
        if part == "valkey" and process is None:
            self._note("restart", "broker")
            self.broker.restart()
        elif part == "supervisor":
            self._note("kill", part)
            family = self.service.tree()
            send(family[0], signal.SIGKILL)
            self._expect_dead(family)
            self.start()
        elif process is not None:
            self._note("kill", part)
            send(process, signal.SIGKILL)

    def _stop(self) -> None:
        part, process = self._victim()
        # now and then for longer than a lease lasts
        is_worker = part in ("worker", "program", "second")
        long_s = self.service.lease_s * 1.3
        seconds = self.random.choice((0.5, 2.0, 5.0, long_s, long_s) if is_worker else (0.5, 2.0, 5.0, 3.0, 3.0))
        if part == "valkey" and process is None and self.broker.process is not None:
            process = psutil.Process(self.broker.process.pid)
        if process is None:
            return
        self._note("stop", part, seconds=seconds)
        send(process, signal.SIGSTOP)
        self._last(seconds, lambda: send(process, signal.SIGCONT))

    def _tree(self) -> None:
        """Kill everything at once."""
        self._note("kill", "tree")
        family = self.service.tree()
        for process in (*family, *self.service.second_tree()):
            send(process, signal.SIGKILL)
        self._expect_dead(family)
        self.start()

    def _expect_dead(self, family: list[psutil.Process]) -> None:
        assert self.service.process is not None
        self.service.process.wait(30)
        _, left = psutil.wait_procs(family, timeout=30 * self.slack)
        for process in left:
            self.findings.append(f"{' '.join(process.cmdline()[:6])} outlived its supervisor")
            send(process, signal.SIGKILL)

    def _line(self, name: str, proxy: Proxy) -> None:
        mode: Mode = self.random.choice(("refuse", "swallow", "cut"))
        seconds = self.random.choice((0.5, 2.0, 4.0, 8.0))
        if proxy.mode != "pass":
            # one fault of a line at a time
            return
        self._note(mode, name, seconds=seconds)
        proxy.set(mode)
        self._last(seconds, lambda: proxy.set("pass"))

    def _api_line(self) -> None:
        self._line("api_line", self.api_line)

    def _broker_line(self) -> None:
        self._line("broker_line", self.broker_line)

    def _disk(self) -> None:
        """Leave not a byte on the disk for a while; deleting must work all the same, and nothing else is in its way."""
        if self.disk is None:
            return
        self.settle()
        self._note("fill", "disk")
        ballast = self.disk / "ballast"
        clips = [
            entry for entry in self.customer.book
            if entry.id and entry.status in TERMINAL and not entry.is_deleted and entry.kind != "film"
        ]  # fmt: skip
        # set aside since the last time: what deleting is done at the expense of
        has_reserve = (self.disk / "data" / "reserve").exists()
        end = time.monotonic() + self.random.uniform(2.0, 6.0)
        with ballast.open("ab", buffering=0) as file:
            small_disk.fill(file)
            if clips and has_reserve and self.service.is_running():
                self._delete_on_full_disk(self.random.choice(clips))
            while time.monotonic() < end:
                small_disk.fill(file)
                time.sleep(0.2)
        ballast.unlink()

    def _delete_on_full_disk(self, entry: Entry) -> None:
        status = self.front.delete_clip(entry.id)
        if status is None:
            # the API was killed a moment ago
            return
        entry.is_deleted = status in (200, 404)
        if status == 507:
            self.findings.append(f"{entry.id} could not be deleted on a full disk")

    def _clock(self) -> None:
        """Have the receiver's clock jump: beyond five minutes it takes no signature for good."""
        self._note("clock", "receiver")
        with self.receiver.lock:
            self.receiver.skew_s = self.random.choice((0.0, 0.0, 240.0, -900.0, 900.0))

    def _measure(self) -> None:
        """Kill a worker, or its program, in the middle of a job, do nothing else, and take the time to the next try."""
        self.settle()
        entry, attempt = self._find_running(10.0)
        part = self.random.choice(("worker", "worker", "program"))
        holder = self._holder(entry.id) if entry is not None else None
        if entry is None or holder is None:
            return
        name, process = holder
        if part == "program":
            programs = process.children(recursive=True)
            if not programs:
                return
            process = programs[0]
        # nobody sees the second one die: what it held is free when its lease has lapsed
        part = f"second {part}" if name == SECOND else part
        self._note("measure", part)
        send(process, signal.SIGKILL)
        began = time.monotonic()
        while time.monotonic() - began < 2 * IN_ALL_S * self.slack:
            job = self.front.get(f"/v1/jobs/{entry.id}")
            if entry.is_cancelled:
                # its owner wants it no more
                return
            # a real model has to be loaded first
            is_going_on = job is not None and job["attempt"] > attempt and (job["progress"] > 0 or not self.is_real)
            if job is not None and (is_going_on or job["status"] in TERMINAL):
                if job["attempt"] == attempt and job["status"] != "failed":
                    # it had ended before the blow fell
                    return
                break
            time.sleep(0.1)
        seconds = round(time.monotonic() - began, 1)
        self.recoveries.append({"part": part, "seconds": seconds, "lease_s": self.service.lease_s})
        limit = (IN_ALL_S if self.is_real else self.service.lease_s + BEYOND_LEASE_S) * self.slack
        if seconds > limit:
            self.findings.append(
                f"{entry.id} was taken up again {seconds} s after its {part} died, more than {limit:g} s"
            )

    def _holder(self, job_id: str) -> tuple[str, psutil.Process] | None:
        """Find the worker that holds a job, by the data folder."""
        with sqlite3.connect(f"file:{self.service.data_dir / 'media-server.db'}?mode=ro", uri=True) as conn:
            row = conn.execute("SELECT lease_owner FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None or row[0] is None:
            return None
        name, _, place = row[0].partition("@")
        try:
            return name, psutil.Process(int(place.rpartition(":")[2]))
        except psutil.NoSuchProcess:
            return None

    def _find_running(self, limit_s: float) -> tuple[Entry | None, int]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for entry in self.customer.open_entries():
                job = self.front.get(f"/v1/jobs/{entry.id}")
                if job is not None and job["status"] == "in_progress" and 5 < job["progress"] < 60:
                    return entry, job["attempt"]
            time.sleep(0.1)
        return None, 0


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
