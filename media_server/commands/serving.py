"""A service that lives as long as one command: started on a free port, its log in the data folder, stopped after."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from media_server.commands.failure import CommandFailed
from media_server.jobs.database import make_data_dir
from media_server.settings import load_settings

# models are loaded, the embedded language model is converted once; a model that cannot be loaded is tried for ever
START_S = 600.0
# the supervisor drains and ends within 30 s
STOP_S = 35.0
_READY = re.compile(r"ready at (\S+)")


@contextlib.contextmanager
def serve(data_dir: str | None, console: Console) -> Iterator[str]:
    """Start the whole service and give its address once it is ready; stop it at the end.

    Raises CommandFailed with the end of its log if it does not become ready.
    """
    folder = load_settings(data_dir=data_dir).data_dir
    make_data_dir(folder)
    log_path = folder / "serve.log"
    # -P: a folder named like one of our packages in the working directory must not shadow it
    command = [sys.executable, "-P", "-m", "media_server.cli", "up", "--port", "0", "--data", str(folder)]
    command += ["--parent", str(os.getpid())]
    # whoever ends this command ends the service: leave by way of the `finally` below
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # appended: another such command that runs on this folder goes on writing
    with log_path.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    try:
        with console.status("starting the service"):
            address = _wait_until_ready(process, log_path, log_start)
        console.print(f"service at {address}, log in {log_path}", highlight=False)
        yield address
    finally:
        with console.status("stopping the service"):
            _stop(process)


def _wait_until_ready(process: "subprocess.Popen[str]", log_path: Path, log_start: int) -> str:
    assert process.stdout is not None
    limit = threading.Timer(START_S, process.terminate)
    limit.start()
    try:
        for line in process.stdout:
            if found := _READY.search(line):
                return found[1]
    finally:
        limit.cancel()
    process.wait()
    lines = log_path.read_bytes()[log_start:].decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    raise CommandFailed(f"the service did not start: {last.removeprefix('media-server: ')} (log: {log_path})")


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # its children die with it
        process.kill()
        process.wait()
