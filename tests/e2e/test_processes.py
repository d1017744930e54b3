"""The processes themselves: killed workers, a killed API, a killed Valkey, a second service, a port that is taken."""

import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from media_server.settings import Settings
from tests.e2e.conftest import COMMAND, SLOW_STEPS, Service, run_cli, wait_for

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_killed_video_worker_leaves_no_gpu_program_and_its_job_goes_on(service: Service) -> None:
    body = {"num_inference_steps": SLOW_STEPS, "seed": 3}
    video = service.openai.videos.create(prompt="a red ball", seconds="2", size="96x96", extra_body=body)  # type: ignore[arg-type]
    wait_for(lambda: service.get(f"/v1/videos/{video.id}")["step"], 60, "the first step")
    worker = service.child("worker")
    assert worker is not None
    programs = worker.children(recursive=True)
    assert [p for p in programs if "workers.gpu_program" in p.cmdline()], "the worker owns a GPU program"
    worker.kill()
    _, left = psutil.wait_procs([worker, *programs], timeout=10)
    assert left == [], "the GPU program outlived its worker"
    wait_for(lambda: service.get(f"/v1/jobs/{video.id}")["attempt"] == 2, 180, "a second attempt")
    done = wait_for(lambda: service.ended(video.id), 120, "its end")
    assert (done["status"], done["attempt"]) == ("completed", 2)
    # the files of the lost attempt are gone, those of the winner are there
    folder = service.data_dir / "artifacts" / video.id
    wait_for(lambda: sorted(path.name for path in folder.iterdir()) == ["2"], 60, "one attempt's files")


def test_a_killed_api_and_a_killed_broker_come_back(service: Service) -> None:
    for command in ("valkey-server", "api"):
        victim = service.child(command)
        assert victim is not None
        victim.kill()
        psutil.wait_procs([victim], timeout=5)
    with service.http as http:
        # the listening socket is the supervisor's: a request that comes now waits instead of being refused
        assert http.get("/health/live").status_code == 200
        wait_for(lambda: http.get("/health/ready").status_code == 200, 180, "everything is back")
    # what is ready answers: the engine has told the empty broker of itself
    answer = service.openai.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert answer.choices[0].message.content
    clip = service.openai.videos.create_and_poll(
        prompt="a ball",
        seconds="1",  # type: ignore[arg-type]
        size="64x64",  # type: ignore[arg-type]
        extra_body={"num_inference_steps": 2},
        poll_interval_ms=200,
    )
    assert clip.status == "completed"


def test_a_second_service_on_the_same_folder_is_refused(service: Service) -> None:
    done = run_cli("up", "--port", "0", "--data", str(service.data_dir), timeout_s=30)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line == f"media-server: The data folder is in use by process {service.process.pid}."


def test_a_command_that_brings_its_own_service_says_why_it_did_not_start(service: Service) -> None:
    done = run_cli("make", "a red ball", "--serve", "--data", str(service.data_dir), timeout_s=60)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    reason = f"The data folder is in use by process {service.process.pid}."
    assert said.startswith(f"media-server: the service did not start: {reason}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_takes_its_own_service_with_it(number: signal.Signals, tmp_path: Path) -> None:
    command = subprocess.Popen(
        [*COMMAND, "make", "a red ball", "--serve", "--data", str(tmp_path / "data")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family = psutil.Process(command.pid)
    # supervisor, Valkey, and the first of the others
    wait_for(lambda: len(family.children(recursive=True)) >= 5, 60, "its service starts")
    service = family.children(recursive=True)
    command.send_signal(number)
    assert command.wait(40) == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    _, left = psutil.wait_procs(service, timeout=30)
    assert left == []


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("up", "--port", str(port), "--data", str(tmp_path / "data"), timeout_s=30)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"media-server: Port {port} on 127.0.0.1 is in use")


def test_the_broker_is_for_this_user_alone_and_keeps_nothing(service: Service) -> None:
    valkey = service.child("valkey-server")
    assert valkey is not None
    path = Settings(data_dir=service.data_dir).valkey_socket
    assert str(path) in " ".join(valkey.cmdline())
    assert path.stat().st_mode & 0o777 == 0o700 and path.parent.stat().st_mode & 0o777 == 0o700
    assert valkey.net_connections(kind="inet") == []
    assert [file.name for file in path.parent.iterdir() if file.suffix in (".rdb", ".aof")] == []
