"""Messages to receivers: written with the end of a job, each taken by one worker at a time."""

import json
from functools import partial

import pytest
import sqlalchemy as sa

from media_server.errors import JobError
from media_server.jobs import claims, outbox, store
from media_server.jobs.database import Database
from media_server.jobs.spec import JobSpec, Result
from media_server.jobs.tables import deliveries, webhook_endpoints
from media_server.jobs.tables import outbox as outbox_table


def _endpoint(db: Database, id: str, owner: str | None = None, **members: object) -> None:
    values = {
        "id": id,
        "owner_key_id": owner,
        "name": id,
        "url": f"https://{id}.example.org",
        "event_types": ["video.completed"],
        "secret": f"whsec_{id}",
        "old_secrets": [],
        "is_enabled": True,
        "created_at": 0.0,
        "updated_at": 0.0,
    }
    with db.write() as tx:
        tx.conn.execute(webhook_endpoints.insert().values(**{**values, **members}))


def _run(db: Database, owner: str | None = None, webhook_url: str | None = None, fail: bool = False) -> str:
    job = store.submit(
        db, JobSpec(kind="video", pool="video", owner_key_id=owner, webhook_url=webhook_url, max_attempts=1)
    )
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    if fail:
        claims.fail(db, claim, JobError("model_error", "NaN"))
    else:
        claims.complete(db, claim, Result())
    return job.id


def _receivers(db: Database) -> list[tuple[str, str | None, str | None]]:
    query = sa.select(outbox_table.c.type, outbox_table.c.endpoint_id, outbox_table.c.url)
    with db.read() as tx:
        return [(row.type, row.endpoint_id, row.url) for row in tx.conn.execute(query)]


def test_who_is_told(db: Database, rings: list[str]) -> None:
    _endpoint(db, "mine")
    _endpoint(db, "everything", event_types=["*"])
    _endpoint(db, "failures", event_types=["video.failed"])
    _endpoint(db, "disabled", is_enabled=False)
    _endpoint(db, "others", owner="key_b")
    _run(db, webhook_url="https://one.example.org")
    told: set[tuple[str, str | None, str | None]] = {("video.completed", None, "https://one.example.org")}
    told |= {("video.completed", id, None) for id in ("mine", "everything")}
    assert set(_receivers(db)) == told
    assert rings == ["video", "deliveries"]
    _run(db, fail=True)
    assert set(_receivers(db)) - told == {("video.failed", id, None) for id in ("failures", "everything")}
    _run(db, owner="key_b")
    assert ("video.completed", "others", None) in _receivers(db)
    assert len(_receivers(db)) == 6


def test_a_message_says_what_openai_says(db: Database) -> None:
    job_id = _run(db, webhook_url="https://one.example.org")
    (message,) = outbox.claim_due(db, "d1", lease_s=60.0)
    body = json.loads(message.payload)
    assert (body.pop("id"), type(body.pop("created_at"))) == (message.id, int)
    assert body == {"object": "event", "type": "video.completed", "data": {"id": job_id}}
    assert (message.url, message.secrets, message.attempts) == ("https://one.example.org", [], 0)
    assert message.id.startswith("evt_")


def test_a_message_is_taken_once_and_tried_until_it_is_settled(db: Database) -> None:
    _endpoint(db, "mine", old_secrets=[["whsec_old", 4e9], ["whsec_older", 1.0]])
    _run(db)
    (message,) = outbox.claim_due(db, "d1", lease_s=60.0)
    assert message.secrets == ["whsec_mine", "whsec_old"]
    assert outbox.claim_due(db, "d2", lease_s=60.0) == []
    settle = partial(outbox.settle, db, started_at=1.0, duration_s=0.5)
    assert not settle(message, "d2"), "another worker's"
    assert settle(message, "d1", status_code=503, error="503", retry_in_s=0.0)
    (again,) = outbox.claim_due(db, "d2", lease_s=60.0)
    assert (again.id, again.payload, again.attempts) == (message.id, message.payload, 1)
    assert settle(again, "d2", status_code=200)
    assert outbox.claim_due(db, "d1", lease_s=60.0) == []
    with db.read() as tx:
        query = sa.select(deliveries.c.number, deliveries.c.status_code).order_by(deliveries.c.number)
        assert [tuple(row) for row in tx.conn.execute(query)] == [(1, 503), (2, 200)]
        assert tx.conn.scalar(sa.select(outbox_table.c.state)) == "delivered"


@pytest.mark.parametrize(("retry_in_s", "state"), [(3600.0, "pending"), (None, "dead")])
def test_a_failed_try_waits_or_is_given_up(db: Database, retry_in_s: float | None, state: str) -> None:
    _run(db, webhook_url="https://one.example.org")
    (message,) = outbox.claim_due(db, "d1", lease_s=60.0)
    outbox.settle(db, message, "d1", started_at=0.0, duration_s=0.0, error="refused", retry_in_s=retry_in_s)
    assert outbox.claim_due(db, "d1", lease_s=60.0) == []
    with db.read() as tx:
        assert tx.conn.scalar(sa.select(outbox_table.c.state)) == state


def test_a_dead_takers_message_is_taken_again(db: Database) -> None:
    _run(db, webhook_url="https://one.example.org")
    (first,) = outbox.claim_due(db, "d1", lease_s=0.0)
    (second,) = outbox.claim_due(db, "d2", lease_s=60.0)
    assert first.id == second.id
    assert not outbox.settle(db, first, "d1", started_at=0.0, duration_s=0.0)
    assert outbox.settle(db, second, "d2", started_at=0.0, duration_s=0.0)


@pytest.mark.parametrize(
    ("url", "receiver"),
    [
        ("https://Hooks.example.org/a?token=1", "https://hooks.example.org:443"),
        ("http://hooks.example.org/b", "http://hooks.example.org:80"),
        ("https://hooks.example.org:8443/c", "https://hooks.example.org:8443"),
        ("https://[2001:DB8::1]/d", "https://2001:db8::1:443"),
        ("https://b\u00fccher.example/e", "https://xn--bcher-kva.example:443"),
        # what no name may be keeps no job from ending
        ("https://[broken", "https://[broken"),
        ("https://hooks.example.org:99999/", "https://hooks.example.org:99999/"),
    ],
)
def test_a_receiver_is_scheme_host_and_port(url: str, receiver: str) -> None:
    assert outbox.receiver_of(url, None) == receiver
    assert outbox.receiver_of(url, "key_1") == f"key_1 {receiver}"
