"""A clip from HTTP to webhook over the real processes, by the unmodified openai package."""

import io
import json
from typing import Any

import av
import httpx
import openai
import pytest
from PIL import Image
from standardwebhooks.webhooks import Webhook

from tests.e2e.conftest import Hook, Service, run_cli, wait_for

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# small and quick: the path is the same
SMALL: dict[str, Any] = {"seconds": "1", "size": "64x64"}
FAST: dict[str, Any] = {"num_inference_steps": 4, "seed": 7}
# long enough to be seen on its way
SEEN: dict[str, Any] = {"num_inference_steps": 200, "seed": 7}


def test_a_clip_by_the_openai_package_with_its_webhook(service: Service, hook: Hook) -> None:
    client = service.openai
    video = client.videos.create_and_poll(
        prompt="a red ball rolls over a green field",
        extra_body={**SEEN, "webhook_url": hook.url},
        poll_interval_ms=200,
        **SMALL,
    )
    assert video.status == "completed", video.error
    assert (video.progress, video.seconds, video.size) == (100, "1", "64x64")
    content = client.videos.download_content(video.id).read()
    with av.open(io.BytesIO(content)) as file:
        assert isinstance(file, av.container.InputContainer)
        frames = list(file.decode(video=0))
    found = service.get(f"/v1/videos/{video.id}")
    assert len(frames) == found["num_frames"] == 16
    assert {(frame.width, frame.height) for frame in frames} == {(64, 64)}
    for variant in ("thumbnail", "spritesheet"):
        picture = client.videos.download_content(video.id, variant=variant).read()
        assert Image.open(io.BytesIO(picture)).format == "JPEG"
    assert isinstance(found["gpu_seconds"], float) and found["gpu_seconds"] > 0

    # the receiver is told once, signed
    wait_for(lambda: hook.got, 10, "the webhook")
    headers, body = hook.got[0]
    secret = (service.data_dir / "webhook-secret").read_text().strip()
    event = Webhook(secret).verify(body, headers)
    assert (event["type"], event["data"]["id"]) == ("video.completed", video.id)
    assert client.webhooks.unwrap(body.decode(), headers, secret=secret).id == headers["webhook-id"]

    # events can be read again from any of them
    events = read_events(service, video.id)
    types = [event["type"] for event in events]
    assert types[:2] == ["job.queued", "job.started"] and types[-1] == "video.completed"
    progress = [event["data"]["progress"] for event in events if event["type"] == "job.progress"]
    assert progress == sorted(progress) and progress
    middle = events[len(events) // 2]["seq"]
    assert read_events(service, video.id, last_event_id=str(middle)) == events[len(events) // 2 + 1 :]

    # the same request is the same clip, pixel for pixel
    again = client.videos.create_and_poll(
        prompt="a red ball rolls over a green field", extra_body=SEEN, poll_interval_ms=200, **SMALL
    )
    with av.open(io.BytesIO(client.videos.download_content(again.id).read())) as file:
        assert isinstance(file, av.container.InputContainer)
        repeated = [frame.to_ndarray().tobytes() for frame in file.decode(video=0)]
    assert repeated == [frame.to_ndarray().tobytes() for frame in frames]

    # parts of the file
    with service.http as http:
        path = f"/v1/videos/{video.id}/content"
        part = http.get(path, headers={"range": "bytes=10-19"})
        assert part.status_code == 206 and part.content == content[10:20]
        assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"
        assert http.get(path, headers={"range": "bytes=-5"}).content == content[-5:]
        beyond = http.get(path, headers={"range": f"bytes={len(content)}-"})
        assert beyond.status_code == 416 and beyond.headers["content-range"] == f"bytes */{len(content)}"

    # listed, newest first, a page at a time
    first = client.videos.list(limit=1)
    assert [item.id for item in first.data] == [again.id] and first.has_more
    assert [item.id for item in client.videos.list(limit=1, after=again.id).data] == [video.id]

    # deleted with its files
    folder = service.data_dir / "artifacts" / video.id
    assert folder.is_dir()
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    wait_for(lambda: not folder.exists(), 15, "the files are gone")
    assert (service.data_dir / "artifacts" / again.id).is_dir()


def read_events(service: Service, job_id: str, last_event_id: str | None = None) -> list[dict[str, Any]]:
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    with service.http as http:
        answer = http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_running_clip_is_cancelled_at_its_next_step(service: Service) -> None:
    video = service.openai.videos.create(prompt="a ball", extra_body={"num_inference_steps": 200, "seed": 1}, **SMALL)
    wait_for(lambda: service.get(f"/v1/videos/{video.id}")["step"], 60, "the first step")
    done = run_cli("cancel", video.id, "--url", service.url)
    assert done.returncode == 0 and "asked to stop" in done.stdout
    ended = wait_for(lambda: service.ended(video.id), 10, "the cancel is confirmed")
    assert ended["status"] == "cancelled"
    # and the next clip runs clean
    clip = service.openai.videos.create_and_poll(prompt="a ball", extra_body=FAST, poll_interval_ms=200, **SMALL)
    assert clip.status == "completed"


def test_a_clip_by_the_command_line(service: Service, tmp_path: Any) -> None:
    target, picture = tmp_path / "clip.mp4", tmp_path / "first.png"
    Image.new("RGB", (80, 80), (200, 30, 30)).save(picture)
    arguments = ("--seconds", "1", "--size", "64x64", "--steps", "4", "--image", str(picture), "--out", str(target))
    done = run_cli("clip", "a red ball", *arguments, "--url", service.url, "--json")
    assert done.returncode == 0, done.stderr
    video = json.loads(done.stdout)
    assert video["status"] == "completed" and video["files"] == {"video": str(target)}
    assert target.read_bytes()[4:8] == b"ftyp"
    shown = run_cli("jobs", video["id"], "--url", service.url)
    assert shown.returncode == 0 and "completed" in shown.stdout
    models = run_cli("models", "--url", service.url)
    assert models.returncode == 0 and "tiny-wan" in models.stdout and "smollm2" in models.stdout


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x", "size": "161x96"}, 400, "size"),
        ({"prompt": "x", "seconds": "100000"}, 400, "seconds"),
        ({"prompt": "x", "model": "no-such-model"}, 404, "model"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    service: Service, fields: dict[str, str], status: int, param: str
) -> None:
    before = service.get("/v1/jobs?limit=1")["first_id"]
    with service.http as http:
        answer = http.post("/v1/videos", files={name: (None, value) for name, value in fields.items()})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert answer.json()["rule"] and httpx.codes.is_client_error(answer.status_code)
    assert service.get("/v1/jobs?limit=1")["first_id"] == before
