"""What has expired is deleted, and the rows of what was deleted go for good, family by family; the ledger stays."""

from typing import Any

import pytest
import sqlalchemy as sa

from media_server.errors import NotFound
from media_server.films import FilmRequest, submit_film
from media_server.jobs import claims, ledger, outbox, store
from media_server.jobs.database import Database
from media_server.jobs.retention import delete_expired, forget_days, purge
from media_server.jobs.spec import ArtifactRecord, Claim, JobSpec, Result
from media_server.jobs.tables import jobs, metadata, tallies, usage
from media_server.models.card import VideoCard
from media_server.models.registry import publish

BOARD = {"v": 1, "title": "A", "shots": [{"index": 0, "prompt": "a red ball", "num_frames": 32}]}
# what is no job's: whose turn it is, what was used, what is loaded; files without an owner wait for the sweeper
OTHERS = {"counters", "turns", "usage", "tallies", "models", "garbage", "api_keys"}


def _claim(db: Database, pool: str = "video") -> Claim:
    claim = claims.claim_next(db, pool, "w", 20.0)
    assert claim is not None
    return claim


def _clip(db: Database, **members: Any) -> str:
    spec = JobSpec(kind="video", pool="video", prompts={"prompt": "x"}, owner_key_id="key_a", **members)
    job_id = store.submit(db, spec).id
    claim = _claim(db)
    claims.save_checkpoint(db, claim, 0, f"{job_id}/segments/0", {})
    assert claims.complete(db, claim, Result([ArtifactRecord("video", "k", "video/mp4", 5, "00")], {}, 1.5))
    return job_id


def _rows(db: Database) -> dict[str, int]:
    with db.read() as tx:
        counts = {
            table.name: tx.conn.scalar(sa.select(sa.func.count()).select_from(table))
            for table in metadata.sorted_tables
        }
    return {name: count for name, count in counts.items() if count}


def test_jobs_past_their_time_are_deleted_and_their_rows_go_later(db: Database) -> None:
    kept, expiring = _clip(db), _clip(db, retention_s=100.0)
    assert delete_expired(db) == []
    with db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == expiring).values(expires_at=tx.now() - 1))
    assert delete_expired(db) == [expiring]
    assert delete_expired(db) == []
    with pytest.raises(NotFound):
        store.get(db, expiring)
    assert f"{expiring}/" in store.due_garbage(db)
    assert purge(db, keep_s=100.0) == []
    assert purge(db, keep_s=0.0) == [expiring]
    assert purge(db, keep_s=0.0) == []
    assert store.get(db, kept).prompts == {"prompt": "x"}
    store.delete(db, kept)
    assert purge(db, keep_s=0.0) == [kept]
    assert set(_rows(db)) <= OTHERS
    with db.read() as tx:
        spent = sa.select(sa.func.sum(usage.c.amount)).where(usage.c.kind == "gpu_seconds")
        assert tx.conn.scalar(spent) == 3.0


def test_a_family_goes_whole_and_only_when_all_have_ended(db: Database, card: VideoCard) -> None:
    publish(db, card, "w")
    film = submit_film(db, FilmRequest(idea="a ball", seconds=2, shots=1), card)
    assert claims.complete(db, _claim(db, "text"), Result(result={"storyboard": BOARD}))
    running = _claim(db)
    store.delete(db, film.id)
    assert purge(db, keep_s=0.0) == []
    assert claims.confirm_cancel(db, running)
    assert purge(db, keep_s=0.0) == [film.id]
    assert set(_rows(db)) <= OTHERS


def test_a_shot_that_was_deleted_alone_stays_with_its_film(db: Database, card: VideoCard) -> None:
    publish(db, card, "w")
    film = submit_film(db, FilmRequest(idea="a ball", seconds=2, shots=1), card)
    assert claims.complete(db, _claim(db, "text"), Result(result={"storyboard": BOARD}))
    shot = _claim(db)
    assert claims.complete(db, shot, Result([ArtifactRecord("video", "k", "video/mp4", 5, "00")]))
    assert claims.complete(db, _claim(db, "media"), Result())
    store.delete(db, shot.job.id)
    assert purge(db, keep_s=0.0) == []
    store.delete(db, film.id)
    assert purge(db, keep_s=0.0) == [film.id]


def test_a_message_on_its_way_is_waited_for(db: Database) -> None:
    job_id = _clip(db, webhook_url="https://hooks.example.org/x")
    store.delete(db, job_id)
    assert purge(db, keep_s=0.0) == []
    (message,) = outbox.claim_due(db, "d", lease_s=20.0)
    assert purge(db, keep_s=0.0) == []
    assert outbox.settle(db, message, "d", started_at=0.0, duration_s=0.1, status_code=200)
    assert purge(db, keep_s=0.0) == [job_id]
    assert set(_rows(db)) <= OTHERS


def test_days_that_are_over_are_forgotten(db: Database) -> None:
    with db.write() as tx:
        ledger.count_work(tx, "key_a", 5.0)
        tx.conn.execute(
            tallies.insert().values(owner_key_id="key_b", label="", kind="work", period="2020-01-01", amount=1)
        )
        tx.conn.execute(
            tallies.insert().values(owner_key_id="key_b", label="", kind="tokens", period="2020-01", amount=1)
        )
    forget_days(db)
    forget_days(db)
    with db.read() as tx:
        assert sorted(tx.conn.scalars(sa.select(tallies.c.kind))) == ["tokens", "work"]
