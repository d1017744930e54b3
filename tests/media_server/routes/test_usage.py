"""/v1/usage: sums of the ledger as objects and as CSV, each key's own, the admins' of all."""

import csv
import io
from typing import Any

import pytest

from media_server.jobs import ledger
from media_server.jobs.spec import UsageRecord
from media_server.keys import create_key

GROUPS = ("key", "film", "shot", "label", "model", "job")


@pytest.fixture
def keys(service: Any) -> dict[str, dict[str, str]]:
    """Two keys that have made a film of two shots and a clip, and an admin's."""
    found = {}
    for name in ("a", "b", "admin"):
        key, text = create_key(service.db, name, scopes=["admin"] if name == "admin" else ["submit", "read"])
        found[name] = {"id": key.id, "authorization": f"Bearer {text}"}
    for name, label in (("a", "=spot"), ("b", "other")):
        headers = {"authorization": found[name]["authorization"]}
        service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 2, "label": label}, headers=headers)
        service.worker.run_all()
    service.http.post("/v1/videos", json={"prompt": "a ball"}, headers={"authorization": found["a"]["authorization"]})
    service.worker.run_all()
    ledger.enter_text(
        service.db, found["a"]["id"], None, "smollm2", "chatcmpl_1",
        [UsageRecord("prompt_tokens", 12), UsageRecord("completion_tokens", 30)],
    )  # fmt: skip
    return found


def _report(service: Any, key: dict[str, str], **params: Any) -> list[dict[str, Any]]:
    answer = service.http.get("/v1/usage", params=params, headers={"authorization": key["authorization"]})
    assert answer.status_code == 200, answer.text
    lines: list[dict[str, Any]] = answer.json()["data"]
    return lines


def test_usage_by_key_film_shot_and_label(service: Any, keys: dict[str, dict[str, str]]) -> None:
    (mine,) = _report(service, keys["a"])
    # storyboard, two shots, joining, a clip: half a second each, by the scripted worker
    assert (mine["key_id"], mine["key_name"], mine["gpu_seconds"]) == (keys["a"]["id"], "a", 2.5)
    assert (mine["prompt_tokens"], mine["completion_tokens"]) == (12, 30)
    files = sum(path.stat().st_size for path in service.artifacts.root.rglob("*") if path.is_file())
    both = _report(service, keys["admin"])
    assert [line["key_name"] for line in both] == ["a", "b"]
    assert sum(line["storage_bytes"] for line in both) == files
    shots = _report(service, keys["a"], group_by=["film", "shot"], label="=spot")
    film_id = shots[0]["film_id"]
    assert film_id.startswith("film_")
    # the film's other jobs make no shot: storyboard and joining
    assert [(line["film_id"], line["shot"], line["gpu_seconds"]) for line in shots] == [
        (film_id, None, 1.0),
        (film_id, 0, 0.5),
        (film_id, 1, 0.5),
    ]
    labels = _report(service, keys["admin"], group_by="label")
    assert [(line["label"], line["gpu_seconds"]) for line in labels] == [(None, 0.5), ("=spot", 2.0), ("other", 2.0)]
    assert len(_report(service, keys["a"], group_by="job", film_id=film_id)) == 4
    models = {line["model"]: line["gpu_seconds"] for line in _report(service, keys["a"], group_by="model")}
    assert models["tiny-wan"] == 1.5 and models["smollm2"] == 0.0


def test_every_grouping_adds_up(service: Any, keys: dict[str, dict[str, str]]) -> None:
    (total,) = _report(service, keys["a"])
    for group in GROUPS:
        lines = _report(service, keys["a"], group_by=group)
        for kind in ("gpu_seconds", "prompt_tokens", "completion_tokens", "storage_bytes"):
            assert sum(line[kind] for line in lines) == pytest.approx(total[kind]), (group, kind)
    pages = [_report(service, keys["a"], group_by="job", limit=2, offset=offset) for offset in (0, 2, 4, 6)]
    assert [len(page) for page in pages] == [2, 2, 2, 0]
    assert [line for page in pages for line in page] == _report(service, keys["a"], group_by="job")


def test_a_deleted_job_s_usage_stays_and_its_storage_goes(service: Any, keys: dict[str, dict[str, str]]) -> None:
    headers = {"authorization": keys["a"]["authorization"]}
    for job in service.http.get("/v1/jobs", headers=headers).json()["data"]:
        if job["parent_id"] is None:
            path = "films" if job["kind"] == "film" else "videos"
            assert service.http.delete(f"/v1/{path}/{job['id']}", headers=headers).status_code == 200
    (after,) = _report(service, keys["a"])
    assert (after["gpu_seconds"], after["storage_bytes"]) == (2.5, 0)
    assert [line["gpu_seconds"] for line in _report(service, keys["a"], group_by="shot")] == [1.5, 0.5, 0.5]


def test_a_period_bounds_what_is_spent_and_dates_what_is_kept(service: Any, keys: dict[str, dict[str, str]]) -> None:
    now = 4e9
    (later,) = _report(service, keys["a"], since=now)
    assert later["gpu_seconds"] == 0.0 and later["storage_bytes"] > 0
    assert _report(service, keys["a"], until=1.0) == []
    answer = service.http.get(
        "/v1/usage", params={"since": 5, "until": 5}, headers={"authorization": keys["a"]["authorization"]}
    )
    assert (answer.status_code, answer.json()["param"]) == (400, "until")


def test_a_key_sees_its_own_alone(service: Any, keys: dict[str, dict[str, str]]) -> None:
    assert _report(service, keys["admin"], key_id=keys["b"]["id"])[0]["key_name"] == "b"
    for path in ("/v1/usage", "/v1/usage/export"):
        answer = service.http.get(
            path, params={"key_id": keys["b"]["id"]}, headers={"authorization": keys["a"]["authorization"]}
        )
        assert (answer.status_code, answer.json()["param"]) == (400, "key_id")
    others = _report(service, keys["b"], group_by="film")[0]["film_id"]
    assert _report(service, keys["a"], film_id=others) == []


def test_csv_has_the_same_figures_and_no_formulas(service: Any, keys: dict[str, dict[str, str]]) -> None:
    params = {"group_by": ["key", "label", "shot"]}
    lines = _report(service, keys["admin"], **params)
    headers = {"authorization": keys["admin"]["authorization"]}
    answer = service.http.get("/v1/usage/export", params=params, headers=headers)
    assert answer.headers["content-type"].startswith("text/csv")
    assert "usage.csv" in answer.headers["content-disposition"]
    read = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [float(line["gpu_seconds"]) for line in read] == [line["gpu_seconds"] for line in lines]
    assert [int(line["storage_bytes"]) for line in read] == [line["storage_bytes"] for line in lines]
    assert {line["label"] for line in read} == {"", "'=spot", "other"}
    assert list(read[0]) == [
        "key_id", "key_name", "label", "shot", "gpu_seconds", "prompt_tokens", "completion_tokens", "storage_bytes",
    ]  # fmt: skip
