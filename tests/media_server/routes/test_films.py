"""Films by HTTP: from the idea to the file, what is kept of a film that fails, cancelling and deleting."""

from typing import Any

import pytest


def test_the_life_of_a_film(service: Any) -> None:
    answer = service.http.post(
        "/v1/films",
        json={
            "idea": "a red ball looks for its blue friend",
            "seconds": 4.5,
            "shots": 3,
            "seed": 7,
            "metadata": {"a": "b"},
        },
    )
    assert answer.status_code == 200, answer.text
    assert "openai-poll-after-ms" in answer.headers
    film = answer.json()
    expected = {
        "object": "film", "status": "queued", "idea": "a red ball looks for its blue friend", "seconds": 4.5,
        "num_frames": 72, "shots": 3, "style": None, "size": "160x96", "fps": 16, "seed": 7, "model": "tiny-wan",
        "storyboard": None, "content_url": None, "metadata": {"a": "b"}, "queue_position": None,
    }  # fmt: skip
    assert {name: film[name] for name in expected} == expected
    assert [child["kind"] for child in film["children"]] == ["storyboard"]
    url = f"/v1/films/{film['id']}"
    early = service.http.get(f"{url}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "not_ready")

    service.worker.do(service.worker.claim("text"))
    film = service.http.get(url).json()
    assert (film["status"], film["stage"], film["storyboard"]["title"]) == ("in_progress", "shots", "A ball")
    shots = [child for child in film["children"] if child["kind"] == "video"]
    assert [(child["shot"], child["retry"]) for child in shots] == [(0, 0), (1, 0), (2, 0)]
    # the storyboard is there as soon as it is written
    assert service.http.get(f"{url}/content", params={"variant": "storyboard"}).json()["title"] == "A ball"
    clip = service.http.get(shots[0]["url"]).json()
    assert (clip["film_id"], clip["num_frames"]) == (film["id"], 24)

    service.worker.run_all()
    film = service.http.get(url).json()
    assert (film["status"], film["progress"]) == ("completed", 100)
    assert film["gpu_seconds"] == pytest.approx(2.5)
    assert [shot["shot"] for shot in film["report"]["shots"]] == [0, 1, 2]
    assert film["storyboard"]["title"] == "A ball"
    whole = service.http.get(film["content_url"])
    assert whole.content == service.worker.clip
    assert whole.headers["content-disposition"] == f'inline; filename="{film["id"]}-film.mp4"'
    part = service.http.get(film["content_url"], headers={"range": "bytes=-5"})
    assert (part.status_code, part.content) == (206, service.worker.clip[-5:])
    for variant in ("storyboard", "timeline", "contact_sheet", "thumbnail"):
        assert service.http.get(f"{url}/content", params={"variant": variant}).status_code == 200
    assert service.http.head(f"{url}/content").status_code == 200


def test_a_film_that_fails_says_which_shot_and_keeps_what_was_made(service: Any) -> None:
    film = service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 1}).json()
    service.worker.do(service.worker.claim("text"))
    service.worker.failures = ["no room"] * 3
    service.worker.run_all()
    film = service.http.get(f"/v1/films/{film['id']}").json()
    assert (film["status"], film["error"]["code"]) == ("failed", "shot_failed")
    assert [child["retry"] for child in film["children"] if child["kind"] == "video"] == [0, 1, 2]
    url = f"/v1/films/{film['id']}/content"
    gone = service.http.get(url)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "job_failed")
    assert "shot_failed" in gone.json()["error"]["message"]
    assert service.http.get(url, params={"variant": "storyboard"}).json()["title"] == "A ball"


def test_cancelling_a_film_takes_its_jobs_with_it(service: Any) -> None:
    film = service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 2}).json()
    service.worker.do(service.worker.claim("text"))
    claim = service.worker.claim("video")
    asked = service.http.post(f"/v1/films/{film['id']}/cancel").json()
    assert (asked["status"], asked["is_cancel_requested"]) == ("in_progress", True)
    service.worker.do(claim)
    film = service.http.get(f"/v1/films/{film['id']}").json()
    assert film["status"] == "cancelled"
    assert {child["status"] for child in film["children"]} == {"completed", "cancelled"}


def test_deleting_a_film_takes_its_jobs_and_files(service: Any) -> None:
    before = service.contents()[1]
    film = service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 2}).json()
    service.worker.run_all()
    film = service.http.get(f"/v1/films/{film['id']}").json()
    refused = service.http.delete(f"/v1/jobs/{film['id']}")
    assert refused.status_code == 405
    assert service.http.delete(f"/v1/films/{film['id']}").json() == {
        "id": film["id"], "object": "film.deleted", "deleted": True,
    }  # fmt: skip
    for child in [film, *film["children"]]:
        assert service.http.get(f"/v1/jobs/{child['id']}").status_code == 404
    rows, files = service.contents()
    assert rows["prompts"] == 0
    assert files == before


def test_a_shot_that_its_film_needs_is_not_deleted(service: Any) -> None:
    service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 2})
    service.worker.do(service.worker.claim("text"))
    (first, _) = service.http.get("/v1/videos").json()["data"]
    answer = service.http.delete(f"/v1/videos/{first['id']}")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


def test_lists_page(service: Any) -> None:
    ids = [service.http.post("/v1/films", json={"idea": f"ball {n}"}).json()["id"] for n in range(3)]
    page = service.http.get("/v1/films", params={"limit": 2}).json()
    assert ([film["id"] for film in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    page = service.http.get("/v1/films", params={"after": page["last_id"]}).json()
    assert ([film["id"] for film in page["data"]], page["has_more"]) == ([ids[0]], False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"idea": " "}, "idea"),
        ({}, "idea"),
        ({"idea": "a", "seconds": 601}, "seconds"),
        ({"idea": "a", "shots": 0}, "shots"),
        ({"idea": "a", "size": "161x96"}, "size"),
        ({"idea": "a", "seed": -1}, "seed"),
        ({"idea": "a", "webhook_url": "ftp://x"}, "webhook_url"),
        ({"idea": "a", "text_model": "x"}, "text_model"),
        ({"idea": "a", "prompt": "b"}, "prompt"),
    ],
)
def test_bad_films_write_nothing(service: Any, fields: dict[str, Any], param: str) -> None:
    before = service.contents()
    answer = service.http.post("/v1/films", json=fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert answer.json()["rule"]
    assert service.contents() == before
