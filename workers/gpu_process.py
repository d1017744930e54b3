"""The video worker's side of the GPU program: start it, talk to it, stop it. Imports no torch.

Invariant: when the program is gone, `receive` says so once all that it had written is read.
"""

import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from media_server.settings import stand_in_program

logger = logging.getLogger(__name__)

STOP_S = 3.0


class ProgramDied(Exception):
    """The program ended or cannot be spoken to."""


class ProgramFailed(Exception):
    """The program did not become ready; carries its error's code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def program_command(
    model_dir: Path, device: str, threads: int, lock: Path, *, name: str, pool: str, hash_cache: Path
) -> list[str]:
    """Give the command that starts the GPU program for a model."""
    # -P: a folder named like one of our packages in the working directory must not shadow it
    stand_in = stand_in_program()
    program = ("-m", "workers.gpu_program") if stand_in is None else (stand_in,)
    command = [sys.executable, "-P", *program, "--model-dir", str(model_dir), "--device", device]
    command += ["--threads", str(threads), "--lock", str(lock), "--name", name, "--pool", pool]
    return [*command, "--hash-cache", str(hash_cache)]


class ProgramLate(ProgramFailed):
    """The program was not ready in time, and is killed."""


class GpuProcess:
    """One running GPU program; made anew after it has died."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            bufsize=1,
        )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        # bytes of its device, as it said last
        self.memory: dict[str, float] | None = None
        threading.Thread(target=self._read, daemon=True, name="gpu-program").start()

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the program runs."""
        return self._process.poll() is None

    def wait_ready(self, limit_s: float) -> dict[str, Any]:
        """Wait until the model is loaded, at most `limit_s`; returns the `ready` message.

        Raises:
            ProgramLate: it is not by then; the program is killed.
            ProgramFailed: the model does not load.
            ProgramDied: the program ended without a word.
        """
        deadline = time.monotonic() + limit_s
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                self.kill()
                raise ProgramLate("worker_crashed", f"The video program was not ready after {limit_s:g} s.")
            if message["type"] == "failed":
                self.stop()
                raise ProgramFailed(message["code"], message["message"])
            if message["type"] == "ready":
                return message

    def send(self, type: str, **members: Any) -> None:
        """Write one message.

        Raises:
            ProgramDied: nobody reads it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"v": 1, "type": type, **members}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise ProgramDied(self._describe_end()) from error

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Give the next message, or None after `timeout_s` without one.

        Raises:
            ProgramDied: the program has ended, and all its messages were given.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            # for whoever asks next
            self._messages.put(None)
            raise ProgramDied(self._describe_end())
        return message

    def stop(self) -> None:
        """End the program: politely by `stop` and the end of its stdin, then by force."""
        try:
            self.send("stop")
        except ProgramDied:
            logger.debug("the GPU program has ended by itself")
        self._close_stdin()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the program at once."""
        self._process.kill()
        self._process.wait()
        self._close_stdin()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            # what was not flushed has no reader any more
            logger.debug("the pipe to the GPU program was broken")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                # the last line of a program that was killed while it wrote
                logger.warning("the GPU program wrote half a message")
                continue
            if message.get("type") == "memory":
                # a sign of life that nobody waits for
                self.memory = message["figures"]
            else:
                self._messages.put(message)
        self._messages.put(None)

    def _describe_end(self) -> str:
        deadline = time.monotonic() + 2.0
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self._process.poll()
        if code is None:
            return "the GPU program closed its pipe"
        return (
            f"the GPU program ended by signal {-code}" if code < 0 else f"the GPU program ended with exit code {code}"
        )
