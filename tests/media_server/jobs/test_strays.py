"""Files that nothing owns are found by a walk through the store, and nothing is among them that may be published."""

import os
import time
from pathlib import Path

import pytest

from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.ids import new_id
from media_server.jobs import claims, store, strays
from media_server.jobs.database import Database
from media_server.jobs.spec import Claim, JobSpec, Result
from media_server.jobs.strays import Strays
from workers.sweeper import collect_garbage

AGE_S = 100.0


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    return open_artifacts(str(tmp_path / "artifacts"))


@pytest.fixture
def walks(db: Database, artifacts: ArtifactStore) -> Strays:
    return Strays(db, artifacts, age_s=AGE_S, is_shared=False)


def put(artifacts: ArtifactStore, key: str, *, age_s: float = 2 * AGE_S) -> Path:
    """Write a file as if it had been written `age_s` ago."""
    assert artifacts.root is not None
    path = artifacts.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def submit(db: Database) -> str:
    return store.submit(db, JobSpec(kind="video", pool="video", prompts={"prompt": "x"}, max_attempts=5)).id


def claim(db: Database, worker: str = "w") -> Claim:
    found = claims.claim_next(db, "video", worker, 600.0)
    assert found is not None
    return found


def look(walks: Strays) -> list[str]:
    """Walk through the whole store once."""
    walks._walk, walks._next_at = None, 0.0
    found = walks.look()
    while walks._walk is not None:
        found += walks.look()
    return sorted(found)


def empty(db: Database, artifacts: ArtifactStore) -> set[str]:
    """Remove what is due; gives what is left."""
    collect_garbage(db, artifacts)
    return {key for key, _ in artifacts.walk()}


def finish(db: Database, artifacts: ArtifactStore, ours: Claim) -> str:
    key = f"{ours.job.id}/{ours.attempt}/video.mp4"
    assert claims.complete(db, ours, Result([artifacts.put_bytes(key, b"x", "video/mp4").record("video")]))
    return key


def test_what_a_worker_wrote_when_its_attempt_was_long_over_goes(
    db: Database, artifacts: ArtifactStore, walks: Strays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("media_server.jobs.transitions.STRAGGLER_S", 0.0)
    job_id = submit(db)
    stopped = claim(db, "stopped")
    claims.end_leases(db, "stopped")
    key = finish(db, artifacts, claim(db, "other"))
    assert empty(db, artifacts) == {key}
    # it wakes, and is killed before it hears that the job is another's
    late = put(artifacts, f"{job_id}/{stopped.attempt}/video.mp4", age_s=AGE_S / 2)
    half = put(artifacts, f"{job_id}/{stopped.attempt}/thumbnail.jpg#1", age_s=AGE_S / 2)
    assert look(walks) == []
    for path in (late, half):
        os.utime(path, (time.time() - 2 * AGE_S,) * 2)
    assert look(walks) == [f"{job_id}/1/"]
    # what is in hand is not handed over again
    assert look(walks) == []
    assert empty(db, artifacts) == {key}
    assert not late.parent.exists()


def test_what_may_yet_be_published_stays(db: Database, artifacts: ArtifactStore, walks: Strays) -> None:
    job_id = submit(db)
    first = claim(db)
    for key in ("1/video.mp4", "inputs/first_frame.png", "segments/1_000.mkv"):
        put(artifacts, f"{job_id}/{key}")
    # however old: an attempt may take days
    assert look(walks) == []
    claims.release(db, first)
    assert look(walks) == []
    # the next attempt has begun: the first can publish nothing any more
    second = claim(db)
    put(artifacts, f"{job_id}/2/video.mp4")
    assert look(walks) == [f"{job_id}/1/"]
    key = finish(db, artifacts, second)
    assert look(walks) == [f"{job_id}/segments/"]
    assert empty(db, artifacts) == {key, f"{job_id}/inputs/first_frame.png"}


def test_a_publish_between_the_walk_and_the_look_wins(db: Database, artifacts: ArtifactStore) -> None:
    submit(db)
    ours = claim(db)
    key = finish(db, artifacts, ours)
    places = {(ours.job.id, str(ours.attempt)), (ours.job.id, "7")}
    assert strays.discard_strays(db, places, with_unknown=True) == [f"{ours.job.id}/7/"]
    assert empty(db, artifacts) == {key}


def test_a_deleted_job_owns_nothing(db: Database, artifacts: ArtifactStore, walks: Strays) -> None:
    submit(db)
    ours = claim(db)
    finish(db, artifacts, ours)
    store.delete(db, ours.job.id)
    assert empty(db, artifacts) == set()
    for key in ("1/video.mp4", "inputs/first_frame.png"):
        put(artifacts, f"{ours.job.id}/{key}")
    assert look(walks) == [f"{ours.job.id}/1/", f"{ours.job.id}/inputs/"]
    assert empty(db, artifacts) == set()


def test_what_has_no_row_goes_unless_it_is_held_or_may_be_of_others(
    db: Database, artifacts: ArtifactStore, walks: Strays
) -> None:
    held, gone = new_id("video"), new_id("video")
    store.hold_files(db, f"{held}/")
    kept = {f"{held}/inputs/first_frame.png", "models/tiny/0/tokenizer.json", "photos/2026/a.png", f"{gone}x/1/a.mp4"}
    for key in (*kept, f"{gone}/3/video.mp4"):
        put(artifacts, key)
    shared = Strays(db, artifacts, age_s=AGE_S, is_shared=True)
    assert look(shared) == []
    assert look(walks) == [f"{gone}/"]
    assert empty(db, artifacts) == kept


def test_a_walk_goes_on_in_the_next_round(
    db: Database, artifacts: ArtifactStore, walks: Strays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "A_ROUND", 3)
    gone = sorted(new_id("video") for _ in range(7))
    for id in gone:
        put(artifacts, f"{id}/1/video.mp4")
    rounds = [walks.look() for _ in range(5)]
    assert [len(found) for found in rounds] == [3, 3, 1, 0, 0]
    assert sorted(prefix for found in rounds for prefix in found) == [f"{id}/" for id in gone]
    assert empty(db, artifacts) == set()
    # the next walk begins when files may have come of age
    put(artifacts, f"{new_id('video')}/1/video.mp4")
    assert walks.look() == []
    walks._next_at -= AGE_S
    assert len(walks.look()) == 1


def test_a_walk_that_fails_is_begun_again(
    db: Database, artifacts: ArtifactStore, walks: Strays, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = new_id("video")
    put(artifacts, f"{gone}/1/video.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "walk", lambda: (1 / 0 for _ in "x"))
        with pytest.raises(ZeroDivisionError):
            walks.look()
    walks._next_at = 0.0
    assert walks.look() == [f"{gone}/"]
