"""The real GPU program when it runs out of memory or crashes: its job fails by name, the next one runs in a new one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from media_server.jobs.states import Status
from tests.workers.test_gpu_program import command, model
from tests.workers.test_video_worker import House

__all__ = ["model"]

# the real program, whose denoising is broken by the prompt
BROKEN = """
import ctypes, sys, torch, video.clip
from workers import gpu_program
make_clip = video.clip.make_clip
def broken(checkpoint, card, request, *arguments, report, **options):
    def report_and_break(progress):
        report(progress)
        if progress.stage != "denoise":
            return
        if request.prompt == "memory":
            raise MemoryError
        if request.prompt == "device memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if request.prompt == "segmentation fault":
            ctypes.string_at(0)
    return make_clip(checkpoint, card, request, *arguments, report=report_and_break, **options)
video.clip.make_clip = broken
sys.exit(gpu_program.main(sys.argv[1:]))
"""
SMALL: dict[str, Any] = {"width": 48, "height": 32, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 2.0}


@pytest.fixture(scope="module")
def house(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    arguments = command(model, folder)[4:]
    house = House(folder, [sys.executable, "-c", BROKEN, *arguments])
    yield house
    house.worker.stop(house.context)
    house.db.close()


# a busy machine may take long to load a model, which each crash costs
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("prompt", "code", "attempts", "message"),
    [
        ("memory", "out_of_memory", 1, "too little memory"),
        ("device memory", "out_of_memory", 1, "too little memory"),
        ("segmentation fault", "worker_crashed", 2, "signal 11"),
    ],
)
def test_its_own_job_fails_by_name_and_the_next_runs_clean(
    house: House, prompt: str, code: str, attempts: int, message: str
) -> None:
    before, _ = house.worker.ensure_program(house.context)
    job_id = house.submit(prompt, "tiny", **SMALL)
    for _ in range(attempts):
        house.work()
    job = house.job(job_id)
    assert (job.status, job.error_code, job.attempt) == (Status.FAILED, code, attempts), job.error_message
    assert not before.is_alive()
    assert job.error_message is not None and message in job.error_message
    assert "20.00" not in job.error_message
    assert house.keys(job_id) == []
    next_id = house.submit("a red ball", "tiny", **SMALL)
    house.work()
    done = house.job(next_id)
    assert (done.status, done.attempt) == (Status.COMPLETED, 1)
    assert f"{next_id}/1/video.mp4" in house.keys(next_id)
