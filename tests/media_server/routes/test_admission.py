"""What is refused before it costs anything: clips that never fit, and queues that are full; and what is predicted."""

from typing import Any

import pytest

from media_server.admission import Limits
from media_server.models.card import ClipCost, Machine, VideoCard
from media_server.models.registry import publish
from tests.cards import VIDEO_CARD

# 33 frames of 160x96 are 540 tokens and 506880 pixels; at 8 steps they take 0.5 + 4.32 + 0.05 s
COST = ClipCost(
    seconds_fixed=0.5,
    seconds_per_step_token=0.001,
    seconds_per_frame_pixel=1e-7,
    bytes_fixed=1 << 30,
    bytes_per_token=1 << 20,
)
SECONDS = 0.5 + 8 * 540 * 0.001 + 33 * 160 * 96 * 1e-7


def _priced(service: Any, *, memory_gib: float = 0.0, **settings: Any) -> VideoCard:
    """Have the model say what it takes, and the service take no more than `settings` allow."""
    machine = Machine(name="H200", memory_bytes=int(memory_gib * 2**30))
    card = VIDEO_CARD.model_copy(update={"cost": COST, "machine": machine})
    publish(service.db, card, "scripted@test:1")
    service.http.app.state.settings = service.settings.model_copy(update=settings)
    return card


def _post(service: Any, path: str = "/v1/videos", **fields: Any) -> Any:
    return service.http.post(path, json={"prompt": "a red ball", "num_frames": 33, **fields})


def test_a_job_says_what_it_is_predicted_to_take(service: Any) -> None:
    _priced(service)
    first, second = _post(service).json(), _post(service).json()
    assert first["predicted_gpu_seconds"] == pytest.approx(SECONDS)
    assert first["predicted_peak_memory_bytes"] == (1 << 30) + (540 << 20)
    assert (first["eta_s"], second["eta_s"]) == (pytest.approx(SECONDS, abs=0.1), pytest.approx(2 * SECONDS, abs=0.1))
    # it is there beside what it took
    service.worker.run_all()
    done = service.http.get(f"/v1/videos/{first['id']}").json()
    assert (done["gpu_seconds"], done["predicted_gpu_seconds"]) == (0.5, pytest.approx(SECONDS))
    assert service.http.get(f"/v1/jobs/{first['id']}").json()["predicted_gpu_seconds"] == pytest.approx(SECONDS)
    assert done["eta_s"] is None


def test_finished_clips_set_the_prediction_right(service: Any) -> None:
    _priced(service)
    for _ in range(3):
        _post(service)
    # the scripted worker takes half a second and a MiB for each
    service.worker.run_all()
    video = _post(service).json()
    assert video["predicted_gpu_seconds"] == pytest.approx(0.5)
    assert video["predicted_peak_memory_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"num_inference_steps": 50}, "num_inference_steps", 50),
        ({"size": "256x144", "num_inference_steps": 12}, "size", "256x144"),
        ({"num_frames": 160}, "seconds", 10.0),
    ],
)
def test_a_clip_that_takes_too_long_never_fits(service: Any, fields: dict[str, Any], param: str, value: Any) -> None:
    _priced(service, max_clip_cost_s=10.0)
    before = service.contents()
    answer = _post(service, **fields)
    assert answer.status_code == 400
    problem = answer.json()
    assert (problem["error"]["code"], problem["error"]["param"]) == ("cost_limit_exceeded", param)
    assert problem["error"]["type"] == "invalid_request_error"
    assert problem["rule"] == "at most 10 GPU seconds a clip by prediction"
    assert problem["value"] == value
    assert "is predicted to take" in problem["error"]["message"]
    assert service.contents() == before


def test_a_clip_needs_no_more_memory_than_there_is(service: Any, clip_bytes: bytes) -> None:
    _priced(service, memory_gib=2.0)
    assert _post(service).status_code == 200
    before = service.contents()
    answer = _post(service, size="256x144")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cost_limit_exceeded")
    # 9 latent frames of 16 x 9 tokens
    assert answer.json()["rule"] == "at most 2.0 GiB of memory on the model's device by prediction"
    assert "predicted to take 2.3 GiB" in answer.json()["error"]["message"]
    assert answer.json()["param"] == "size"
    # steps cost no memory
    assert _post(service, num_inference_steps=50).status_code == 200
    assert service.http.post("/v1/films", json={"idea": "a", "size": "256x144"}).status_code == 400
    assert len(service.contents()[1]) == len(before[1])


def test_a_queue_that_is_too_long_is_full_for_a_while(service: Any) -> None:
    _priced(service, max_queue_wait_s=12.0)
    ids = [_post(service).json()["id"] for _ in range(3)]
    before = service.contents()
    answer = _post(service)
    assert answer.status_code == 429
    problem = answer.json()
    assert (problem["error"]["type"], problem["error"]["code"]) == ("rate_limit_error", "queue_full")
    assert problem["rule"] == "a predicted wait of at most 12 s"
    # 3 * 4.87 - 12 seconds, rounded up
    assert answer.headers["retry-after"] == "3"
    assert service.contents() == before
    # what was asked to be sooner starts sooner
    assert _post(service, priority=1).status_code == 200
    service.http.delete(f"/v1/videos/{ids[0]}")
    service.http.delete(f"/v1/videos/{ids[1]}")
    assert _post(service).status_code == 200


def test_the_number_of_waiting_jobs_is_bounded_where_no_cost_is_known(service: Any) -> None:
    service.http.app.state.settings = service.settings.model_copy(update={"max_queue_jobs": 2})
    first = _post(service)
    assert (first.json()["predicted_gpu_seconds"], first.json()["eta_s"]) == (None, None)
    assert _post(service).status_code == 200
    answer = _post(service)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
    assert answer.json()["rule"] == "at most 2 jobs wait in a queue"
    for _ in range(2):
        assert service.http.post("/v1/storyboards", json={"idea": "a"}).status_code == 202
    full = service.http.post("/v1/storyboards", json={"idea": "a"})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert service.http.post("/v1/films", json={"idea": "a"}).status_code == 429


def test_films_are_admitted_with_their_shots(service: Any) -> None:
    """Two shots of 32 frames, made as 33; the shots of a film whose storyboard is not written count already."""
    _priced(service, max_queue_wait_s=15.0)
    film = service.http.post("/v1/films", json={"idea": "a", "seconds": 4, "shots": 2})
    assert film.json()["predicted_gpu_seconds"] == pytest.approx(2 * SECONDS)
    assert service.http.post("/v1/films", json={"idea": "a", "seconds": 4, "shots": 2}).status_code == 200
    answer = service.http.post("/v1/films", json={"idea": "a", "seconds": 4, "shots": 2})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    # its own shots are never refused, and carry their predictions
    service.http.app.state.settings = service.settings.model_copy(update={"max_queue_jobs": 1})
    service.worker.do(service.worker.claim("text"))
    shots = service.http.get("/v1/jobs", params={"kind": "video"}).json()["data"]
    assert [shot["predicted_gpu_seconds"] for shot in shots] == [pytest.approx(SECONDS)] * 2
    service.worker.run_all()
    assert service.http.get(f"/v1/films/{film.json()['id']}").json()["status"] == "completed"


def test_remixes_and_extensions_are_asked_too(service: Any) -> None:
    video = service.completed_video()
    _priced(service, max_clip_cost_s=1.0)
    remix = service.http.post(f"/v1/videos/{video['id']}/remix", json={"prompt": "a blue ball"})
    extension = service.http.post(
        "/v1/videos/extensions", json={"prompt": "it stops", "seconds": "2", "video": {"id": video["id"]}}
    )
    for answer in (remix, extension):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cost_limit_exceeded"), answer.text


def test_limits_are_the_settings(service: Any) -> None:
    assert Limits.of(service.settings) == Limits(21600.0, 86400.0, 1000)
