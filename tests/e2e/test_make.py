"""`media-server make --serve`, which `make film` calls: a service of its own, four files, and nothing left running."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from media_server.commands.film import FILES
from media_server.jobs import store
from media_server.jobs.database import open_database
from media_server.jobs.states import Status
from media_server.settings import Settings
from tests.e2e.conftest import COMMAND, wait_for
from workers.joining import inspect_film

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SECONDS = 1
FPS = 16
WAIT_S = 480.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share a data folder, so that the language model is converted once."""
    return tmp_path_factory.mktemp("data")


def begin(data: Path, out: Path, said: Path) -> "subprocess.Popen[bytes]":
    arguments = ("make", "--serve", "--data", str(data), "--out", str(out), "--seed", "3")
    command = [*COMMAND, *arguments, "--seconds", str(SECONDS), "--shots", "2", "--", "a red ball at night"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEDIA_SERVER_GPUS": "cpu"}
    with said.open("wb") as file:
        # a terminal's Ctrl-C reaches its whole process group; what is started by a run in the background ignores it
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def processes_of(made: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return list(psutil.Process(made.pid).children(recursive=True))


def test_a_film_and_nothing_left_running(data: Path, tmp_path: Path) -> None:
    said, out = tmp_path / "said.txt", tmp_path / "out"
    made = begin(data, out, said)
    wait_for(lambda: "service at " in said.read_text() or made.poll() is not None, WAIT_S, "the service is ready")
    started = processes_of(made)
    assert made.wait(WAIT_S) == 0, said.read_text()
    assert len(started) > 8
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []
    assert {path.name for path in out.iterdir()} == set(FILES.values())
    lengths = [shot["num_frames"] for shot in json.loads((out / "storyboard.json").read_text())["shots"]]
    assert len(lengths) == 2 and sum(lengths) == SECONDS * FPS
    # as many cuts as shots, at their frames
    inspect_film(out / "film.mp4", lengths, fps=FPS, wanted=(), report=lambda _: None)


def test_a_film_that_is_interrupted_leaves_nothing_running(data: Path, tmp_path: Path) -> None:
    said, out = tmp_path / "said.txt", tmp_path / "out"
    made = begin(data, out, said)
    wait_for(lambda: "shot 1: started" in said.read_text() or made.poll() is not None, WAIT_S, "the film is under way")
    started = processes_of(made)
    os.killpg(made.pid, signal.SIGINT)
    assert made.wait(90) == 130, said.read_text()
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []
    text = said.read_text()
    assert "is asked to stop" in text and "goes on without us" not in text and "Traceback" not in text
    assert not out.exists()
    # the next service on this folder has nothing to go on with
    db = open_database(Settings(data_dir=data).database)
    (film, *_) = store.list_jobs(db, kinds=["film"]).data
    assert film.status is Status.CANCELLED or film.cancel_requested_at is not None
    db.close()
