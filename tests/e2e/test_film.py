"""A film from one sentence: by the command line as a person asks for it, and through two deaths of the service."""

import json
import signal
from pathlib import Path
from typing import Any

import av
import httpx
import opentimelineio as otio
import psutil
import pytest
from PIL import Image

from media_server.jobs import store
from media_server.jobs.database import open_database
from media_server.jobs.spec import Job
from media_server.settings import Settings
from tests.e2e.conftest import SLOW_STEPS, Service, run_cli, start, wait_for
from workers.joining import inspect_film

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 4
FPS = 16
# for what happens sooner or later
WAIT_S = 480.0


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


def _shots(service: Service, film_id: str, *statuses: str) -> list[dict[str, Any]]:
    children = service.get(f"/v1/films/{film_id}")["children"]
    return [child for child in children if child["kind"] == "video" and child["status"] in statuses]


def _family(data_dir: Path, film_id: str) -> dict[str, Job]:
    """Read a film and its children from the database itself."""
    db = open_database(Settings(data_dir=data_dir).database)
    try:
        children = store.list_jobs(db, parent_id=film_id, limit=100).data
        return {job.id: job for job in (store.get(db, film_id), *children)}
    finally:
        db.close()


def _outcome(job: Job) -> tuple[object, ...]:
    return (job.status, job.attempt, job.winning_attempt, job.started_at, job.completed_at, job.gpu_seconds, job.result)


@pytest.mark.timeout(1800)
def test_a_film_outlives_two_deaths_of_the_service(running: list[Service], config: Path) -> None:
    service = running[-1]
    body = {
        "idea": "a green square crosses the sea",
        "seconds": SECONDS,
        "shots": 4,
        "seed": 9,
        # a shot takes many times what it takes to see that it is being made
        "num_inference_steps": min(3 * SLOW_STEPS, 200),
    }
    film_id = str(httpx.post(f"{service.url}/v1/films", json=body, timeout=60, trust_env=False).json()["id"])

    # first death: the supervisor alone is killed in the middle of the film, and nothing of it is left
    wait_for(lambda: _shots(running[-1], film_id, "completed"), WAIT_S, "a shot is done")
    processes = service.descendants()
    assert len(processes) >= 9
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert left == [], "processes outlived their supervisor"
    # what was done by then, the database of the dead service says, and not what was last seen of the living one
    first = _family(service.data_dir, film_id)
    undone = {job.id for job in first.values() if job.kind == "video" and not job.status.is_terminal}
    assert undone and not first[film_id].status.is_terminal, "the film had ended before the service was killed"
    running.append(start(service.data_dir, config))

    # second death: SIGTERM in the middle of a shot that the first one left undone; each of them is made sooner or later
    def is_one_made() -> bool:
        return any(child["id"] in undone for child in _shots(running[-1], film_id, "in_progress", "completed"))

    wait_for(is_one_made, WAIT_S, "a shot that was left undone is made")
    running[-1].stop()
    second = _family(service.data_dir, film_id)
    running.append(start(service.data_dir, config))

    wait_for(lambda: running[-1].ended(film_id), WAIT_S, "the film ends")
    film = running[-1].get(f"/v1/films/{film_id}")
    assert film["status"] == "completed", film["error"]
    # nothing was made in a second place: a storyboard, four shots, the joining
    kinds = sorted(child["kind"] for child in film["children"])
    assert kinds == ["join", "storyboard", "video", "video", "video", "video"]
    last = _family(service.data_dir, film_id)
    for job in [*first.values(), *second.values()]:
        if job.status.is_terminal:
            # continued, not repeated: what was done at a death is as it was
            assert _outcome(last[job.id]) == _outcome(job)
        elif job.kind != "film":
            # what was not done was done by an attempt that began after that death
            assert last[job.id].attempt > job.attempt
    lengths = [shot["num_frames"] for shot in film["storyboard"]["shots"]]
    target = service.data_dir / "film.mp4"
    target.write_bytes(httpx.get(f"{running[-1].url}{film['content_url']}", timeout=60, trust_env=False).content)
    inspect_film(target, lengths, fps=FPS, wanted=(), report=lambda _: None)
    with av.open(str(target)) as file:
        assert file.duration == SECONDS * av.time_base
