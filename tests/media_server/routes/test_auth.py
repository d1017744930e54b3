"""Keys over HTTP: none, a wrong one, one whose scopes do not reach; and that another's things do not exist.

Both are asked of every operation of the OpenAPI document, so that a route that is added is asked too.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from media_server.keys import Scope, create_key, revoke_key
from media_server.settings import Settings

OPEN = {"/health/live", "/health/ready"}
# refuse whatever they are asked
REFUSING = {"/v1/videos/edits", "/v1/videos/characters", "/v1/videos/characters/{character_id}"}
FILM = {"idea": "a ball", "seconds": 2, "shots": 1}


@pytest.fixture
def operations(service: Any) -> list[tuple[str, str]]:
    """Every method and path of the API that takes a key."""
    paths = service.http.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods if path not in OPEN]
    assert len(found) > 25
    return found


def _key(service: Any, name: str, *scopes: Scope) -> dict[str, str]:
    _, text = create_key(service.db, name, scopes=scopes or ("submit", "read"))
    return {"authorization": f"Bearer {text}"}


def _sample(path: str) -> str:
    """Fill in ids that nothing has."""
    while "{" in path:
        path = path[: path.index("{")] + "video_none" + path[path.index("}") + 1 :]
    return path


def test_without_any_key_loopback_is_open(service: Any) -> None:
    assert service.http.get("/v1/videos").status_code == 200
    # clients that must send something send anything
    assert service.http.get("/v1/videos", headers={"authorization": "Bearer unused"}).status_code == 200


def test_once_a_key_was_made_every_operation_needs_one(service: Any, operations: list[tuple[str, str]]) -> None:
    key, text = create_key(service.db, "studio")
    before = service.contents()
    for method, path in operations:
        for headers in ({}, {"authorization": "Bearer unused"}, {"authorization": f"Basic {text}"}):
            answer = service.http.request(method, _sample(path), headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["error"]["type"] == "authentication_error"
            assert text not in answer.text
    assert service.contents() == before
    assert all(service.http.get(path).status_code in (200, 503) for path in OPEN)
    headers = {"authorization": f"bearer {text}"}
    assert service.http.get("/v1/videos", headers=headers).status_code == 200
    # it takes effect at once, and the service does not fall open
    revoke_key(service.db, key.id)
    assert service.http.get("/v1/videos", headers=headers).status_code == 401
    assert service.http.get("/v1/videos").status_code == 401


def test_scopes_reach_so_far_and_no_further(service: Any, operations: list[tuple[str, str]]) -> None:
    reader, maker, admin = _key(service, "r", "read"), _key(service, "s", "submit"), _key(service, "a", "admin")
    for method, path in operations:
        # keys are the affair of admin alone
        is_safe, is_open = method == "GET", not path.startswith("/v1/keys")
        for headers, may in ((reader, is_safe and is_open), (maker, not is_safe and is_open), (admin, True)):
            answer = service.http.request(method, _sample(path), headers=headers)
            code = answer.json()["error"]["code"] if answer.status_code == 403 else None
            assert (code != "out_of_scope") == may, (method, path, answer.text)
            # no broker listens here
            assert answer.status_code < 500 or path.startswith("/v1/chat/"), (method, path, answer.text)


def test_another_s_things_do_not_exist(service: Any, operations: list[tuple[str, str]]) -> None:
    """Each operation on an id answers a stranger as it answers for an id that nothing has."""
    mine, stranger, admin = _key(service, "mine"), _key(service, "stranger"), _key(service, "admin", "admin")
    service.http.headers.update(mine)
    video = service.completed_video()
    film = service.http.post("/v1/films", json=FILM).json()
    service.worker.run_all()
    film = service.http.get(f"/v1/films/{film['id']}").json()
    assert film["status"] == "completed"
    board = next(child for child in film["children"] if child["kind"] == "storyboard")
    ids = {"video_id": video["id"], "film_id": film["id"], "job_id": film["id"], "storyboard_id": board["id"]}
    mine_only = [(method, path) for method, path in operations if path.startswith(OWNED) and "{" in path]
    assert len(mine_only) > 15
    before = service.contents()
    for method, path in mine_only:
        if path in REFUSING:
            continue
        url = path.format(**ids)
        refused = service.http.request(
            method, url, headers=stranger, json={"prompt": "x"} if method == "POST" else None
        )
        assert refused.status_code == 404, (method, url, refused.text)
        none = service.http.request(
            method, path.format(**dict.fromkeys(ids, "video_none")), headers=stranger,
            json={"prompt": "x"} if method == "POST" else None,
        )  # fmt: skip
        assert (none.status_code, none.json()["error"]["code"]) == (404, refused.json()["error"]["code"]), url
        assert none.json()["detail"].replace("video_none", "") == refused.json()["detail"].replace(
            url.split("/")[3], ""
        ), url
    assert service.contents() == before
    for path in ("/v1/videos", "/v1/films", "/v1/storyboards", "/v1/jobs"):
        assert service.http.get(path, headers=stranger).json()["data"] == []
        assert service.http.get(path).json()["data"]
        # an admin's list is everybody's
        assert service.http.get(path, headers=admin).json()["data"] == service.http.get(path).json()["data"]
        # another's id is no place in a list either
        cursor = service.http.get(path, params={"after": video["id"]}, headers=stranger)
        assert (cursor.status_code, cursor.json()["param"]) == (400, "after")
        assert cursor.json() == {
            **service.http.get(path, params={"after": "video_none"}, headers=stranger).json(),
            **{name: cursor.json()[name] for name in ("error", "detail", "value")},
        }
    assert service.http.get("/v1/jobs", params={"parent_id": film["id"]}, headers=stranger).json()["data"] == []
    reference = {"prompt": "x", "input_reference": {"file_id": video["id"]}}
    assert service.http.post("/v1/videos", json=reference, headers=stranger).status_code == 404
    extension = {"prompt": "x", "seconds": "1", "video": {"id": video["id"]}}
    assert service.http.post("/v1/videos/extensions", json=extension, headers=stranger).status_code == 404
    assert service.contents() == before
    assert service.http.get(f"/v1/videos/{video['id']}", headers=admin).json()["id"] == video["id"]
    assert service.http.delete(f"/v1/videos/{video['id']}", headers=admin).status_code == 200


def test_what_was_made_before_the_first_key_is_the_admins(service: Any) -> None:
    video = service.completed_video()
    headers, admin = _key(service, "studio"), _key(service, "admin", "admin")
    assert service.http.get(f"/v1/videos/{video['id']}", headers=headers).status_code == 404
    assert service.http.get(f"/v1/videos/{video['id']}", headers=admin).status_code == 200


OWNED = ("/v1/videos/", "/v1/films/", "/v1/jobs/", "/v1/storyboards/")


class TestOnAnotherAddress:
    """A service that listens to other machines takes nothing without a key, however it was started."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Iterator[Settings]:
        yield settings.model_copy(update={"host": "0.0.0.0"})

    def test_no_request_is_taken_without_a_key(self, service: Any) -> None:
        assert service.http.get("/v1/videos").status_code == 401
        assert service.http.post("/v1/videos", json={"prompt": "x"}).status_code == 401
        headers = _key(service, "studio")
        assert service.http.post("/v1/videos", json={"prompt": "x"}, headers=headers).status_code == 200


def test_the_document_names_the_key(service: Any) -> None:
    document = service.http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert ("401" in operation["responses"]) == (path not in OPEN), (method, path)
            assert ("security" in operation) == (path not in OPEN), (method, path)
