"""The real service under a campaign: started, started again, and found process by process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from media_server.settings import Settings
from tests.free_port import free_port
from workers.valkey import valkey_command

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "workers" / "child.py"
# of a quick service: leases lapse while a campaign does two or three things more
QUICK_LEASE_S = 6.0
# files that nothing owns are looked for as often
STRAY_S = 10.0
# the second worker's name
SECOND = "video-9"
STAND_IN = Path(__file__).with_name("stand_in.py")
# what a child's command line says of its part
_PARTS = {"worker": "worker", "engine": "engine", "storyboards": "storyboards", "media": "media", "api": "api"}
_PARTS |= {"deliveries": "deliveries", "sweeper": "sweeper"}


class Service:
    """`media-server up` on a folder and a port of its own, with a broker of its own or the one it brings.

    A second video worker serves the same pool beside it, as on another machine: nobody watches that one, so what it
    held when it died is free only when its lease has lapsed.
    """

    def __init__(self, folder: Path, data_dir: Path, *, text_model: Path | None, is_stand_in: bool) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self.config = folder / "media-server.toml"
        self.log = folder / "service.log"
        self.text_model = text_model
        self.port = free_port()
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if is_stand_in:
            self.environment["MEDIA_SERVER_TEST_GPU_PROGRAM"] = str(STAND_IN)
        self.process: subprocess.Popen[bytes] | None = None
        self.second: subprocess.Popen[bytes] | None = None
        self.said: list[bytes] = []
        self.num_starts = 0
        # of the running service
        self.lease_s = Settings().lease_s

    @property
    def address(self) -> tuple[str, int]:
        """Where the API listens."""
        return "127.0.0.1", self.port

    def start(self, broker_url: str | None, *, is_quick: bool) -> None:
        """Start it, without waiting until it is ready; with the lease that it is shipped with, or a quick one."""
        lines = ["version = 1", f'data_dir = "{self.data_dir}"', 'gpus = "cpu"', "allow_private_urls = true"]
        lines += ["max_attempts = 8", f"stray_s = {STRAY_S}"]
        self.lease_s = QUICK_LEASE_S if is_quick else Settings().lease_s
        if is_quick:
            lines += [f"lease_s = {QUICK_LEASE_S}", "beat_s = 1.5", "sweep_s = 1.0", "doorbell_s = 2.0"]
        lines += ["min_free_bytes = 0", f"reserve_bytes = {4 << 20}", "keep_deleted_s = 0"]
        if broker_url is not None:
            lines.append(f'broker_url = "{broker_url}"')
        lines += ["[[models]]", 'name = "tiny-wan"', 'kind = "video"']
        if self.text_model is not None:
            lines += ["[[models]]", 'name = "smollm2-135m-instruct"', 'kind = "text"', f'path = "{self.text_model}"']
        self.config.write_text("\n".join(lines) + "\n")
        self.process = self._launch("up", "--port", str(self.port), "--config", str(self.config))
        self.num_starts += 1
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()
        self.stop_second()

    def keep_second(self) -> None:
        """Start the second worker, if it does not run."""
        if self.second is None or self.second.poll() is not None:
            self.second = self._launch("worker", "--name", SECOND, "--threads", "1", "--config", str(self.config))

    def stop_second(self) -> None:
        """Kill the second worker: the next one finds the broker that there is now."""
        if self.second is not None:
            self.second.kill()
            self.second.wait()

    def _launch(self, *words: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                # the launcher: a campaign that is killed takes the service with it
                [
                    sys.executable,
                    str(LAUNCHER),
                    str(os.getpid()),
                    sys.executable,
                    "-P",
                    "-m",
                    "media_server.cli",
                    *words,
                ],
                stdout=subprocess.PIPE if words[0] == "up" else log,
                stderr=log,
                env=self.environment,
            )

    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        return self.process is not None and self.process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """List its processes, the supervisor first."""
        if self.process is None:
            return []
        try:
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def second_tree(self) -> list[psutil.Process]:
        """List the second worker and its program."""
        second = self.find("second")
        try:
            return [] if second is None else [second, *second.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, part: str) -> psutil.Process | None:
        """Find the process of a part: `worker`, `second`, `program`, `api`, …, `valkey`, `supervisor`."""
        if part == "second":
            is_there = self.second is not None and self.second.poll() is None
            return psutil.Process(self.second.pid) if self.second is not None and is_there else None
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                if part_of(process, is_first=self.process is not None and process.pid == self.process.pid) == part:
                    return process
        return None

    def stop(self, limit_s: float) -> list[str]:
        """Stop it in order; say what went wrong."""
        if self.process is None or self.process.poll() is not None:
            return ["the service was not running at the end"]
        self.stop_second()
        family = self.tree()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return [f"the service did not stop within {limit_s:.0f} s"]
        _, left = psutil.wait_procs(family, timeout=30)
        found = [f"{part_of(process)} outlived its service" for process in left]
        return found + ([f"the service stopped with exit code {code}"] if code != 0 else [])

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)


class Broker:
    """A Valkey of one's own on a TCP port, which keeps nothing; it can be killed and started again, empty."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        settings = Settings(data_dir=folder / "broker")
        words = valkey_command(settings)
        self.command = [*words, "--port", str(self.port), "--bind", "127.0.0.1"]
        self.socket = settings.valkey_socket
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it."""
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def restart(self) -> None:
        """Kill it, and start it with nothing in it."""
        self.stop()
        time.sleep(0.2)
        self.start()

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


def part_of(process: psutil.Process, *, is_first: bool = False) -> str:
    """Name the part that a process plays."""
    if is_first:
        return "supervisor"
    line = process.cmdline()
    if any("valkey-server" in word for word in line[:1]):
        return "valkey"
    if str(STAND_IN) in line or "workers.gpu_program" in line:
        return "program"
    if "media_server.cli" in line:
        return _PARTS.get(line[line.index("media_server.cli") + 1], "other")
    return "other"
