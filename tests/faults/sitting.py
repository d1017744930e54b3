"""One sitting of a campaign: a service on an empty folder, its customer, mischief, and a look at what came of it."""

import os
import platform
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import small_disk
from tests.faults.customer import TERMINAL, Customer
from tests.faults.front import Front
from tests.faults.invariants import findings as folder_findings
from tests.faults.mischief import Mischief, send
from tests.faults.receiver import Receiver
from tests.faults.service import Broker, Service


class Sitting:
    """Some of a campaign's actions, done without a break; `slack` stretches the limits of waiting for a busy machine.

    Every so many actions, and after the last, all is left to become calm and is looked at: those before are checked.
    """

    def __init__(self, seed: int, folder: Path, *, text_model: Path | None, is_real: bool, slack: float = 1.0) -> None:
        self.seed = seed
        self.slack = slack
        self.folder = folder
        self.is_real = is_real
        self.num_checked = 0
        self.num_checks = 0
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.no_disk = small_disk.mount(self.disk)
        self.service = Service(folder, self.disk / "data", text_model=text_model, is_stand_in=not is_real)
        self.broker = Broker(folder)
        self.receiver = Receiver(seed)
        self.front = Front(self.service.port)
        self.customer = Customer(f"{self.receiver.url}/own", seed, with_films=text_model is not None, is_real=is_real)
        self.mischief = Mischief(
            random.Random(seed), self.service, self.broker, self.customer, self.front, self.receiver
        )
        self.mischief.slack, self.mischief.is_real = slack, is_real
        self.mischief.disk = self.disk if self.no_disk is None else None
        self.customer.url = f"http://127.0.0.1:{self.mischief.api_line.port}"
        self.done = self.mischief.done
        self.findings: list[str] = self.mischief.findings

    def run(
        self, num_actions: int, seconds: float | None, note: Callable[["Sitting"], None], *, check_every: int = 250
    ) -> None:
        """Do so many actions, or as many as fit into `seconds`; `note` is called now and then."""
        self.mischief.start()
        self._wait("ready", lambda: self.front.get("/health/ready") is not None, 240)
        self.receiver.secrets["/endpoint"] = self.front.add_endpoint(f"{self.receiver.url}/endpoint")
        self.mischief.began = began = time.monotonic()
        is_over = False
        try:
            note(self)
            while True:
                self._go_on()
                goal = min(num_actions, self.num_checked + check_every)
                while len(self.done) < goal and not (is_over := _is_over(began, seconds)):
                    before = len(self.done)
                    self.mischief.act()
                    if before != len(self.done) and len(self.done) % 25 == 0:
                        note(self)
                self.calm()
                self._look()
                if is_over or len(self.done) >= num_actions:
                    self._find(self.service.stop(90 * self.slack))
                    self._count()
                    return
                self._count()
                note(self)
        finally:
            self.close()

    def result(self) -> dict[str, Any]:
        """Say what was done and what came of it."""
        book = [entry for entry in self.customer.book if entry.id]
        ends = Counter("deleted" if entry.is_deleted else entry.status for entry in book)
        return {
            "seed": self.seed,
            "gpu_program": "real" if self.is_real else "stand-in",
            "language_engine": self.service.text_model is not None,
            "small_disk": self.no_disk or f"tmpfs of {small_disk.DISK_BYTES >> 20} MiB",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
            "seconds": round(time.monotonic() - self.mischief.began, 1),
            "num_actions": len(self.done),
            "num_checked": self.num_checked,
            "num_checks": self.num_checks,
            "actions": dict(Counter(f"{item['action']} {item['target']}".strip() for item in self.done)),
            "service_starts": self.service.num_starts,
            "jobs": {"accepted": len(book), **ends},
            "attempts": sum(entry.attempt for entry in book),
            "failed_with": dict(Counter(entry.error for entry in book if entry.error)),
            "requests_sent_again": self.customer.retries,
            "messages": {
                "arrivals": len(self.receiver.log),
                "taken": len({arrival.id for arrival in self.receiver.log if arrival.status < 300}),
            },
            "recoveries": self.mischief.recoveries,
            "findings": self.findings,
            "log": self.done,
        }

    def calm(self) -> None:
        """End every fault that lasts, and wait until everything has ended."""
        self.mischief.settle()
        self.receiver.is_calm = True
        self.receiver.skew_s = 0.0
        self.mischief.keep_running()
        # a worker that was killed in the middle of a clip clears its folder when it starts
        self.service.keep_second()
        self._wait("ready again", lambda: self.front.get("/health/ready") is not None, 240)
        self.customer.stop(120 * self.slack)
        self._wait("every job has ended", self._have_ended, 300)
        self._wait("every message is taken", self.front.are_delivered, 120)
        # files of attempts that were lost are kept for half a minute, in case their worker still writes
        self._wait("the folder is in order", lambda: not folder_findings(self.service.data_dir), 120)

    def close(self) -> None:
        """End everything that was started."""
        self.customer.is_closed.set()
        for process in (*self.service.tree(), *self.service.second_tree()):
            send(process, signal.SIGKILL)
        self.broker.stop()
        self.mischief.close()
        self.receiver.close()
        if self.no_disk is None:
            small_disk.unmount(self.disk)

    def _go_on(self) -> None:
        self.receiver.is_calm = False
        self.customer.start()

    def _count(self) -> None:
        """What has been done by now has been looked at."""
        self.num_checked = len(self.done)
        self.num_checks += 1

    def _find(self, found: list[str]) -> None:
        # what was wrong at one look is wrong at the next
        self.findings += [finding for finding in found if finding not in self.findings]

    def _look(self) -> None:
        """Hold the end against everything that must be."""
        self._find(folder_findings(self.service.data_dir))
        jobs = self.front.roots()
        keys = Counter(job["metadata"].get("key") for job in jobs)
        self._find([f"{key} was accepted {count} times" for key, count in keys.items() if count > 1])
        listed = {job["id"] for job in jobs}
        ends = {}
        for entry in self.customer.book:
            if not entry.id or entry.is_deleted:
                continue
            if entry.id not in listed:
                self._find([f"{entry.id} was accepted, and is not listed"])
                continue
            job = self.front.get(f"/v1/jobs/{entry.id}")
            if job is None:
                self._find([f"{entry.id} cannot be read"])
                continue
            self.customer.note(entry, job)
            if (wrong := self.customer.judge(entry)) is not None:
                self._find([wrong])
            kind = "film" if entry.kind == "film" else "video"
            ends[entry.id] = f"{kind}.{entry.status}"
            if entry.status == "completed" and not self.front.has_content(f"/v1/{kind}s/{entry.id}/content"):
                self._find([f"{entry.id} has completed, and its file cannot be read"])
        known = {entry.id for entry in self.customer.book}
        self._find([f"{id} is there, and nobody was told" for id in listed - known])
        self._find(self.receiver.findings(ends))
        self._find(self.customer.findings)

    def _have_ended(self) -> bool:
        self.customer.poll()
        return not self.customer.open_entries() and all(job["status"] in TERMINAL for job in self.front.roots())

    def _wait(self, what: str, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s * self.slack
        while not is_so():
            if time.monotonic() > deadline:
                self.findings.append(f"{what}: not within {limit_s * self.slack:.0f} s")
                return
            self.mischief.keep_running()
            time.sleep(0.3)


def _is_over(began: float, seconds: float | None) -> bool:
    return seconds is not None and time.monotonic() - began >= seconds
