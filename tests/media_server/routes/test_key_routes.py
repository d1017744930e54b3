"""/v1/keys: for `admin` alone, the key shown once, and what it changes holds from the next request on."""

from typing import Any

import pytest

from media_server.keys import create_key


@pytest.fixture
def admin(service: Any) -> dict[str, str]:
    _, text = create_key(service.db, "boss", scopes=("admin",))
    return {"authorization": f"Bearer {text}"}


def test_a_key_is_made_used_limited_and_revoked(service: Any, admin: dict[str, str]) -> None:
    http = service.http
    limits = {"queued_jobs": 1, "budgets": [{"kind": "tokens", "amount": 5, "per": "month", "label": "spot"}]}
    answer = http.post("/v1/keys", json={"name": "studio", "limits": limits, "lifetime_s": 3600}, headers=admin)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    made = answer.json()
    text = made.pop("key")
    assert text.startswith(made["prefix"] + "_") and made["scopes"] == ["read", "submit"]
    assert made["limits"]["queued_jobs"] == 1 and made["limits"]["budgets"] == limits["budgets"]
    assert made["expires_at"] - made["created_at"] == 3600 and made["revoked_at"] is None
    mine = {"authorization": f"Bearer {text}"}
    body = {"prompt": "a red ball"}
    assert http.post("/v1/videos", json=body, headers=mine).status_code == 200
    assert http.post("/v1/videos", json=body, headers=mine).status_code == 429
    changed = http.post(f"/v1/keys/{made['id']}", json={"limits": {"queued_jobs": 9}}, headers=admin).json()
    assert changed["limits"]["queued_jobs"] == 9 and changed["limits"]["budgets"] == []
    assert http.post("/v1/videos", json=body, headers=mine).status_code == 200
    revoked = http.post(f"/v1/keys/{made['id']}/revoke", headers=admin).json()
    assert revoked["revoked_at"] is not None and http.get("/v1/videos", headers=mine).status_code == 401
    assert http.post(f"/v1/keys/{made['id']}/revoke", headers=admin).status_code == 404
    assert http.get(f"/v1/keys/{made['id']}", headers=admin).json() == revoked
    listed = http.get("/v1/keys", headers=admin)
    assert [key["name"] for key in listed.json()["data"]] == ["boss", "studio"] and text not in listed.text
    assert "hash" not in listed.text


def test_pages_of_keys(service: Any, admin: dict[str, str]) -> None:
    for name in ("a", "b", "c"):
        assert service.http.post("/v1/keys", json={"name": name}, headers=admin).status_code == 200
    page = service.http.get("/v1/keys", params={"limit": 3}, headers=admin).json()
    assert ([key["name"] for key in page["data"]], page["has_more"]) == (["boss", "a", "b"], True)
    rest = service.http.get("/v1/keys", params={"limit": 3, "after": page["last_id"]}, headers=admin).json()
    assert ([key["name"] for key in rest["data"]], rest["has_more"]) == (["c"], False)
    assert service.http.get("/v1/keys", params={"after": "key_x"}, headers=admin).status_code == 400


def test_no_other_key_reaches_them(service: Any, admin: dict[str, str]) -> None:
    key, text = create_key(service.db, "mine", scopes=("submit", "read"))
    mine = {"authorization": f"Bearer {text}"}
    before = service.contents()[0]["api_keys"]
    for method, path, body in (
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", {"name": "more"}),
        ("GET", f"/v1/keys/{key.id}", None),
        ("POST", f"/v1/keys/{key.id}", {"limits": {}}),
        ("POST", f"/v1/keys/{key.id}/revoke", None),
    ):
        assert service.http.request(method, path, json=body).status_code == 401
        refused = service.http.request(method, path, json=body, headers=mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "out_of_scope")
    assert service.contents()[0]["api_keys"] == before
    assert service.http.get("/v1/videos", headers=mine).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "name"),
        ({"name": ""}, 400, "name"),
        ({"name": "key_1"}, 400, "name"),
        ({"name": "boss"}, 409, "name"),
        ({"name": "n", "scopes": []}, 400, "scopes"),
        ({"name": "n", "scopes": ["root"]}, 400, "scopes.0"),
        ({"name": "n", "lifetime_s": 0}, 400, "lifetime_s"),
        ({"name": "n", "lifetime_s": True}, 400, "lifetime_s"),
        ({"name": "n", "limits": {"queued_jobs": -1}}, 400, "limits.queued_jobs"),
        ({"name": "n", "limits": {"queued_jobs": True}}, 400, "limits.queued_jobs"),
        ({"name": "n", "limits": {"budgets": [{"kind": "tokens", "amount": False}]}}, 400, "limits.budgets.0.amount"),
        ({"name": "n", "limits": {"wings": 2}}, 400, "limits.wings"),
        ({"name": "n", "key": "msk_mine"}, 400, "key"),
    ],
)
def test_what_a_key_may_not_be(
    service: Any, admin: dict[str, str], body: dict[str, Any], status: int, param: str
) -> None:
    answer = service.http.post("/v1/keys", json=body, headers=admin)
    assert (answer.status_code, answer.json()["param"]) == (status, param)
    assert service.contents()[0]["api_keys"] == 1


def test_the_first_key_closes_the_service_and_can_open_it(service: Any) -> None:
    refused = service.http.post("/v1/keys", json={"name": "mine"})
    assert (refused.status_code, refused.json()["param"]) == (400, "scopes")
    assert service.http.get("/v1/keys").json()["data"] == []
    made = service.http.post("/v1/keys", json={"name": "boss", "scopes": ["admin"]})
    assert made.status_code == 200 and service.http.get("/v1/keys").status_code == 401
    boss = {"authorization": f"Bearer {made.json()['key']}"}
    assert service.http.post("/v1/keys", json={"name": "mine"}, headers=boss).status_code == 200


def test_words_stay_forgotten_when_limits_change(service: Any, admin: dict[str, str]) -> None:
    made = service.http.post(
        "/v1/keys", json={"name": "silent", "limits": {"zero_retention": True}}, headers=admin
    ).json()
    path = f"/v1/keys/{made['id']}"
    changed = service.http.post(path, json={"limits": {"queued_jobs": 3}}, headers=admin).json()
    assert (changed["limits"]["queued_jobs"], changed["limits"]["zero_retention"]) == (3, True)
    changed = service.http.post(path, json={"limits": {"zero_retention": False}}, headers=admin).json()
    assert (changed["limits"]["queued_jobs"], changed["limits"]["zero_retention"]) == (None, False)
