"""Batches of several keys: whose they are, what their lines may do and take, and whose turn it is."""

from typing import Any

import sqlalchemy as sa

from media_server.batches import running
from media_server.jobs import claims
from media_server.jobs.tables import files, jobs, tallies
from media_server.keys import revoke_key
from media_server.limits import KeyLimits
from tests.media_server.routes.batching import (
    batch_worker,
    count_jobs,
    done,
    ended,
    get,
    key_of,
    line,
    records,
    start,
    wait_until,
)


def test_a_batch_belongs_to_its_key_and_its_lines_have_its_scopes_and_quotas(working: Any) -> None:
    limits = KeyLimits(queued_jobs=4, work_per_day=40e6)
    key_id, mine = key_of(working, "mine", limits=limits)
    _, other = key_of(working, "other")
    _, admin = key_of(working, "boss", scopes=("admin",))
    _, reader = key_of(working, "reader", scopes=("read",))
    # each takes 8 x 160 x 96 x 33: nine fit into a day, and the tenth alone is more than one
    lines = [line("huge", num_frames=57 * 4, num_inference_steps=50), *(line(f"n{i}") for i in range(3))]
    batch_id = start(working, *lines, headers=mine)
    file_id = get(working, batch_id, mine)["input_file_id"]
    for path in (f"/v1/batches/{batch_id}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert working.http.get(path, headers=other).status_code == 404
        assert working.http.get(path, headers=admin).status_code == 200
        assert working.http.get(path).status_code == 401
    assert working.http.post(f"/v1/batches/{batch_id}/cancel", headers=other).status_code == 404
    assert working.http.delete(f"/v1/files/{file_id}", headers=other).status_code == 404
    stolen = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h"}
    refused = working.http.post("/v1/batches", json=stolen, headers=other)
    assert refused.status_code == 404 and refused.json()["param"] == "input_file_id"
    assert working.http.post("/v1/batches", json=stolen, headers=reader).status_code == 403
    for path in ("/v1/batches", "/v1/files"):
        assert working.http.get(path, headers=other).json()["data"] == []
        assert len(working.http.get(path, headers=admin).json()["data"]) == 1
        after = {"after": batch_id if "batches" in path else file_id}
        assert working.http.get(path, params=after, headers=other).status_code == 400
    # who deletes what is read breaks it
    assert working.http.delete(f"/v1/files/{file_id}", headers=mine).status_code == 409
    with batch_worker(working):
        batch = ended(working, batch_id, mine)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    (huge,) = records(working, batch["error_file_id"], mine)
    assert (huge["custom_id"], huge["response"]["status_code"]) == ("huge", 403)
    assert huge["response"]["body"]["error"]["code"] == "over_work_quota"
    with working.db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.owner_key_id))) == {key_id}
        kept = tx.conn.scalar(sa.select(tallies.c.amount).where(tallies.c.kind == "storage_bytes"))
        stored = tx.conn.execute(sa.select(files.c.size_bytes)).scalars().all()
    assert kept is not None and kept > sum(stored) and len(stored) == 3


def test_a_line_waits_for_a_quota_that_comes_back_and_leaves_room_for_others(service: Any) -> None:
    _, mine = key_of(service, "mine", limits=KeyLimits(queued_jobs=2))
    batch_id = start(service, *(line(f"n{index}") for index in range(3)), headers=mine)
    with batch_worker(service):
        wait_until(lambda: count_jobs(service) == 1)
        # half of what may wait is the batch's: a request that somebody waits for is taken, and goes first
        answer = service.http.post("/v1/videos", json={"prompt": "now"}, headers=mine)
        assert answer.status_code == 200
        claim = service.worker.claim("video")
        assert claim.job.id == answer.json()["id"]
        service.worker.do(claim)
        batch = done(service, batch_id, mine)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


def test_a_revoked_key_ends_its_lines(service: Any) -> None:
    _, mine = key_of(service, "mine")
    _, admin = key_of(service, "boss", scopes=("admin",))
    batch_id = start(service, line("a"), headers=mine)
    revoke_key(service.db, "mine")
    with batch_worker(service):
        batch = ended(service, batch_id, admin)
    (failed,) = records(service, batch["error_file_id"], admin)
    assert failed["response"]["status_code"] == 401 and "revoked" in failed["response"]["body"]["detail"]
    assert count_jobs(service) == 0


def test_one_owner_keeps_no_other_waiting(service: Any) -> None:
    _, mine = key_of(service, "mine")
    _, other = key_of(service, "other")
    many = [start(service, line("a"), headers=mine) for _ in range(6)]
    one = start(service, line("a"), headers=other)
    taken = running.claim(service.db, "w", lease_s=60.0, room=9)
    assert [batch.id for batch in taken] == [*many[: running.MAX_PER_OWNER], one]
    assert running.claim(service.db, "w", lease_s=60.0, room=9) == []
    assert claims.end_leases(service.db, "w") == 5
    assert len(running.claim(service.db, "w2", lease_s=60.0, room=2)) == 2
