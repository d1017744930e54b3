"""Quotas over HTTP: what is left stands in each answer, what is refused says when to come back, and 507."""

import shutil
from typing import Any

import openai
import pytest

from media_server.keys import change_limits, create_key
from media_server.limits import KeyLimits, parse_budget

CLIP = {"prompt": "a red ball"}
# 8 steps, 160x96, 32 frames
WORK = 8 * 160 * 96 * 32


def _key(service: Any, **limits: Any) -> str:
    key, text = create_key(service.db, "studio", limits=KeyLimits(**limits))
    service.http.headers["authorization"] = f"Bearer {text}"
    return key.id


def _quota_headers(answer: Any) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in answer.headers.items() if name.startswith(prefix)}


def test_a_full_queue_answers_429_and_says_what_is_left(service: Any) -> None:
    _key(service, queued_jobs=2)
    for left in ("1", "0"):
        answer = service.http.post("/v1/videos", json=CLIP)
        assert answer.status_code == 200
        assert _quota_headers(answer) == {"limit-jobs": "2", "remaining-jobs": left}
    before = service.contents()
    for path, body in (
        ("/v1/videos", CLIP),
        ("/v1/films", {"idea": "a ball"}),
        ("/v1/storyboards", {"idea": "a ball"}),
    ):
        refused = service.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_quota"), refused.text
        assert refused.headers["retry-after"] == "10"
        assert _quota_headers(refused) == {"limit-jobs": "2", "remaining-jobs": "0"}
        problem = refused.json()
        assert problem["error"]["type"] == "rate_limit_error"
        assert (problem["title"], problem["value"]) == ("Too many requests", 2)
    assert service.contents() == before
    # nothing is said where nothing is asked for
    assert _quota_headers(service.http.get("/v1/videos")) == {}
    service.worker.run_all()
    assert service.http.post("/v1/videos", json=CLIP).status_code == 200


def test_a_refused_upload_leaves_no_file(service: Any) -> None:
    _key(service, queued_jobs=0)
    before = service.contents()
    picture = ("a.jpg", service.worker.picture, "image/jpeg")
    answer = service.http.post("/v1/videos", data=CLIP, files={"input_reference": picture})
    assert answer.status_code == 429, answer.text
    assert service.contents() == before


def test_work_and_storage_are_counted(service: Any) -> None:
    _key(service, work_per_day=2.0 * WORK, storage_bytes=1 << 30)
    video = service.completed_video()
    answer = service.http.post("/v1/videos", json=CLIP)
    left = _quota_headers(answer)
    assert (left["limit-work"], left["remaining-work"]) == (str(2 * WORK), "0")
    assert left["reset-work"].endswith("s")
    files = sum(path.stat().st_size for path in (service.artifacts.root / video["id"]).rglob("*") if path.is_file())
    assert int(left["limit-storage"]) - int(left["remaining-storage"]) == files > 0
    refused = service.http.post(f"/v1/videos/{video['id']}/remix", json={"prompt": "a blue ball"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "work_quota")
    too_much = service.http.post("/v1/videos", json={**CLIP, "num_inference_steps": 50, "seconds": "4"})
    assert (too_much.status_code, too_much.json()["error"]["code"]) == (403, "over_work_quota")
    service.http.delete(f"/v1/videos/{video['id']}")
    again = _quota_headers(service.http.post("/v1/videos", json=CLIP))
    assert again["remaining-storage"] == again["limit-storage"]


def test_a_spent_budget_refuses_a_label_with_the_figure(service: Any) -> None:
    key_id = _key(service, budgets=(parse_budget("spot:gpu_seconds=0.5"),))
    service.completed_video(label="spot")
    refused = service.http.post("/v1/videos", json={**CLIP, "label": "spot"})
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == (
        "The budget of the label 'spot' is 0.5 GPU seconds, and 0.5 are spent."
    )
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
    film = service.http.post("/v1/films", json={"idea": "a ball", "label": "spot"})
    assert film.status_code == 429
    assert service.http.post("/v1/videos", json=CLIP).status_code == 200
    change_limits(service.db, key_id, KeyLimits())
    made = service.http.post("/v1/films", json={"idea": "a ball", "label": "spot"})
    assert (made.status_code, made.json()["label"]) == (200, "spot")


def test_the_openai_package_reads_a_quota_as_its_own(service: Any) -> None:
    _, text = create_key(service.db, "studio", limits=KeyLimits(work_per_day=1.0 * WORK))
    client = openai.OpenAI(api_key=text, base_url="http://127.0.0.1:8000/v1", http_client=service.http)
    client.videos.create(prompt="a red ball")
    with pytest.raises(openai.RateLimitError) as refused:
        client.videos.create(prompt="a red ball")
    assert refused.value.code == "work_quota"
    assert refused.value.response.headers["x-ratelimit-remaining-work"] == "0"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="msk_wrong").videos.list()


def test_a_disk_that_is_nearly_full_takes_no_jobs(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = service.http.post("/v1/videos", json=CLIP).json()
    before = service.contents()
    usage = shutil.disk_usage("/")
    free = service.settings.min_free_bytes - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=free))
    picture = ("a.jpg", service.worker.picture, "image/jpeg")
    for path, arguments in (
        ("/v1/videos", {"json": CLIP}),
        ("/v1/videos", {"data": CLIP, "files": {"input_reference": picture}}),
        (f"/v1/videos/{queued['id']}/remix", {"json": CLIP}),
        ("/v1/videos/extensions", {"json": {**CLIP, "seconds": "1", "video": {"id": queued["id"]}}}),
        ("/v1/films", {"json": {"idea": "a ball"}}),
        ("/v1/storyboards", {"json": {"idea": "a ball"}}),
        ("/v1/files", {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}),
        ("/v1/batches", {"json": {"input_file_id": "file_1"}}),
    ):
        refused = service.http.post(path, **arguments)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage"), path
        assert refused.json()["value"] == free
    assert service.contents() == before
    # what frees the disk goes on, and so does what was taken before
    service.worker.run_all()
    assert service.http.get(f"/v1/videos/{queued['id']}").json()["status"] == "completed"
    assert service.http.post(f"/v1/jobs/{queued['id']}/cancel").status_code == 200
    assert service.http.delete(f"/v1/videos/{queued['id']}").status_code == 200
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=free + 1))
    assert service.http.post("/v1/videos", json=CLIP).status_code == 200


def test_the_document_says_what_brings_work(service: Any) -> None:
    paths = service.http.get("/openapi.json").json()["paths"]
    limited = {
        operation["operationId"]: "507" in operation["responses"]
        for methods in paths.values()
        for operation in methods.values()
        if "429" in operation["responses"]
    }
    assert limited == {
        "create_video": True,
        "extend_video": True,
        "remix_video": True,
        "create_film": True,
        "create_storyboard": True,
        "create_file": True,
        "create_batch": True,
        "create_chat_completion": False,
        "create_completion": False,
    }
    answers = paths["/v1/videos"]["post"]["responses"]
    assert "x-ratelimit-remaining-jobs" in answers["200"]["headers"]
