"""What a listener is told of the moment: its job's place in the queue, and pictures of what is being made."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from media_server.http_events import EventFeed, job_events
from media_server.jobs import claims, previews, store
from media_server.jobs.database import Database
from media_server.jobs.spec import Claim, Job, JobSpec, Preview, Result

LIMIT_S = 60


def submit(db: Database, **members: Any) -> Job:
    return store.submit(db, JobSpec(**{"kind": "video", "pool": "video", "predicted_gpu_seconds": 10.0, **members}))


def claim(db: Database) -> Claim:
    found = claims.claim_next(db, "video", "w@test:1", 20.0)
    assert found is not None
    return found


async def frames(db: Database, job: Job, after: int = 0) -> AsyncIterator[dict[str, Any]]:
    """Follow a job; gives each frame's data with its SSE id."""
    feed = EventFeed(db, poll_s=0.02)
    try:
        async for block in job_events(db, feed, job, after=after, is_allowed=lambda: True):
            fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if ": " in line)
            if "data" in fields:
                yield {**json.loads(fields["data"]), "id": fields.get("id")}
    finally:
        await feed.close()


async def until(stream: AsyncIterator[dict[str, Any]], type: str) -> dict[str, Any]:
    """Read on until an event of a type."""
    async with asyncio.timeout(LIMIT_S):
        async for frame in stream:
            if frame["type"] == type:
                return frame
    raise AssertionError(f"no {type} came")


def test_a_job_that_waits_hears_its_place(db: Database) -> None:
    first, _, third = (submit(db) for _ in range(3))

    async def follow() -> None:
        stream = frames(db, third)
        told = await until(stream, "job.position")
        assert (told["data"], told["job_id"]) == ({"queue_position": 2, "eta_s": 30.0}, third.id)
        # of the moment: nothing to come back with
        assert (told["id"], told["seq"], told["attempt"]) == (None, None, 0)
        store.request_cancel(db, first.id)
        told = await until(stream, "job.position")
        assert told["data"] == {"queue_position": 1, "eta_s": 20.0}
        claim(db)
        told = await until(stream, "job.position")
        # what runs takes its time too
        assert told["data"]["queue_position"] == 0 and 10.0 < told["data"]["eta_s"] <= 20.0
        held = claim(db)
        await until(stream, "job.started")
        # given back, it waits again
        assert claims.release(db, held)
        told = await until(stream, "job.position")
        assert (told["data"]["queue_position"], told["attempt"]) == (0, 1)

    asyncio.run(follow())


def test_a_film_hears_the_places_of_its_shots(db: Database) -> None:
    film = submit(db, kind="film", pool="films")
    shots = [submit(db, parent_id=film.id, root_id=film.id) for _ in range(2)]

    async def follow() -> dict[str, int]:
        stream = frames(db, film)
        told = [await until(stream, "job.position") for _ in shots]
        return {frame["job_id"]: frame["data"]["queue_position"] for frame in told}

    assert asyncio.run(follow()) == {shots[0].id: 0, shots[1].id: 1}


def test_pictures_are_data_uris_and_go_with_their_attempt(db: Database) -> None:
    job = submit(db)
    held = claim(db)

    def draw(held: Claim, number: int, picture: bytes) -> None:
        preview = Preview(number, {"segment": 0, "step": number, "total_steps": 4}, picture)
        assert claims.beat(db, held, lease_s=20.0, progress=10.0 * number, preview=preview).is_ours

    draw(held, 1, b"one")

    async def follow() -> None:
        stream = frames(db, job)
        told = await until(stream, "job.preview")
        assert told["data"] == {
            "segment": 0, "step": 1, "total_steps": 4, "image": f"data:image/jpeg;base64,{_base64(b'one')}",
        }  # fmt: skip
        assert (told["id"], told["attempt"]) == (None, 1)
        draw(held, 2, b"two")
        assert (await until(stream, "job.preview"))["data"]["image"].endswith(_base64(b"two"))
        # whoever comes now gets the latest one, once
        late = frames(db, job)
        assert (await until(late, "job.preview"))["data"]["step"] == 2
        # another attempt says so, begins at zero, and has pictures of its own
        claims.end_leases(db, "w@test:1")
        again = claim(db)
        assert previews.find(db, job.id) is None
        told = await until(stream, "job.attempt")
        assert (told["attempt"], told["data"]["attempt"], store.get(db, job.id).progress) == (2, 2, 0.0)
        draw(again, 1, b"again")
        told = await until(stream, "job.preview")
        assert (told["attempt"], told["data"]["step"]) == (2, 1)
        assert claims.complete(db, again, Result())
        assert previews.find(db, job.id) is None
        await until(stream, "video.completed")

    asyncio.run(follow())


def test_progress_never_sinks_within_an_attempt(db: Database) -> None:
    job = submit(db)
    held = claim(db)
    for progress in (10.0, 40.0, 30.0, 0.0, 41.0):
        claims.beat(db, held, lease_s=20.0, progress=progress)
    claims.end_leases(db, "w@test:1")
    again = claim(db)
    claims.beat(db, again, lease_s=20.0, progress=5.0)
    # the attempt before is not heard any more
    assert not claims.beat(db, held, lease_s=20.0, progress=90.0).is_ours
    claims.complete(db, again, Result())

    async def follow() -> list[tuple[int, str, float | None]]:
        return [(told["attempt"], told["type"], told["data"].get("progress")) async for told in frames(db, job)]

    assert asyncio.run(follow()) == [
        (0, "job.queued", None),
        (1, "job.started", None),
        *((1, "job.progress", progress) for progress in (10.0, 40.0, 40.0, 40.0, 41.0)),
        (2, "job.attempt", None),
        (2, "job.progress", 5.0),
        (2, "video.completed", None),
    ]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
