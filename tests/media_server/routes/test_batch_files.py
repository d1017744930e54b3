"""Files of batches, and batches as files: what is refused, how long they are kept, and pages of them."""

from typing import Any

import pytest

from media_server.jobs.tables import batches, files
from media_server.limits import KeyLimits
from tests.media_server.routes.batching import batch_worker, ended, get, key_of, line, records, start, upload
from workers.sweeper import sweep_once


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "25"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
        ({"wings": 2}, "wings"),
    ],
)
def test_what_a_batch_may_not_be(service: Any, fields: dict[str, Any], param: str) -> None:
    file_id = upload(service, line("a"))
    body = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h", **fields}
    before = service.contents()
    answer = service.http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["param"]) == (400, param)
    assert service.contents() == before


def test_what_a_file_may_not_be(service: Any) -> None:
    before = service.contents()
    for data, files_, status, param in (
        ({"purpose": "vision"}, {"file": ("a", b"x")}, 400, "purpose"),
        ({"purpose": "batch"}, {"other": ("a", b"x")}, 400, "file"),
        ({"purpose": "batch", "file": "text"}, None, 400, "file"),
        ({"purpose": "batch"}, {"file": ("n" * 256, b"x")}, 400, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, {"file": ("a", b"x")}, 400, "expires_after.anchor"),
        ({"purpose": "batch"}, {"file": ("a", b"x" * (5 << 20))}, 413, None),
    ):
        answer = service.http.post("/v1/files", data=data, files=files_)
        assert (answer.status_code, answer.json().get("param")) == (status, param), answer.text
    assert service.contents() == before
    _, poor = key_of(service, "poor", limits=KeyLimits(storage_bytes=10))
    before = service.contents()
    answer = service.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * 11)}, headers=poor)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "storage_quota")
    # only the tally that a quota is held to may have been touched
    assert service.contents()[1] == before[1]


def test_a_name_is_only_shown_and_a_file_expires(service: Any) -> None:
    answer = service.http.post(
        "/v1/files",
        data={"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
        files={"file": ("../../etc/passwd", b"{}")},
    ).json()
    assert answer["filename"] == ".._.._etc_passwd" and answer["expires_at"] - answer["created_at"] == 3600
    assert service.contents()[1] >= {f"{answer['id']}/content.jsonl"}
    sweep_once(service.settings, service.db, service.artifacts)
    assert service.http.get(f"/v1/files/{answer['id']}").status_code == 200
    with service.db.write() as tx:
        tx.conn.execute(files.update().values(expires_at=tx.now() - 1))
    sweep_once(service.settings, service.db, service.artifacts)
    assert service.http.get(f"/v1/files/{answer['id']}").status_code == 404
    sweep_once(service.settings, service.db, service.artifacts)
    assert not any(answer["id"] in path for path in service.contents()[1])


def test_an_old_batch_goes_and_its_files_by_their_own_time(working: Any) -> None:
    batch_id = start(working, line("a"))
    with batch_worker(working):
        batch = ended(working, batch_id)
    sweep_once(working.settings, working.db, working.artifacts)
    assert get(working, batch_id) == batch
    with working.db.write() as tx:
        tx.conn.execute(batches.update().values(ended_at=tx.now() - 31 * 86400))
    sweep_once(working.settings, working.db, working.artifacts)
    assert working.http.get(f"/v1/batches/{batch_id}").status_code == 404
    assert records(working, batch["output_file_id"])


def test_the_same_request_makes_one_file_and_one_batch(service: Any) -> None:
    headers = {"idempotency-key": "k1"}
    first = upload(service, line("a"), headers=headers)
    assert upload(service, line("a"), headers=headers) == first
    body = {"input_file_id": first, "endpoint": "/v1/videos", "completion_window": "24h"}
    again = [service.http.post("/v1/batches", json=body, headers={"idempotency-key": "k2"}) for _ in range(2)]
    assert again[0].json() == again[1].json() and again[1].headers["idempotent-replayed"] == "true"
    other = service.http.post("/v1/batches", json={**body, "metadata": {"a": "b"}}, headers={"idempotency-key": "k2"})
    assert other.status_code == 422
    assert len(service.http.get("/v1/batches").json()["data"]) == 1


def test_pages_of_batches_and_files(service: Any) -> None:
    made = [start(service, line("a")) for _ in range(3)][::-1]
    for path, ids in (
        ("/v1/batches", made),
        ("/v1/files", [get(service, batch_id)["input_file_id"] for batch_id in made]),
    ):
        page = service.http.get(path, params={"limit": 2}).json()
        assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:2], True)
        rest = service.http.get(path, params={"limit": 2, "after": page["last_id"]}).json()
        assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2:], False)
        assert service.http.get(path, params={"after": "nobody"}).status_code == 400
    oldest = service.http.get("/v1/files", params={"order": "asc", "limit": 1}).json()["data"]
    assert [item["id"] for item in oldest] == [get(service, made[-1])["input_file_id"]]
