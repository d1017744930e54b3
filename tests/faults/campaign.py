"""A seeded random campaign against the real service: killed, stopped, cut off and filled up, it must lose nothing.

`python -m tests.faults.campaign --actions N [--seed S] [--out FILE]`, or `make faults N=1000`. The processes are those
of `media-server up`: API, video worker, media, storyboard, delivery workers, sweeper, Valkey, and with --text the
language engine. The GPU program is a stand-in (stand_in.py) unless --real says otherwise: loading the real one would
be most of a campaign. A seed gives the same actions in the same order; when each meets the service is the machine's.

What must hold is looked at from outside: by HTTP (customer.py), in a webhook receiver's log (receiver.py), and in the
data folder once everything has ended (invariants.py). The result is a JSON file with all that was done and found.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults.customer import TERMINAL, Customer, Entry
from tests.faults.invariants import findings as folder_findings
from tests.faults.proxy import Mode, Proxy
from tests.faults.receiver import Receiver
from tests.faults.service import SECOND, Broker, Service

RESULTS = Path(__file__).with_name("results")
DISK_BYTES = 192 << 20
# parts that are killed and stopped, and how often each
VICTIMS = {
    "api": 4, "worker": 5, "program": 5, "media": 2, "storyboards": 1, "deliveries": 4, "sweeper": 3, "valkey": 4,
    "engine": 1, "supervisor": 2, "second": 4,
}  # fmt: skip
ACTIONS = {"kill": 10, "stop": 5, "tree": 2, "api_line": 4, "broker_line": 3, "disk": 2, "clock": 2, "measure": 3}
# a worker's death to the next attempt at its job: below this before the model loads, and in all
BEFORE_LOAD_S, IN_ALL_S = 30.0, 60.0


class Campaign:
    """One run; `slack` stretches the limits of waiting for a machine that has other work."""

    def __init__(self, seed: int, folder: Path, *, text_model: Path | None, is_real: bool, slack: float = 1.0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.slack = slack
        self.folder = folder
        self.is_real = is_real
        self.done: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self.recoveries: list[dict[str, Any]] = []
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.no_disk = _mount(self.disk)
        self.service = Service(folder, self.disk / "data", text_model=text_model, is_stand_in=not is_real)
        self.broker = Broker(folder)
        self.broker_line = Proxy(("127.0.0.1", self.broker.port))
        self.api_line = Proxy(self.service.address)
        self.receiver = Receiver(seed)
        url = f"http://127.0.0.1:{self.api_line.port}"
        self.customer = Customer(url, f"{self.receiver.url}/own", seed, with_films=text_model is not None)
        self.began = time.monotonic()

    def run(self, num_actions: int, seconds: float | None, note: Callable[["Campaign"], None]) -> None:
        """Do so many actions, or as many as fit into `seconds`; then calm down and look."""
        self._start()
        self._wait("ready", lambda: self._get("/health/ready") is not None, 240)
        self._add_endpoint()
        self.customer.start()
        self.began = time.monotonic()
        try:
            while len(self.done) < num_actions and (seconds is None or time.monotonic() - self.began < seconds):
                time.sleep(self.random.uniform(0.1, 1.5))
                self._act()
                if len(self.done) % 25 == 0:
                    note(self)
            self.calm()
            self._look()
        finally:
            self.close()

    def result(self) -> dict[str, Any]:
        """Say what was done and what came of it."""
        ends = Counter(entry.status if not entry.is_deleted else "deleted" for entry in self.customer.book if entry.id)
        times = sorted(item["seconds"] for item in self.recoveries)
        return {
            "seed": self.seed,
            "gpu_program": "real" if self.is_real else "stand-in",
            "language_engine": self.service.text_model is not None,
            "small_disk": self.no_disk or f"tmpfs of {DISK_BYTES >> 20} MiB",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
            "seconds": round(time.monotonic() - self.began, 1),
            "actions": dict(Counter(f"{item['action']} {item['target']}".strip() for item in self.done)),
            "num_actions": len(self.done),
            "service_starts": self.service.num_starts,
            "jobs": {"accepted": len([entry for entry in self.customer.book if entry.id]), **ends},
            "attempts": sum(entry.attempt for entry in self.customer.book),
            "failed_with": dict(Counter(entry.error for entry in self.customer.book if entry.error)),
            "requests_sent_again": self.customer.retries,
            "messages": {
                "arrivals": len(self.receiver.log),
                "taken": len({a.id for a in self.receiver.log if a.status < 300}),
            },
            "recovery_s": {
                "measured": len(times),
                "median": times[len(times) // 2] if times else None,
                "longest": times[-1] if times else None,
                "each": self.recoveries,
            },
            "findings": self.findings,
            "log": self.done,
        }

    def _act(self) -> None:
        self._keep_running()
        self.service.keep_second()
        action = self.random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        getattr(self, f"_{action}")()

    def _note(self, action: str, target: str = "", **details: Any) -> None:
        self.done.append({"at": round(time.monotonic() - self.began, 1), "action": action, "target": target, **details})

    def _start(self) -> None:
        """Start the service, with a broker of its own or on the one behind the proxy."""
        has_own = self.random.random() < 0.4
        self.service.start(None if has_own else f"redis://127.0.0.1:{self.broker_line.port}/0")

    def _keep_running(self) -> None:
        """Start the service again if it has ended; nobody but us may end it, and we start it at once."""
        process = self.service.process
        if process is not None and process.poll() is not None:
            self.findings.append(f"the supervisor ended by itself, with {process.returncode}")
            self._start()

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
            self._kill_supervisor()
        elif process is not None:
            self._note("kill", part)
            _signal(process, signal.SIGKILL)

    def _stop(self) -> None:
        part, process = self._victim()
        # now and then for longer than a lease lasts
        is_worker = part in ("worker", "program", "second")
        seconds = self.random.choice((0.5, 2.0, 5.0, 26.0, 26.0) if is_worker else (0.5, 2.0, 5.0, 3.0, 3.0))
        if part == "valkey" and process is None and self.broker.process is not None:
            process = psutil.Process(self.broker.process.pid)
        if process is None:
            return
        self._note("stop", part, seconds=seconds)
        _signal(process, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(process, signal.SIGCONT)

    def _tree(self) -> None:
        """Kill everything at once."""
        self._note("kill", "tree")
        family = self.service.tree()
        for process in (*family, *self.service.second_tree()):
            _signal(process, signal.SIGKILL)
        self._expect_dead(family)
        self._start()

    def _kill_supervisor(self) -> None:
        family = self.service.tree()
        _signal(family[0], signal.SIGKILL)
        self._expect_dead(family)
        self._start()

    def _expect_dead(self, family: list[psutil.Process]) -> None:
        assert self.service.process is not None
        self.service.process.wait(30)
        _, left = psutil.wait_procs(family, timeout=30 * self.slack)
        for process in left:
            self.findings.append(f"{' '.join(process.cmdline()[:6])} outlived its supervisor")
            _signal(process, signal.SIGKILL)

    def _line(self, name: str, proxy: Proxy) -> None:
        mode: Mode = self.random.choice(("refuse", "swallow", "cut"))
        seconds = self.random.choice((0.5, 2.0, 4.0, 8.0))
        self._note(mode, name, seconds=seconds)
        proxy.set(mode)
        time.sleep(seconds)
        proxy.set("pass")

    def _api_line(self) -> None:
        self._line("api_line", self.api_line)

    def _broker_line(self) -> None:
        self._line("broker_line", self.broker_line)

    def _disk(self) -> None:
        """Leave not a byte on the disk for a while; deleting must work all the same."""
        if self.no_disk is not None:
            return
        self._note("fill", "disk")
        ballast = self.disk / "ballast"
        ended = [
            entry for entry in self.customer.book if entry.id and entry.status in TERMINAL and not entry.is_deleted
        ]
        clips = [entry for entry in ended if entry.kind != "film"]
        # set aside since the last time: what deleting is done at the expense of
        has_reserve = (self.disk / "data" / "reserve").exists()
        end = time.monotonic() + self.random.uniform(2.0, 6.0)
        with ballast.open("ab", buffering=0) as file:
            _fill(file)
            if clips and has_reserve and self.service.is_running():
                self._delete_on_full_disk(self.random.choice(clips))
            while time.monotonic() < end:
                _fill(file)
                time.sleep(0.2)
        ballast.unlink()

    def _delete_on_full_disk(self, entry: Entry) -> None:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{self.service.port}", timeout=20, trust_env=False) as http:
                answer = http.delete(f"/v1/videos/{entry.id}")
        except httpx.HTTPError:
            # the API was killed a moment ago
            return
        entry.is_deleted = answer.status_code in (200, 404)
        if answer.status_code == 507:
            self.findings.append(f"{entry.id} could not be deleted on a full disk")

    def _clock(self) -> None:
        """Have the receiver's clock jump: beyond five minutes it takes no signature for good."""
        self._note("clock", "receiver")
        with self.receiver.lock:
            self.receiver.skew_s = self.random.choice((0.0, 0.0, 240.0, -900.0, 900.0))

    def _measure(self) -> None:
        """Kill a worker, or its program, in the middle of a job, do nothing else, and take the time to the next try."""
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
        _signal(process, signal.SIGKILL)
        began = time.monotonic()
        while time.monotonic() - began < 2 * IN_ALL_S * self.slack:
            job = self._get(f"/v1/jobs/{entry.id}")
            if entry.is_cancelled:
                # its owner wants it no more
                return
            if job is not None and (job["attempt"] > attempt or job["status"] in TERMINAL):
                if job["attempt"] == attempt and job["status"] != "failed":
                    # it had ended before the blow fell
                    return
                break
            time.sleep(0.1)
        seconds = round(time.monotonic() - began, 1)
        self.recoveries.append({"part": part, "seconds": seconds})
        limit = (IN_ALL_S if self.is_real else BEFORE_LOAD_S) * self.slack
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
                job = self._get(f"/v1/jobs/{entry.id}")
                if job is not None and job["status"] == "in_progress" and 5 < job["progress"] < 60:
                    return entry, job["attempt"]
            time.sleep(0.1)
        return None, 0

    def calm(self) -> None:
        """Undo every fault that lasts, and wait until everything has ended."""
        for proxy in (self.api_line, self.broker_line):
            proxy.set("pass")
        self.receiver.is_calm = True
        self.receiver.skew_s = 0.0
        self._keep_running()
        # a worker that was killed in the middle of a clip clears its folder when it starts
        self.service.keep_second()
        self._wait("ready again", lambda: self._get("/health/ready") is not None, 240)
        self.customer.stop(120 * self.slack)
        self._wait("every job has ended", self._have_ended, 300)
        self._wait("every message is taken", self._are_delivered, 120)
        # files of attempts that were lost are kept for half a minute, in case their worker still writes
        self._wait("the folder is in order", lambda: not folder_findings(self.service.data_dir), 120)

    def _look(self) -> None:
        """Hold the end against everything that must be."""
        self.findings += folder_findings(self.service.data_dir)
        self.findings += self.customer.findings
        jobs = self._list_roots()
        keys = Counter(job["metadata"].get("key") for job in jobs)
        self.findings += [f"{key} was accepted {count} times" for key, count in keys.items() if count > 1]
        found = {job["id"] for job in jobs}
        ends = {}
        for entry in self.customer.book:
            if not entry.id or entry.is_deleted:
                continue
            if entry.id not in found:
                self.findings.append(f"{entry.id} was accepted, and is not listed")
                continue
            self.customer.note(entry, self._get(f"/v1/jobs/{entry.id}") or {})
            if (wrong := self.customer.judge(entry)) is not None:
                self.findings.append(wrong)
            kind = "film" if entry.kind == "film" else "video"
            ends[entry.id] = f"{kind}.{entry.status}"
            if entry.status == "completed" and not self._has_content(f"/v1/{kind}s/{entry.id}/content"):
                self.findings.append(f"{entry.id} has completed, and its file cannot be read")
        known = {entry.id for entry in self.customer.book}
        self.findings += [f"{id} is there, and nobody was told" for id in found - known]
        self.findings += self.receiver.findings(ends)
        self.findings += self.service.stop(90 * self.slack)

    def close(self) -> None:
        """End everything that was started."""
        self.customer.is_closed.set()
        for process in (*self.service.tree(), *self.service.second_tree()):
            _signal(process, signal.SIGKILL)
        self.broker.stop()
        for proxy in (self.api_line, self.broker_line):
            proxy.close()
        self.receiver.close()
        if self.no_disk is None:
            subprocess.run(("umount", "-l", str(self.disk)), check=False)

    def _have_ended(self) -> bool:
        self.customer.poll()
        return not self.customer.open_entries() and all(job["status"] in TERMINAL for job in self._list_roots())

    def _are_delivered(self) -> bool:
        """Whether no message waits; those that wait for their next try are sent now, as their owner may."""
        waiting = (self._get("/v1/webhook_deliveries?status=pending&limit=100") or {"data": [None]})["data"]
        for delivery in waiting:
            if delivery is not None:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.post(f"{self._url}/v1/webhook_deliveries/{delivery['id']}/replay", trust_env=False)
        return not waiting

    def _add_endpoint(self) -> None:
        types = [f"{kind}.{status}" for kind in ("video", "film") for status in TERMINAL]
        body = {"name": "campaign", "url": f"{self.receiver.url}/endpoint", "event_types": types}
        made = httpx.post(f"{self._url}/v1/webhook_endpoints", json=body, timeout=30, trust_env=False).json()
        self.receiver.secrets["/endpoint"] = made["signing_secret"]

    def _list_roots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self._get(f"/v1/jobs?kind=video&kind=film&limit=100{after}")
            if page is None:
                return [{"id": "", "status": "unknown", "metadata": {}}]
            found += [job for job in page["data"] if job["parent_id"] is None]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    def _has_content(self, path: str) -> bool:
        try:
            answer = httpx.get(self._url + path, timeout=30, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and answer.content[4:8] == b"ftyp"

    def _get(self, path: str) -> dict[str, Any] | None:
        """Ask the API itself, not over the bad line; None if it does not answer with 200."""
        try:
            answer = httpx.get(self._url + path, timeout=15, trust_env=False)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    def _wait(self, what: str, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s * self.slack
        while not is_so():
            if time.monotonic() > deadline:
                self.findings.append(f"{what}: not within {limit_s * self.slack:.0f} s")
                return
            self._keep_running()
            time.sleep(0.3)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _fill(file: Any) -> None:
    for size in (1 << 20, 1 << 14, 512, 1):
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))


def _mount(folder: Path) -> str | None:
    """Put a small disk into memory; says why there is none where that is not allowed."""
    if sys.platform != "linux":
        return "none: a small disk is a tmpfs, which only Linux has"
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    done = subprocess.run(mount, capture_output=True, text=True)
    return None if done.returncode == 0 else f"none, the disk is never filled: {done.stderr.strip()}"


def convert_text_model(folder: Path) -> Path:
    """Convert the embedded language model once, for every start of a campaign."""
    code = "import sys, pathlib; from llm.checkpoints.embedded import ensure_embedded; ensure_embedded("
    subprocess.run([sys.executable, "-c", f"{code}pathlib.Path(sys.argv[1]))", str(folder)], check=True)
    return folder


def main(argv: Sequence[str]) -> int:
    """Run a campaign; returns 1 if it has found something."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="stop acting after so long")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, help="result file (default tests/faults/results/campaign.json)")
    parser.add_argument("--real", action="store_true", help="the real GPU program on the embedded model")
    parser.add_argument("--text", action="store_true", help="with the embedded language model, and films")
    parser.add_argument("--slack", type=float, default=1.0, help="factor of every limit, for a machine with other work")
    arguments = parser.parse_args(argv)
    seed = arguments.seed if arguments.seed is not None else int(time.time())
    out = arguments.out or RESULTS / "campaign.json"
    print(f"campaign: seed {seed}, {arguments.actions} actions, result in {out}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    text_model = convert_text_model(folder / "text") if arguments.text else None

    def write(campaign: Campaign) -> None:
        text = json.dumps(campaign.result(), indent=1) + "\n"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        print(f"campaign: {len(campaign.done)} actions, {len(campaign.customer.book)} jobs", flush=True)

    campaign = Campaign(seed, folder, text_model=text_model, is_real=arguments.real, slack=arguments.slack)
    campaign.run(arguments.actions, arguments.seconds, write)
    write(campaign)
    for finding in campaign.findings:
        print(f"campaign: {finding}", file=sys.stderr)
    if campaign.findings:
        print(f"campaign: the service's log is {campaign.service.log}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
