"""What receivers are told of batches: one message an endpoint that wants it, written with the batch's end."""

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import openai
import pytest
from openai.types.webhooks import UnwrapWebhookEvent
from standardwebhooks import Webhook

from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.batches import outputs, running, store
from media_server.batches.store import BatchRow
from media_server.jobs import outbox
from media_server.jobs.database import Database
from media_server.jobs.tables import batches, webhook_endpoints
from media_server.webhooks import log
from tests.media_server.batches.test_running import make, take

SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    return open_artifacts(str(tmp_path / "artifacts"))


def subscribe(db: Database, id: str, event_types: list[str], owner: str | None = None) -> None:
    with db.write() as tx:
        tx.conn.execute(
            webhook_endpoints.insert().values(
                id=id,
                owner_key_id=owner,
                name=id,
                url=f"https://{id}.example.org",
                event_types=event_types,
                secret=SECRET,
                old_secrets=[],
                is_enabled=True,
                created_at=0.0,
                updated_at=0.0,
            )
        )


def told(db: Database) -> list[tuple[str, str | None, str | None]]:
    return [(message.type, message.endpoint_id, message.batch_id) for message in outbox.claim_due(db, "d", lease_s=9)]


def finish(db: Database, artifacts: ArtifactStore, batch: BatchRow) -> BatchRow:
    running.end_unsent(db, batch.id, "w", "code", "why")
    return outputs.finish(db, artifacts, batch.id, "w", keep_s=100.0)


@pytest.mark.parametrize("ending", ["completed", "expired", "cancelled"])
def test_who_is_told_of_an_end(db: Database, artifacts: ArtifactStore, rings: list[str], ending: str) -> None:
    subscribe(db, "this", [f"batch.{ending}"])
    subscribe(db, "everything", ["*"])
    subscribe(db, "failures", ["batch.failed", "video.completed"])
    subscribe(db, "others", ["*"], owner="key_b")
    batch = take(db, make(db, artifacts), "w")
    with db.write() as tx:
        tx.conn.execute(batches.update().values(ending=ending))
    assert told(db) == []
    assert finish(db, artifacts, batch).status == ending
    assert "deliveries" in rings
    assert sorted(told(db)) == [(f"batch.{ending}", id, batch.id) for id in ("everything", "this")]


def test_a_batch_whose_file_cannot_be_run(db: Database, artifacts: ArtifactStore) -> None:
    subscribe(db, "failures", ["batch.failed"])
    batch = make(db, artifacts)
    running.claim(db, "w", lease_s=60.0, room=1)
    running.fail(db, batch.id, "w", [{"code": "empty_file", "message": "no line", "line": None, "param": None}])
    with pytest.raises(running.BatchLost):
        running.fail(db, batch.id, "w", [])
    assert told(db) == [("batch.failed", "failures", batch.id)]


def test_a_worker_that_lost_the_batch_tells_nobody(db: Database, artifacts: ArtifactStore) -> None:
    subscribe(db, "everything", ["*"])
    batch = take(db, make(db, artifacts), "w")
    with db.write() as tx:
        tx.conn.execute(batches.update().values(lease_owner="other"))
    with pytest.raises(running.BatchLost):
        outputs.finish(db, artifacts, batch.id, "w", keep_s=1.0)
    assert told(db) == []


def test_the_message_is_openais_and_outlives_the_batch(db: Database, artifacts: ArtifactStore) -> None:
    subscribe(db, "everything", ["*"])
    batch = take(db, make(db, artifacts), "w")
    finish(db, artifacts, batch)
    with db.write() as tx:
        tx.conn.execute(batches.update().values(ended_at=0.0))
    assert store.delete_expired(db, keep_s=1.0) == [batch.id]
    (message,) = outbox.claim_due(db, "d", lease_s=60.0)
    when = datetime.now(UTC)
    headers = {
        "webhook-id": message.id,
        "webhook-timestamp": str(int(when.timestamp())),
        "webhook-signature": Webhook(SECRET).sign(message.id, when, message.payload),
    }
    event = openai.OpenAI(api_key="x").webhooks.unwrap(message.payload, headers, secret=SECRET)
    assert event.type == "batch.completed" and event.data.id == batch.id and event.id == message.id
    assert outbox.settle(db, message, "d", started_at=1.0, duration_s=0.5, status_code=200)
    (delivery,), _ = log.list_deliveries(db, None, batch_id=batch.id)
    assert (delivery.job_id, delivery.batch_id, delivery.state) == (None, batch.id, "delivered")
    assert log.list_deliveries(db, None, batch_id="batch_other")[0] == []


def test_the_events_are_those_that_the_openai_package_knows() -> None:
    known: set[str] = set()
    for event in get_args(get_args(UnwrapWebhookEvent)[0]):
        known |= set(get_args(event.model_fields["type"].annotation))
    assert {f"batch.{status}" for status in store.ENDED} == {type for type in known if type.startswith("batch.")}
