"""Zero data retention by a key: its jobs keep no words, those of others do."""

import json
from typing import Any

import sqlalchemy as sa

from media_server.jobs import store
from media_server.jobs.tables import idempotency_keys
from media_server.keys import create_key
from media_server.limits import KeyLimits

CANARY = "canary-7f3a91"


def _key(service: Any, name: str, **limits: Any) -> dict[str, str]:
    _, text = create_key(service.db, name, limits=KeyLimits(**limits))
    return {"authorization": f"Bearer {text}"}


def test_a_key_s_jobs_keep_no_words(service: Any) -> None:
    silent, plain = _key(service, "silent", zero_retention=True), _key(service, "plain")
    for headers, keeps in ((silent, False), (plain, True)):
        made = {
            path: service.http.post(f"/v1/{path}", json=body, headers=headers).json()["id"]
            for path, body in {
                "videos": {"prompt": CANARY},
                "films": {"idea": CANARY, "seconds": 2, "shots": 1},
                "storyboards": {"idea": CANARY, "seconds": 2},
            }.items()
        }
        service.worker.run_all()
        for path, id in made.items():
            job = store.get(service.db, id)
            assert job.status == "completed" and (job.answer_s is None) is keeps, path
            shown = service.http.get(f"/v1/{path}/{id}", headers=headers).json()
            assert (CANARY in json.dumps(shown)) is keeps, (path, shown)
        # the shots of a film are as the film is
        children = store.list_jobs(service.db, parent_id=made["films"]).data
        assert {(child.answer_s is None, bool(child.prompts)) for child in children if child.kind == "video"} == {
            (keeps, keeps)
        }


def test_a_kept_answer_has_no_words(service: Any) -> None:
    headers = {**_key(service, "silent", zero_retention=True), "idempotency-key": "one"}
    body = {"prompt": CANARY}
    first = service.http.post("/v1/videos", json=body, headers=headers)
    with service.db.read() as tx:
        row = tx.conn.execute(sa.select(idempotency_keys)).one()
    assert row.response is None and row.made_id == first.json()["id"]
    # while the job waits its prompt is its own, and the same request finds the same job
    again = service.http.post("/v1/videos", json=body, headers=headers)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    assert (again.json()["id"], again.json()["prompt"]) == (first.json()["id"], CANARY)
    service.worker.run_all()
    again = service.http.post("/v1/videos", json=body, headers=headers)
    assert (again.json()["id"], again.json()["prompt"]) == (first.json()["id"], None)
    other = service.http.post("/v1/videos", json={"prompt": "another"}, headers=headers)
    assert other.status_code == 422


def test_it_is_no_quota(service: Any) -> None:
    headers = _key(service, "silent", zero_retention=True)
    answer = service.http.post("/v1/videos", json={"prompt": "a"}, headers=headers)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_batches_are_refused(service: Any) -> None:
    silent, plain = _key(service, "silent", zero_retention=True), _key(service, "plain")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/videos", "body": {"prompt": CANARY}}
    upload: dict[str, Any] = {"files": {"file": ("lines.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    before = service.contents()
    answer = service.http.post("/v1/files", headers=silent, **upload)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "zero_retention")
    assert service.contents() == before
    kept = service.http.post("/v1/files", headers=plain, **upload).json()["id"]
    body = {"input_file_id": kept, "endpoint": "/v1/videos", "completion_window": "24h"}
    answer = service.http.post("/v1/batches", json=body, headers=silent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "zero_retention")
    assert service.http.post("/v1/batches", json=body, headers=plain).status_code == 200
