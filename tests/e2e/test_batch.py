"""Batches and backups over the real processes: the openai package, a death of everything, a copy under load."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import av
import psutil
import pytest

from media_server.settings import Settings
from tests.e2e.conftest import Service, run_cli, start, wait_for

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:The Sora API")]

MODEL = "smollm2-135m-instruct"
PENDING = ("validating", "in_progress", "finalizing")


def clip(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"prompt": "a red ball", "seconds": "1", "size": "64x64", "num_inference_steps": 4, "seed": 7, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/videos", "body": fields}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Say {custom_id}."}],
        "max_tokens": 8,
        "temperature": 0,
        **body,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def start_batch(service: Service, endpoint: Any, *lines: dict[str, Any]) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = service.openai.files.create(file=("lines.jsonl", content), purpose="batch")
    made = service.openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    return made.id


def ended(service: Service, batch_id: str) -> Any:
    batch = service.openai.batches.retrieve(batch_id)
    return None if batch.status in PENDING else batch


def read(service: Service, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in service.openai.files.content(file_id).text.splitlines()]


def plays(content: bytes) -> bool:
    with av.open(io.BytesIO(content)) as file:
        assert isinstance(file, av.container.InputContainer)
        return len(list(file.decode(video=0))) == 16


def test_a_batch_outlives_the_death_of_everything(running: list[Service], config: Path) -> None:
    service = running[-1]
    clips = [clip(f"clip-{number}", seed=number) for number in range(5)]
    clips += [clip("slow", num_inference_steps=200), clip("bad", size="65x64")]
    films_id = start_batch(service, "/v1/videos", *clips)
    words_id = start_batch(service, "/v1/chat/completions", chat("red"), chat("blue"), chat("loud", temperature=9))
    wait_for(lambda: service.get(f"/v1/batches/{films_id}")["request_counts"]["completed"], 240, "a first clip")
    # who asks meanwhile is served
    answer = service.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert answer.choices[0].message.content
    children = service.descendants()
    service.process.kill()
    service.process.wait()
    psutil.wait_procs(children, timeout=60)
    running.append(service := start(service.data_dir, config))
    words = wait_for(lambda: ended(service, words_id), 240, "the batch of text")
    assert words.status == "completed"
    assert words.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert words.model == MODEL and words.usage.output_tokens > 0
    said = read(service, words.output_file_id)
    assert {record["custom_id"] for record in said} == {"red", "blue"}
    assert all(record["response"]["body"]["choices"][0]["message"]["content"] for record in said)
    (loud,) = read(service, words.error_file_id)
    assert loud["response"]["body"]["param"] == "temperature" and loud["response"]["body"]["value"] == 9
    films = wait_for(lambda: ended(service, films_id), 400, "the batch of clips")
    assert films.status == "completed"
    assert films.request_counts.model_dump() == {"total": 7, "completed": 6, "failed": 1}
    made = read(service, films.output_file_id)
    ids = {record["custom_id"]: record["response"]["body"]["id"] for record in made}
    assert set(ids) == {"slow", *(f"clip-{number}" for number in range(5))}
    assert all(plays(service.openai.videos.download_content(video_id).read()) for video_id in ids.values())
    # each line has made one job, whatever died
    with service.http as http:
        listed = http.get("/v1/jobs", params={"kind": "video", "limit": 100}).json()["data"]
    assert sorted(job["id"] for job in listed if job["priority"] == -50) == sorted(ids.values())
    (bad,) = read(service, films.error_file_id)
    assert (bad["custom_id"], bad["line"], bad["response"]["body"]["param"]) == ("bad", 7, "size")


def test_a_copy_made_under_load_goes_on_elsewhere(service: Service, config: Path, tmp_path: Path) -> None:
    client = service.openai
    small: Any = {"prompt": "a ball", "seconds": "1", "size": "64x64"}
    done = client.videos.create_and_poll(**small, extra_body={"num_inference_steps": 4}, poll_interval_ms=200)
    slow = client.videos.create(**small, extra_body={"num_inference_steps": 200})
    waiting = [client.videos.create(**small, extra_body={"num_inference_steps": 4}).id for _ in range(2)]
    wait_for(lambda: service.get(f"/v1/videos/{slow.id}")["step"], 120, "the first step")
    copy = tmp_path / "copy.tar"
    backup = run_cli("backup", str(copy), "--data", str(service.data_dir), "--json")
    assert backup.returncode == 0, backup.stderr
    said = json.loads(backup.stdout)
    assert said["parts"] == ["database", "artifacts"] and said["bad"] == [] and said["bytes"] <= copy.stat().st_size
    elsewhere = tmp_path / "elsewhere"
    assert run_cli("restore", str(copy), "--data", str(elsewhere)).returncode == 0
    # the language model can be converted again; here it is only time
    shutil.copytree(service.data_dir / "models", elsewhere / "models")
    before = {job["id"]: job for job in _videos(service)}
    other = start(elsewhere, config)
    try:
        restored = {job["id"]: job for job in _videos(other)}
        assert set(restored) == set(before)
        finished = [id for id, video in restored.items() if video["status"] == "completed"]
        assert done.id in finished
        assert all(plays(other.openai.videos.download_content(id).read()) for id in finished if _is_small(restored[id]))
        for video_id in (slow.id, *waiting):
            assert wait_for(lambda id=video_id: other.ended(id), 240, "a job goes on")["status"] == "completed"  # type: ignore[misc]
            assert plays(other.openai.videos.download_content(video_id).read())
    finally:
        other.stop()
        shutil.rmtree(Settings(data_dir=elsewhere).runtime_path, ignore_errors=True)
    for video_id in (slow.id, *waiting):
        wait_for(lambda id=video_id: service.ended(id), 240, "and here too")  # type: ignore[misc]


def _videos(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.get("/v1/videos?limit=100")["data"]
    return found


def _is_small(video: dict[str, Any]) -> bool:
    return bool(video["size"] == "64x64" and video["num_frames"] == 16)
