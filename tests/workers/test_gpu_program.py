"""The GPU program as a real process on a tiny random model: protocol, cancel, lock, end with its parent."""

import argparse
import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from media_server.models.card import parse_card
from media_server.settings import Settings, child_environment
from video.checkpoints import hash_weights
from video.errors import InvalidOutput
from video.probe import probe
from video.tiny.model import random_checkpoint
from workers import gpu_program
from workers.gpu_process import GpuProcess, ProgramDied, program_command
from workers.gpu_program import LEASE_SHARE, Channel, do_run
from workers.leases import is_alive

CARD: dict[str, Any] = {
    "v": 1,
    "name": "as-it-was-trained",
    "kind": "video",
    "pool": "video",
    "revision": "1",
    "hash": "sha256:old",
    "license": "Apache-2.0",
    "origin": "random weights",
    "layout": "wan-ti2v",
    "size": {"default": "64x48", "multiple_of": 16, "min": [32, 32], "max": [128, 128], "max_pixels": 16384},
    "frames": {"rule": "4k+1", "min": 1, "max": 33, "default": 9, "temporal": 4},
    "fps": 16,
    "fps_range": [1, 60],
    "defaults": {"num_inference_steps": 2, "guidance_scale": 2.0, "seconds": 1, "flow_shift": 3.0},
    "limits": {"max_prompt_chars": 100, "max_steps": 500, "max_seconds": 60, "max_guidance_scale": 30},
    "conditions": ["text", "first_frame", "last_frame", "overlap"],
}
REQUEST: dict[str, Any] = {
    "prompt": "a red ball",
    "width": 48,
    "height": 32,
    "num_frames": 7,
    "fps": 16,
    "seed": 3,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = random_checkpoint(tmp_path_factory.mktemp("model"), "ti2v")
    (folder / "card.json").write_text(json.dumps(CARD))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**child_environment(Settings(data_dir=tmp_path_factory.mktemp("data"))), "OMP_NUM_THREADS": "1"}


def command(model: Path, folder: Path) -> list[str]:
    lock, cache = folder / "gpu.lock", folder / "hashes.json"
    return program_command(model, "cpu", 1, lock, name="tiny", pool="small", hash_cache=cache)


@pytest.fixture(scope="module")
def program(
    model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GpuProcess, dict[str, Any]]]:
    process = GpuProcess(command(model, tmp_path_factory.mktemp("program")), environment)
    try:
        yield process, process.wait_ready(600.0)
    finally:
        process.kill()


def run(process: GpuProcess, out_dir: Path, job_id: str, *, lease_s: float = 600.0, **request: Any) -> None:
    out_dir.mkdir()
    process.send(
        "run",
        job_id=job_id,
        attempt=1,
        request={**REQUEST, **request},
        inputs={"first_frame": None, "last_frame": None, "video": None},
        resume=[],
        out_dir=str(out_dir),
        lease_s=lease_s,
    )


def read_until(process: GpuProcess, *types: str, limit_s: float = 240.0) -> list[dict[str, Any]]:
    """Read messages until one of these types; gives them all."""
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        message = process.receive(1.0)
        if message is not None:
            messages.append(message)
            if message["type"] in types:
                return messages
    raise AssertionError(f"no {types} within {limit_s} s, got {messages[-3:]}")


def test_ready_carries_the_card_with_hash_and_measured_cost(
    program: tuple[GpuProcess, dict[str, Any]], model: Path
) -> None:
    _, ready = program
    card = parse_card(ready["card"])
    assert (card.name, card.pool, card.hash) == ("tiny", "small", hash_weights(model))
    cost = ready["card"]["cost"]
    assert all(cost[name] > 0 for name in ("seconds_fixed", "seconds_per_step_token", "seconds_per_frame_pixel"))
    assert cost["bytes_fixed"] > 50e6
    assert ready["card"]["on_drift"] == ["report", "stop"]
    assert (ready["v"], ready["device"]) == (1, "cpu")


def test_runs_one_after_the_other_and_a_cancelled_one_leaves_nothing(
    program: tuple[GpuProcess, dict[str, Any]], tmp_path: Path
) -> None:
    process, _ = program
    run(process, tmp_path / "first", "video_1")
    messages = read_until(process, "done")
    stages = [message["stage"] for message in messages if message["type"] == "progress"]
    assert list(dict.fromkeys(stages)) == ["encode_prompt", "denoise", "decode", "encode_video"]
    first = messages[-1]
    assert (first["job_id"], first["attempt"]) == ("video_1", 1)
    assert first["gpu_seconds"] > 0 and first["peak_memory_bytes"] > 50e6
    files = {file["name"]: file for file in first["artifacts"]}
    assert files["video"]["content_type"] == "video/mp4"
    assert probe(Path(files["video"]["path"])).num_frames == 7

    run(process, tmp_path / "cancelled", "video_2", num_inference_steps=400)
    read_until(process, "progress")
    process.send("cancel", job_id="video_2", attempt=1)
    asked_at = time.monotonic()
    cancelled = read_until(process, "cancelled", "done")[-1]
    assert (cancelled["type"], cancelled["job_id"]) == ("cancelled", "video_2")
    assert time.monotonic() - asked_at < 30

    # a cancel of another run is not this one's
    process.send("cancel", job_id="video_2", attempt=1)
    run(process, tmp_path / "again", "video_3")
    again = read_until(process, "done", "cancelled", "failed")[-1]
    assert again["type"] == "done"
    assert again["manifest"]["frames_sha256"] == first["manifest"]["frames_sha256"]


def test_clip_after_clip_takes_no_more_memory(program: tuple[GpuProcess, dict[str, Any]], tmp_path: Path) -> None:
    process, _ = program
    held = []
    for number in range(6):
        run(process, tmp_path / str(number), f"video_again_{number}", num_frames=9)
        assert read_until(process, "done", "failed")[-1]["type"] == "done"
        held.append(psutil.Process(process.pid).memory_info().rss)
    # the first ones load what later ones find
    assert max(held[2:]) - held[1] < 30e6, held


def test_a_run_whose_worker_no_longer_says_that_it_holds_its_lease_ends(
    program: tuple[GpuProcess, dict[str, Any]], tmp_path: Path
) -> None:
    process, _ = program
    lease_s = 0.5
    run(process, tmp_path / "forsaken", "video_1", lease_s=lease_s, num_inference_steps=400, num_frames=33)
    begun = time.monotonic()
    while time.monotonic() - begun < 1.5 * lease_s:
        process.send("alive")
        message = process.receive(0.05)
        assert message is None or message["type"] not in ("cancelled", "done", "failed")
    silent_at = time.monotonic()
    ended = read_until(process, "cancelled", "done", "failed")[-1]
    assert (ended["type"], ended["job_id"]) == ("cancelled", "video_1")
    assert time.monotonic() - silent_at > LEASE_SHARE * lease_s - 0.1
    # the program is as good as before
    run(process, tmp_path / "next", "video_next")
    assert read_until(process, "done", "cancelled", "failed")[-1]["type"] == "done"


def test_a_chain_sends_its_segments_and_takes_them_up_again(
    program: tuple[GpuProcess, dict[str, Any]], tmp_path: Path
) -> None:
    process, _ = program
    extend = {"segments": 2, "segment_frames": [9, 6], "overlap_frames": 1, "on_drift": "report"}
    chain: dict[str, Any] = {"num_frames": 15, "extend": extend}
    run(process, tmp_path / "whole", "video_4", **chain)
    messages = read_until(process, "done")
    kept = [message for message in messages if message["type"] == "checkpoint"]
    assert [message["segment"] for message in kept] == [0, 1]
    (tmp_path / "second").mkdir()
    process.send(
        "run",
        job_id="video_4",
        attempt=2,
        request={**REQUEST, **chain},
        inputs={},
        resume=[{name: kept[0][name] for name in ("segment", "path", "data")}],
        out_dir=str(tmp_path / "second"),
        lease_s=600.0,
    )
    resumed = read_until(process, "done")
    assert {message["segment"] for message in resumed if message["type"] == "progress"} == {1}
    assert resumed[-1]["manifest"]["frames_sha256"] == messages[-1]["manifest"]["frames_sha256"]


def test_a_request_that_cannot_be_made_fails_by_name(
    program: tuple[GpuProcess, dict[str, Any]], tmp_path: Path
) -> None:
    process, _ = program
    run(process, tmp_path / "bad", "video_5", width=50)
    failed = read_until(process, "failed", "done")[-1]
    assert (failed["type"], failed["code"], failed["job_id"]) == ("failed", "invalid_request", "video_5")
    assert failed["message"] == "size: sides must be multiples of 16, got 50x32."
    run(process, tmp_path / "good", "video_6")
    assert read_until(process, "failed", "done")[-1]["type"] == "done"


def test_a_killed_parent_leaves_no_program_and_the_next_one_waits_for_the_device(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    parent = (
        "import json, os, sys, time\n"
        "from workers.gpu_process import GpuProcess\n"
        "process = GpuProcess(json.loads(sys.argv[1]), os.environ)\n"
        "process.wait_ready(600.0)\n"
        "run = json.loads(sys.argv[2])\n"
        "process.send('run', **run)\n"
        "while process.receive(60)['type'] != 'progress': pass\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "out").mkdir()
    endless = {"job_id": "video_1", "attempt": 1, "inputs": {}, "resume": [], "out_dir": str(tmp_path / "out")}
    endless["lease_s"] = 600.0
    message = {**endless, "request": {**REQUEST, "num_inference_steps": 400, "num_frames": 33}}
    arguments = [json.dumps(command(model, tmp_path)), json.dumps(message)]
    killed = subprocess.Popen(
        [sys.executable, "-c", parent, *arguments],
        env={**environment, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    orphan = int(killed.stdout.readline())
    # as Celery's own processes get it at a stop; the program is not theirs to end
    os.kill(orphan, signal.SIGTERM)
    time.sleep(0.3)
    assert is_alive(orphan)
    second = GpuProcess(command(model, tmp_path), environment)
    try:
        # it waits for the lock before it loads anything that could touch the device
        assert second.receive(4.0) is None
        assert is_alive(second.pid)
        if sys.platform == "linux":
            assert "libtorch" not in Path(f"/proc/{second.pid}/maps").read_text()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        deadline = time.monotonic() + 30
        while is_alive(orphan):
            assert time.monotonic() < deadline, "the program outlives its parent"
            time.sleep(0.05)
        assert second.wait_ready(600.0)["type"] == "ready"
        second.stop()
        assert not second.is_alive()
    finally:
        killed.kill()
        second.kill()
    with pytest.raises(ProgramDied):
        second.send("run")


def test_a_broken_model_is_said_before_any_work(tmp_path: Path) -> None:
    outgoing = io.StringIO()
    arguments = argparse.Namespace(model_dir=tmp_path, device="cpu", threads=1, hash_cache=None, name="a", pool="b")
    assert gpu_program.serve(Channel(io.StringIO(), outgoing), arguments) == gpu_program.EXIT_MODEL_ERROR
    answer = json.loads(outgoing.getvalue())
    assert (answer["type"], answer["code"]) == ("failed", "model_error")
    assert answer["message"].startswith("model_index.json: is missing")


def test_half_a_message_of_a_killed_parent_ends_the_program() -> None:
    code = (
        "import sys, time\n"
        "from workers.gpu_program import Channel\n"
        "Channel(sys.stdin, sys.stdout).listen()\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run([sys.executable, "-c", code], input='{"type": "ru', text=True, env=environment, timeout=60)
    assert ended.returncode == 0


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    held = gpu_program.hold_lock(path)
    with path.open("a+") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.close()
    gpu_program.hold_lock(path).close()


def real_cpu_out_of_memory() -> BaseException:
    try:
        torch.empty(1 << 52, dtype=torch.float64)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has 32 petabytes")


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", gpu_program.EXIT_OUT_OF_MEMORY),
        (real_cpu_out_of_memory(), "out_of_memory", gpu_program.EXIT_OUT_OF_MEMORY),
        (MemoryError(), "out_of_memory", gpu_program.EXIT_OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), "insufficient_storage", None),
        (InvalidOutput("The clip is black."), "invalid_output", None),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            "worker_crashed",
            gpu_program.EXIT_DEVICE_LOST,
        ),
        (KeyError("a bug"), "internal_error", None),
    ],
)
def test_what_goes_wrong_gets_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: str, exit_code: int | None
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("video.clip.make_clip", fail)
    outgoing = io.StringIO()
    channel = Channel(io.StringIO(), outgoing)
    message = {"job_id": "video_1", "attempt": 1, "request": REQUEST, "inputs": {}, "resume": [], "out_dir": "/x"}
    message["lease_s"] = 600.0
    cost = dict.fromkeys(
        ("seconds_fixed", "seconds_per_step_token", "seconds_per_frame_pixel", "bytes_fixed", "bytes_per_token"), 0.0
    )
    checkpoint = argparse.Namespace(device=torch.device("cpu"))
    assert do_run(channel, message, checkpoint, {"cost": cost}, 1) == exit_code
    answer = json.loads(outgoing.getvalue())
    assert (answer["type"], answer["code"], answer["job_id"]) == ("failed", code, "video_1")
    assert "illegal" not in answer["message"] and "a bug" not in answer["message"]
