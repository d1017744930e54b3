"""Requests that the OpenAPI document describes, and some that it does not: no 5xx, and no answer against the document.

schemathesis writes them: the document's own examples, the edges of every parameter, random ones, and chains in which
one answer's id is the next request's. Its pytest plugin is of another pytest; its command runs beside the service.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from media_server.artifacts.store import open_artifacts
from media_server.keys import create_key
from tests.media_server.scripted_worker import ScriptedWorker, draw_picture, write_clip
from tests.media_server.text.conftest import TextService

# positive_data_acceptance is left out: rules of a model's card refuse requests that hold to the document
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "use_after_free",
)
EXAMPLES = 10
# no worker has announced itself to this service, and its readiness says so
CONFIG = """
[[operations]]
include-path = "/health/ready"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]
"""


@pytest.fixture
def at_work(service: TextService, tmp_path: Path) -> Iterator[None]:
    """A worker that does whatever is queued."""
    clip = write_clip(tmp_path / "clip.mp4", 32)
    worker = ScriptedWorker(service.db, open_artifacts(service.settings), clip, draw_picture("JPEG", (64, 64)))
    stopping = threading.Event()

    def work() -> None:
        while not stopping.wait(0.02):
            worker.run_all()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stopping.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_answers_hold_to_the_document(service: TextService, at_work: None, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    # a key that schemathesis makes would close a service without keys to it
    _, key = create_key(service.db, "schemathesis", scopes=("admin",))
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{service.url}/openapi.json",
        "--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "30",
        "--suppress-health-check", "all", "--generation-database", "none", "--no-color", "--continue-on-failure",
        "--no-shrink", "--warnings", "off", "--header", f"Authorization: Bearer {key}",
        # the list of keys has this one too
        "--exclude-operation-id", "revoke_api_key",
    ]  # fmt: skip
    log = tmp_path / "schemathesis.log"
    with log.open("w") as file:
        run = subprocess.run(command, cwd=tmp_path, stdout=file, stderr=file, timeout=800, check=False)
    assert run.returncode == 0, log.read_text()
