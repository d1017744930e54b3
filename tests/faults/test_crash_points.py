"""Each crash point is met by a process that dies there, as by SIGKILL; another walks the way again, and all holds."""

import multiprocessing
import multiprocessing.util
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from media_server import crash_points
from media_server.crash_points import POINTS
from tests.faults import way
from tests.faults.invariants import findings
from tests.fresh_database import write_migrated

# forks of one process that has everything imported and no thread
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.way"])
# made now, it outlives the tests' own folder for temporary files, as the server of forks does
multiprocessing.util.get_temp_dir()
LIMIT_S = 240.0


Hook = tuple[str, list[tuple[str, bytes]]]


@pytest.fixture
def hook() -> Iterator[Hook]:
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.headers["webhook-id"], body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/done", got
    server.shutdown()
    server.server_close()


def walk(folder: Path, hook: str, parts: list[str], point: str | None) -> int | None:
    process = FORKS.Process(target=way.walk, args=(folder, hook, parts, point))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


# what a point needs beside a plain clip
PARTS = {
    "segments": ("checkpoint", "fail"),
    "drained": ("release",),
    "stopped": ("confirm_cancel", "beat"),
    "unwanted": ("cancel",),
    "lost": ("lost", "end_lease", "ring_again"),
    "deleted": ("delete", "forget_files", "purge", "file"),
    "film": ("accept", "claim", "finish", "take_message"),
}


@pytest.mark.spread
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", sorted(POINTS))
def test_who_dies_here_loses_nothing(point: str, tmp_path: Path, hook: Hook) -> None:
    url, got = hook
    # the way begins with a service that has been started before: the revisions have tests of their own
    write_migrated(tmp_path / "media-server.db")
    parts = ["plain"] + [part for part, names in PARTS.items() if point.partition(".")[0] in names]
    assert walk(tmp_path, url, parts, point) == -signal.SIGKILL, f"nobody came to {point}"
    assert walk(tmp_path, url, parts, None) == 0
    assert findings(tmp_path) == []
    with sqlite3.connect(tmp_path / "media-server.db") as conn:
        jobs = conn.execute("SELECT kind, status, json_extract(metadata, '$.part') FROM jobs WHERE parent_id IS NULL")
        ended = {part or kind: status for kind, status, part in jobs}
        told = {id for (id,) in conn.execute("SELECT id FROM outbox")}
    # each part once, by its own end; the deleted one is gone for good
    assert ended == {part: way.ENDS.get(part, "completed") for part in parts if part != "deleted"}
    # a message that came twice is the same message
    copies: dict[str, set[bytes]] = {}
    for id, body in got:
        copies.setdefault(id, set()).add(body)
    assert all(len(bodies) == 1 for bodies in copies.values())
    assert told <= set(copies) and len(copies) == len(parts)


def test_the_environment_names_the_point_and_the_one_that_dies_first(tmp_path: Path) -> None:
    met = tmp_path / "met"
    code = "from media_server.crash_points import reach; reach('beat.written'); reach('file.named'); print('alive')"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "MEDIA_SERVER_TEST_CRASH_AT": f"file.named={met}"}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert met.exists()
    # the process that takes its place goes on
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "alive\n"
    del environment["MEDIA_SERVER_TEST_CRASH_AT"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "alive\n"
    assert not crash_points.is_armed
