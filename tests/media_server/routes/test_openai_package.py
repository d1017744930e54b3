"""The unmodified `openai` package against the application on a real port."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai.types import Video

from media_server import http_events
from media_server.app import create_app

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


@pytest.fixture
def app(working: Any) -> FastAPI:
    return create_app(working.settings)


def stop_claiming(working: Any) -> None:
    """Let the scripted worker take no more jobs; a claim that was under way could still have taken the next one."""
    is_idle = threading.Event()
    working.worker.claim = lambda pool: is_idle.set()
    assert is_idle.wait(10)


@pytest.fixture
def client(live: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live}/v1", api_key="anything", max_retries=2) as client:
        yield client


def test_create_and_poll_then_download(client: openai.OpenAI, working: Any, tmp_path: Path) -> None:
    video = client.videos.create_and_poll(prompt="a red ball", seconds="2", size="160x96")  # type: ignore[arg-type]
    assert isinstance(video, Video)
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "2", "160x96")
    assert video.model_extra is not None and video.model_extra["num_frames"] == 32
    for variant, expected in (("video", working.worker.clip), ("thumbnail", working.worker.picture)):
        content = client.videos.download_content(video.id, variant=variant)  # type: ignore[arg-type]
        content.write_to_file(tmp_path / variant)
        assert (tmp_path / variant).read_bytes() == expected


def test_extra_body_and_an_upload(client: openai.OpenAI, working: Any) -> None:
    picture = working.worker.picture
    video = client.videos.create(
        prompt="a red ball",
        input_reference=("ball.jpg", picture, "image/jpeg"),
        extra_body={
            "num_frames": 17,
            "seed": 5,
            "extend": {"anchor": False},
            "output": {"crf": 20},
            "metadata": {"k": "v"},
        },
    )
    assert video.model_extra is not None
    assert (video.model_extra["num_frames"], video.model_extra["seed"]) == (17, 5)
    assert video.model_extra["metadata"] == {"k": "v"}
    assert video.model_extra["adjustments"][0]["param"] == "input_reference"
    done = client.videos.poll(video.id, poll_interval_ms=50)
    remix = client.videos.remix(done.id, prompt="a blue ball")
    assert remix.remixed_from_video_id == done.id
    # the package takes only files for these arguments; references go with extra_body, in bracket form
    again = client.videos.create(prompt="on", extra_body={"input_reference": {"file_id": done.id}})
    assert client.videos.poll(again.id, poll_interval_ms=50).status == "completed"
    omitted: Any = openai.omit
    longer = client.videos.extend(prompt="it stops", seconds="4", video=omitted, extra_body={"video": {"id": done.id}})
    # the scripted file lasts 2 s
    assert longer.seconds == "6"


def test_lists_and_delete(client: openai.OpenAI) -> None:
    ids = [client.videos.create(prompt=f"ball {n}").id for n in range(3)]
    assert [video.id for video in client.videos.list(limit=2)] == ids[::-1]
    deleted = client.videos.delete(ids[0])
    assert (deleted.deleted, deleted.object) == (True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.retrieve(ids[0])
    assert missing.value.code == "not_found"
    assert missing.value.request_id


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.videos.create(prompt="a", size="161x96")  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.code, bad.value.type) == ("size", "invalid_request", "invalid_request_error")
    assert "multiple of 16" in bad.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.videos.create(prompt="a", model="sora-2")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as edit:
        client.videos.edit(prompt="a", video=b"a file")
    assert edit.value.code == "not_supported"
    assert [model.id for model in client.models.list()] == ["tiny-wan", "smollm2-135m-instruct"]
    assert client.models.retrieve("tiny-wan").owned_by == "media-server"


def test_a_409_is_not_repeated(client: openai.OpenAI, working: Any) -> None:
    stop_claiming(working)
    video = client.videos.create(prompt="a")
    calls: list[httpx.Request] = []
    transport = client._client
    send = transport.send

    def counting(request: Any, **more: Any) -> Any:
        calls.append(request)
        return send(request, **more)

    transport.send = counting  # type: ignore[method-assign]
    with pytest.raises(openai.ConflictError) as early:
        client.videos.download_content(video.id)
    assert early.value.code == "not_ready"
    assert len(calls) == 1


def test_a_huge_body_is_answered_rather_than_reset(live: str, working: Any) -> None:
    before = working.contents()
    with httpx.Client(base_url=live, timeout=30, trust_env=False) as http:
        answer = http.post("/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", bytes(16 << 20))})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        chunks = (bytes(1 << 16) for _ in range(200))
        answer = http.post("/v1/videos", content=chunks, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert working.contents() == before


def test_events_over_a_real_connection(live: str, client: openai.OpenAI) -> None:
    video = client.videos.create(prompt="a")
    with httpx.stream("GET", f"{live}/v1/jobs/{video.id}/events", trust_env=False, timeout=10) as answer:
        types = [line[7:] for line in answer.iter_lines() if line.startswith("event: ")]
    assert (types[0], types[-1]) == ("job.queued", "video.completed")


def test_a_listener_that_goes_away_is_forgotten(
    live: str, app: FastAPI, client: openai.OpenAI, working: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_events, "FALLBACK_S", 0.05)
    monkeypatch.setattr(http_events, "HEARTBEAT_S", 0.05)
    stop_claiming(working)
    video = client.videos.create(prompt="a")
    with httpx.stream("GET", f"{live}/v1/jobs/{video.id}/events", trust_env=False, timeout=10) as answer:
        # kept: a reader that is forgotten closes its connection
        lines = answer.iter_lines()
        assert "event: job.queued" in lines
        assert list(app.state.event_feed._listeners) == [video.id]
    deadline = time.monotonic() + 10
    while app.state.event_feed._listeners:
        assert time.monotonic() < deadline
        time.sleep(0.02)
