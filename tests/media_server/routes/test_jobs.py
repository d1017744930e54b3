"""Jobs of every kind: lists, cancelling, and events as they happen."""

import json
import threading
from typing import Any

from fastapi.sse import format_sse_event

from media_server import http_events


def _video(service: Any, **fields: Any) -> str:
    answer = service.http.post("/v1/videos", json={"prompt": "a", **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def read_stream(service: Any, job_id: str, **headers: str) -> list[dict[str, Any]]:
    """Read a job's stream to its end, without what is of the moment; checks that the frames agree with their data."""
    events = []
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        frame: dict[str, str] = {}
        for line in answer.iter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                frame[name] = value
                continue
            if "data" in frame:
                event = json.loads(frame["data"])
                assert (frame.get("id", "None"), frame["event"]) == (str(event["seq"]), event["type"])
                if event["seq"] is None:
                    assert event["type"] in ("job.position", "job.preview")
                else:
                    events.append(event)
            frame = {}
    return events


def test_jobs_of_every_kind_are_listed_and_found_by_id(service: Any) -> None:
    video = _video(service, priority=2)
    film = service.http.post("/v1/films", json={"idea": "a"}).json()["id"]
    kinds = {job["id"]: job["kind"] for job in service.http.get("/v1/jobs").json()["data"]}
    assert sorted(kinds.values()) == ["film", "storyboard", "video"]
    for job_id, kind in kinds.items():
        job = service.http.get(f"/v1/jobs/{job_id}").json()
        assert (job["object"], job["kind"], job["status"]) == ("job", kind, "queued")
        assert service.http.get(job["url"]).status_code == 200
    only = service.http.get("/v1/jobs", params=[("kind", "film"), ("kind", "video")]).json()["data"]
    assert {job["id"] for job in only} == {video, film}
    children = service.http.get("/v1/jobs", params={"parent_id": film}).json()["data"]
    assert [job["kind"] for job in children] == ["storyboard"]
    before = service.http.get("/v1/jobs", params={"order": "asc", "before": film}).json()["data"]
    assert [job["id"] for job in before] == [video]
    service.worker.run_all()
    assert service.http.get("/v1/jobs", params={"status": "queued"}).json()["data"] == []


def test_lists_are_filtered_alike(service: Any) -> None:
    made = [_video(service, metadata={"scene": str(number), "take": "1"}) for number in range(3)]
    film = service.http.post("/v1/films", json={"idea": "a", "metadata": {"scene": "1"}}).json()["id"]
    board = service.http.post("/v1/storyboards", json={"idea": "a", "metadata": {"scene": "1"}}).json()["id"]

    def ids(path: str, **query: Any) -> list[str]:
        answer = service.http.get(f"/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["data"]]

    scene = {"metadata[scene]": "1"}
    assert ids("videos", **scene) == [made[1]]
    assert ids("films", **scene) == [film]
    assert ids("storyboards", **scene) == [board]
    assert ids("jobs", **scene) == [board, film, made[1]]
    assert ids("jobs", **scene, **{"metadata[take]": "1"}) == [made[1]]
    assert ids("jobs", **scene, kind="film", status="queued", model="tiny-wan") == [film]
    assert ids("videos", model="none") == ids("videos", status="failed") == []
    created_at = service.http.get(f"/v1/jobs/{made[0]}").json()["created_at"]
    assert ids("videos", created_from=created_at - 1, order="asc", limit=1) == [made[0]]
    assert ids("videos", created_before=created_at - 1) == []
    assert ids("videos", before=made[0]) == made[:0:-1]
    # places in the queue are a job's own, in a list too
    places = [video["queue_position"] for video in service.http.get("/v1/videos").json()["data"]]
    assert places == [2, 1, 0]
    for bad in ("metadata=1", "metadata[=1", "metadata[]=1", "metadata[a]=1&metadata[a]=2", "metadata[a]=%00"):
        answer = service.http.get(f"/v1/jobs?{bad}")
        assert (answer.status_code, answer.json()["param"]) == (400, "metadata"), bad
    for bad in ("status=done", "created_from=x", "model=" + "x" * 201):
        assert service.http.get(f"/v1/films?{bad}").status_code == 400, bad


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_when_its_worker_says_so(service: Any) -> None:
    queued, running = _video(service), _video(service, priority=1)
    claim = service.worker.claim("video")
    assert claim.job.id == running
    assert service.http.post(f"/v1/jobs/{queued}/cancel").json()["status"] == "cancelled"
    asked = service.http.post(f"/v1/jobs/{running}/cancel").json()
    assert (asked["status"], asked["is_cancel_requested"]) == ("in_progress", True)
    service.worker.do(claim)
    assert service.http.get(f"/v1/videos/{running}").json()["status"] == "cancelled"
    again = service.http.post(f"/v1/jobs/{running}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


def test_events_follow_a_job_to_its_end(working: Any) -> None:
    job_id = _video(working)
    events = read_stream(working, job_id)
    types = [event["type"] for event in events]
    assert types[:2] == ["job.queued", "job.started"]
    assert types[-1] == "video.completed"
    assert types[2:-1] == ["job.progress"] * 3
    assert {event["job_id"] for event in events} == {job_id}
    assert [event["data"]["step"] for event in events[2:-1]] == [1, 2, 3]
    seqs = [event["seq"] for event in events]
    assert seqs == sorted(set(seqs))


def test_a_listener_that_comes_back_misses_nothing_and_gets_nothing_twice(service: Any) -> None:
    job_id = _video(service)
    service.worker.run_all()
    events = read_stream(service, job_id)
    for index, event in enumerate(events[:-1]):
        assert read_stream(service, job_id, **{"last-event-id": str(event["seq"])}) == events[index + 1 :]
    ended = service.http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": str(events[-1]["seq"])})
    assert (ended.status_code, ended.content) == (204, b"")
    bad = service.http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": "x"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_film_is_followed_with_its_children(working: Any) -> None:
    film = working.http.post("/v1/films", json={"idea": "a ball", "seconds": 3, "shots": 2}).json()
    events = read_stream(working, film["id"])
    assert events[-1]["type"] == "film.completed"
    completed = [event["type"] for event in events if event["type"].endswith(".completed")]
    assert completed == [
        "storyboard.completed", "video.completed", "video.completed", "join.completed", "film.completed",
    ]  # fmt: skip
    assert {event["root_id"] for event in events} == {film["id"]}
    child = next(event["job_id"] for event in events if event["type"] == "video.completed")
    assert {event["job_id"] for event in read_stream(working, child)} == {child}


def test_silence_is_filled_with_heartbeats_and_deleting_ends_the_stream(service: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(http_events, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(http_events, "FALLBACK_S", 0.1)
    job_id = _video(service)
    has_beaten = threading.Event()

    def note(**fields: Any) -> bytes:
        if fields.get("comment") == "heartbeat":
            has_beaten.set()
        return format_sse_event(**fields)

    monkeypatch.setattr(http_events, "format_sse_event", note)

    # the test's client gives a stream when it has ended: another thread deletes the job once silence was filled
    def delete() -> None:
        if has_beaten.wait(120):
            service.http.delete(f"/v1/videos/{job_id}")

    thread = threading.Thread(target=delete)
    thread.start()
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        text = "".join(answer.iter_text())
    thread.join()
    assert ": heartbeat" in text
    assert "job.queued" in text


def test_a_wake_up_that_is_lost_costs_seconds_not_events(working: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(http_events, "FALLBACK_S", 0.1)
    monkeypatch.setattr(http_events.EventFeed, "_news", lambda self, seen: (set(), seen))
    assert read_stream(working, _video(working))[-1]["type"] == "video.completed"
