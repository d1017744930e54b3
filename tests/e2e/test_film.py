"""A film from one sentence: by the command line as a person asks for it, and through two deaths of the service."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import httpx
import opentimelineio as otio
import psutil
import pytest
from PIL import Image

from tests.e2e.conftest import SLOW_STEPS, Service, run_cli, start, wait_for
from workers.joining import inspect_film

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 4
FPS = 16


def test_a_film_by_the_command_line(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "out"
    idea = "a red ball finds a blue friend"
    done = run_cli(
        "make", idea, "--seconds", str(SECONDS), "--shots", "3", "--seed", "5", "--out", str(out), "--url", service.url
    )
    assert done.returncode == 0, done.stderr
    # without a terminal each change of state is a line: the storyboard as it is written, shots, joining
    for line in ("storyboard: done", "shot 1: done", "shot 2: done", "shot 3: done", "joining: done"):
        assert line in done.stderr
    storyboard = json.loads((out / "storyboard.json").read_text())
    lengths = [shot["num_frames"] for shot in storyboard["shots"]]
    assert len(lengths) == 3 and sum(lengths) == SECONDS * FPS
    assert all(f"{shot['index'] + 1}. {shot['prompt']}" in done.stderr for shot in storyboard["shots"])

    # exactly the frames of the storyboard, each cut a keyframe; browsers and QuickTime need yuv420p and bt709 tags
    inspect_film(out / "film.mp4", lengths, fps=FPS, wanted=(), report=lambda _: None)
    timeline = otio.adapters.read_from_file(str(out / "timeline.otio"))
    assert [clip.duration().value for clip in timeline.find_clips()] == lengths
    sheet = Image.open(out / "contact_sheet.png")
    assert sheet.format == "PNG" and sheet.height > 3 * 100

    film = service.get("/v1/films?limit=1")["data"][0]
    found = service.get(f"/v1/films/{film['id']}")
    kinds = [child["kind"] for child in found["children"]]
    assert kinds == ["storyboard", "video", "video", "video", "join"]
    for child in found["children"]:
        job = service.get(f"/v1/jobs/{child['id']}")
        assert (job["status"], job["root_id"], job["parent_id"]) == ("completed", film["id"], film["id"])
    # seeds derive from (film, shot, retry): the first 53 bits of SHA-256 of "5:0:0", worked out with sha256sum
    shots = found["report"]["shots"]
    assert shots[0]["seed"] == int("5d040ce53d3a40e1", 16) >> 11
    assert found["progress"] == 100 and found["content_url"]


def test_a_film_outlives_two_deaths_of_the_service(running: list[Service], config: Path) -> None:
    service = running[-1]
    body = {
        "idea": "a green square crosses the sea",
        "seconds": SECONDS,
        "shots": 4,
        "seed": 9,
        "num_inference_steps": SLOW_STEPS,
    }
    film_id = str(httpx.post(f"{service.url}/v1/films", json=body, timeout=30, trust_env=False).json()["id"])

    def children(kind: str, status: str) -> list[dict[str, Any]]:
        found = running[-1].get(f"/v1/films/{film_id}")["children"]
        return [child for child in found if (child["kind"], child["status"]) == (kind, status)]

    def done_and_running(count: int) -> Callable[[], bool]:
        return lambda: len(children("video", "completed")) >= count and bool(children("video", "in_progress"))

    # first death: the supervisor alone is killed, and nothing of it is left
    wait_for(done_and_running(1), 240, "the first shot is done and the next runs")
    before = {child["id"]: service.get(f"/v1/jobs/{child['id']}") for child in children("video", "completed")}
    storyboard = children("storyboard", "completed")[0]["id"]
    processes = service.descendants()
    assert len(processes) >= 9
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert left == [], "processes outlived their supervisor"
    running.append(start(service.data_dir, config))

    # second death: SIGTERM in the middle of a shot; drained within 30 s
    wait_for(done_and_running(len(before) + 1), 240, "one more shot is done and the next runs")
    assert running[-1].stop() < 30
    running.append(start(service.data_dir, config))

    wait_for(lambda: running[-1].ended(film_id), 240, "the film ends")
    film = running[-1].get(f"/v1/films/{film_id}")
    assert film["status"] == "completed", film["error"]
    # continued, not repeated: what was done is as it was, what was cut off was begun again once
    assert len(film["children"]) == 6
    for job_id, job in before.items():
        assert running[-1].get(f"/v1/jobs/{job_id}") == job
    assert running[-1].get(f"/v1/jobs/{storyboard}")["attempt"] == 1
    attempts = sorted(running[-1].get(f"/v1/jobs/{child['id']}")["attempt"] for child in film["children"])
    # each death costs one attempt of one job
    assert attempts[0] == 1 and 6 < sum(attempts) <= 6 + 2
    lengths = [shot["num_frames"] for shot in film["storyboard"]["shots"]]
    target = service.data_dir / "film.mp4"
    target.write_bytes(httpx.get(f"{running[-1].url}{film['content_url']}", timeout=30, trust_env=False).content)
    inspect_film(target, lengths, fps=FPS, wanted=(), report=lambda _: None)
    with av.open(str(target)) as file:
        assert file.duration == SECONDS * av.time_base
