"""The container file: it names what exists, runs as nobody in particular, and its commands are this project's.

No engine builds it here: its instructions are read with a parser, its shell lines with a shell, and its health check
runs against a server.
"""

import json
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from workers.container_health import check

ROOT = Path(__file__).parents[2]
FILE = ROOT / "workers" / "Containerfile"
PACKAGES = {"media_server", "workers", "llm", "video", "kernels", "assets"}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    with FILE.open("rb") as file:
        parsed: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return [step for step in parsed if step["instruction"] != "COMMENT"]


def values(steps: list[dict[str, Any]], instruction: str) -> list[str]:
    return [step["value"] for step in steps if step["instruction"] == instruction]


def test_the_base_is_pinned_and_both_stages_have_it(steps: list[dict[str, Any]]) -> None:
    bases = [value for value in values(steps, "ARG") if value.startswith("BASE=")]
    assert len(bases) == 1 and re.search(r"/python:3\.\d+\.\d+-", bases[0])
    assert values(steps, "FROM") == ["${BASE} AS build", "${BASE}"]
    # an argument is known in the stage that names it alone
    assert values(steps, "ARG").count("VARIANT=cpu") == 2


def test_all_that_is_copied_is_there_and_not_ignored(steps: list[dict[str, Any]]) -> None:
    sources: set[str] = set()
    for value in values(steps, "COPY"):
        words = shlex.split(value)
        if words[0].startswith("--from="):
            assert words[0] == "--from=build" and words[1] == "/opt/media-server"
            continue
        sources.update(words[:-1])
    assert sources >= PACKAGES | {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / "workers" / "Containerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == sources


def test_its_commands_are_this_projects(steps: list[dict[str, Any]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [json.loads(value) for value in values(steps, "ENTRYPOINT")] == [["media-server"]]
    assert "media-server" in project["scripts"]
    (command,) = [json.loads(value) for value in values(steps, "CMD")]
    known = project["entry-points"]["media_server.commands"]
    assert command[0] in known
    for line in re.findall(r"^#   docker run (.*)$", FILE.read_text(), re.MULTILINE):
        rest = re.split(r"\bmedia-server(?::cuda)?(?= |$)", line.partition("#")[0])[1].split()
        assert not rest or rest[0] in known or ".".join(rest[:2]) in known, line
    (health,) = values(steps, "HEALTHCHECK")
    checked = json.loads(health[health.index("[") :])
    assert checked[:3] == ["python", "-P", "-m"] and find_spec(checked[3]) is not None


def test_it_runs_as_a_user_without_rights_who_owns_the_data(steps: list[dict[str, Any]]) -> None:
    assert values(steps, "USER") == ["10001:10001"]
    last = max(index for index, step in enumerate(steps) if step["instruction"] == "RUN")
    user = next(index for index, step in enumerate(steps) if step["instruction"] == "USER")
    assert user > last, "nothing is installed by that user"
    set_up = steps[last]["value"]
    assert "useradd --uid 10001" in set_up and "install -d -o media -g media -m 0700 /data" in set_up
    assert values(steps, "VOLUME") == ["/data"] and "MEDIA_SERVER_DATA_DIR=/data" in values(steps, "ENV")[1]


def test_each_shell_line_is_one_and_each_variant_is_known(steps: list[dict[str, Any]]) -> None:
    for value in values(steps, "RUN"):
        done = subprocess.run(["sh", "-n", "-c", value], capture_output=True, text=True)
        assert done.returncode == 0, (value, done.stderr)
    first = values(steps, "RUN")[0]
    choice = first[first.index("case") :]
    for variant, expected in (("cpu", "--index-url CPU torch"), ("cuda", "-c constraints.txt torch"), ("tpu", None)):
        script = choice.replace("/opt/media-server/bin/pip", "echo")
        done = subprocess.run(
            ["sh", "-c", script],
            capture_output=True,
            text=True,
            env={"VARIANT": variant, "TORCH_CPU_INDEX": "CPU", "PATH": "/usr/bin:/bin"},
        )
        assert (done.returncode == 0) == (expected is not None)
        assert expected is None or done.stdout.strip().endswith(expected)
    wanted = re.search(r"sed -n '([^']+)' constraints.txt", values(steps, "RUN")[1])
    assert wanted is not None
    line = subprocess.run(["sed", "-n", wanted[1], "constraints.txt"], capture_output=True, text=True, cwd=ROOT).stdout
    assert re.fullmatch(r"triton==[\d.]+\n", line)


@pytest.fixture
def live() -> Iterator[tuple[int, list[int]]]:
    answers = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers[0] if self.path == "/health/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_port, answers
    server.shutdown()
    server.server_close()


def test_its_health_is_that_of_the_service(live: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    port, answers = live
    monkeypatch.setenv("MEDIA_SERVER_HOST", "0.0.0.0")
    monkeypatch.setenv("MEDIA_SERVER_PORT", str(port))
    assert check(["/sbin/docker-init", "--", "media-server", "up", ""]) == 0
    answers[0] = 503
    assert check(["/opt/python", "/opt/media-server", "api", ""]) == 1
    assert check(["/opt/python", "/opt/media-server", "worker", ""]) == 0
    answers[0] = 200
    monkeypatch.setenv("MEDIA_SERVER_PORT", "1")
    assert check(["media-server", "up"]) == 1
    assert check(["media-server", "up", "--port", str(port)]) == 0
