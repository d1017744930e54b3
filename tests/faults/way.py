"""The way of jobs from their acceptance to their deletion in one process, which dies where it is told to.

Everything is the service's own: application, worker with a stand-in for its GPU program, courier, sweeper. A caller
sends each request under an Idempotency-Key, so that walking the way again after a death is what a caller and a
restarted service would do. Each part of it takes one of the ways on which a job may end.
"""

import asyncio
import base64
import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from PIL import Image

from media_server import crash_points
from media_server.app import create_app
from media_server.artifacts.store import open_artifacts
from media_server.certificates import certificates
from media_server.jobs import claims, idempotency, store, transitions
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.doorbell import make_celery
from media_server.jobs.queue import claim_next
from media_server.jobs.spec import Claim
from media_server.jobs.sweep import sweep
from media_server.jobs.tables import jobs, outbox
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.cards import TEXT_CARD
from tests.media_server.scripted_worker import ScriptedWorker
from tests.workers.test_video_worker import CARD, FAKE
from workers import delivery_worker
from workers.delivery_worker import Courier
from workers.leases import end_leases_of_the_dead, worker_id
from workers.pool_worker import PoolContext
from workers.sweeper import sweep_once
from workers.video_worker import VideoWorker

# the prompts are orders to the stand-in; the metadata says what happens to the job meanwhile
CLIPS = {
    "plain": "a red ball",
    "segments": "segments, then crash",
    "drained": "wait at first",
    "stopped": "wait at first",
    "unwanted": "a red ball",
    "lost": "a red ball",
    "deleted": "a red ball",
}
# read once, for all forks of a process that has this imported
certificates(trust_env=False)
ENDS = {"stopped": "cancelled", "unwanted": "cancelled", "lost": "failed"}


def settings_of(folder: Path) -> Settings:
    """Settings of the way: a broker that is dead, and a minute of everything in a moment."""
    return Settings(
        data_dir=folder,
        broker_url="redis://127.0.0.1:1/0",
        allow_private_urls=True,
        keep_deleted_s=0.0,
        doorbell_s=0.001,
        beat_s=0.2,
        cancel_grace_s=10.0,
        max_attempts=5,
        reserve_bytes=1 << 16,
    )


def walk(folder: Path, hook: str, parts: Sequence[str], point: str | None) -> None:
    """Walk the way of these parts; with a point this process dies there."""
    idempotency.HOLD_S = 0.5
    delivery_worker.LEASE_S = 0.5
    transitions.STRAGGLER_S = 0.0
    store.ACCEPT_S = 0.0
    settings = settings_of(folder)
    # a doorbell that is heard in this process: the way looks for work by itself
    db = open_database(settings.database, ring=lambda pool: None)
    migrate(db)
    publish(db, TEXT_CARD, "engine@test:1")
    crash_points.arm(point)
    end_leases_of_the_dead(db)
    worker = Worker(settings, db)
    try:
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as http:
            caller = Caller(http, hook)
            made = caller.submit(parts)
            worker.work(caller)
            caller.delete(made.get("deleted"))
            worker.work(caller)
    finally:
        worker.stop()
    for _ in range(2):
        sweep(db, doorbell_s=settings.doorbell_s)
        sweep_once(settings, db, open_artifacts(settings))
        # a job that the sweeper has ended is announced too
        deliver(settings, db)
    sweep_once(settings, db, open_artifacts(settings))
    db.close()


class Caller:
    """Sends its requests until they are answered; each is one request, however often it is sent."""

    def __init__(self, http: TestClient, hook: str) -> None:
        self.http = http
        self.hook = hook

    def submit(self, parts: Sequence[str]) -> dict[str, str | None]:
        """Ask for clips, and for a film; gives their ids, None for one that is deleted by now."""
        picture = io.BytesIO()
        Image.new("RGB", (64, 64), "red").save(picture, "PNG")
        image = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
        made = {}
        for part in parts:
            if part == "film":
                film = {"idea": "a ball", "seconds": 1, "shots": 2, "webhook_url": self.hook}
                made[part] = self._post("/v1/films", part, film)
                continue
            body: dict[str, Any] = {"prompt": CLIPS[part], "metadata": {"part": part}, "webhook_url": self.hook}
            if part in ("plain", "deleted"):
                body["input_reference"] = {"image_url": image}
            made[part] = self._post("/v1/videos", part, body)
        return made

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        assert self.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 200

    def delete(self, job_id: str | None) -> None:
        """Delete a clip, unless it is."""
        if job_id is not None:
            assert self.http.delete(f"/v1/videos/{job_id}").status_code in (200, 404)

    def _post(self, path: str, key: str, body: dict[str, Any]) -> str | None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self.http.post(path, json=body, headers={"idempotency-key": key})
            if answer.is_success:
                return str(answer.json()["id"])
            code = answer.json()["error"]["code"]
            if code == "idempotency_key_spent":
                return None
            # who died while it accepted lets go of the key
            assert code == "idempotency_key_in_use", answer.text
            time.sleep(0.1)
        raise AssertionError(f"{key} was not accepted")


class Worker:
    """The workers of all pools, one claim at a time."""

    def __init__(self, settings: Settings, db: Database) -> None:
        self.db = db
        self.context = PoolContext(
            settings=settings,
            db=db,
            artifacts=open_artifacts(settings),
            celery=make_celery(settings),
            stopping=threading.Event(),
            pool="video",
            worker=worker_id("video-0"),
        )
        card = settings.data_dir / "card.json"
        limits = {**CARD["limits"], "max_seconds": 60}
        card.write_text(json.dumps({**CARD, "name": "tiny-wan", "limits": limits}))
        stand_in = [sys.executable, str(FAKE), str(card.with_name("runs")), str(card)]
        self.video = VideoWorker(settings, "video-0", stand_in)
        name = worker_id("media")
        self.scripted = ScriptedWorker(db, self.context.artifacts, b"film", b"picture", name=name, beats=1)
        self.video.start(self.context)

    def stop(self) -> None:
        """End the stand-in."""
        self.video.stop(self.context)
        shutil.rmtree(self.context.settings.data_dir / "work")

    def work(self, caller: Caller) -> None:
        """Do everything there is to do."""
        for part, job_id in self._queued().items():
            if part == "unwanted":
                caller.cancel(job_id)
        while self._do_one():
            pass

    def _do_one(self) -> bool:
        for pool in ("video", "text", "media"):
            worker = self.context.worker if pool == "video" else self.scripted.name
            claim = claim_next(self.db, pool, worker, 600.0)
            if claim is not None:
                self._do(claim, pool)
                return True
        return False

    def _do(self, claim: Claim, pool: str) -> None:
        part = claim.job.metadata.get("part")
        if pool != "video":
            self.scripted.do(claim)
        elif part == "lost":
            # its worker dies each time, until nobody may take it again
            claims.end_leases(self.db, claim.worker)
            sweep(self.db, doorbell_s=0.0)
        else:
            if part == "stopped":
                store.request_cancel(self.db, claim.job.id)
            if part == "drained" and claim.attempt == 1:
                self.context.stopping.set()
            self.video.handle(self.context, claim)
            self.context.stopping.clear()

    def _queued(self) -> dict[str, str]:
        with self.db.read() as tx:
            rows = tx.conn.execute(jobs.select().where(jobs.c.status == "queued", jobs.c.kind == "video")).all()
        return {row.metadata.get("part", ""): row.id for row in rows}


def deliver(settings: Settings, db: Database) -> None:
    """Deliver every message."""

    async def run() -> None:
        courier = Courier(settings, db, worker_id("deliveries"))
        task = asyncio.create_task(courier.run())
        deadline = time.monotonic() + 60
        while await asyncio.to_thread(_has_pending, db):
            assert time.monotonic() < deadline, "messages are not delivered"
            await asyncio.sleep(0.05)
        courier.stop()
        await task

    asyncio.run(run())


def _has_pending(db: Database) -> bool:
    with db.read() as tx:
        return tx.conn.execute(outbox.select().where(outbox.c.state == "pending").limit(1)).first() is not None
