"""The film's state machine, driven by a scripted worker that holds no state between two steps."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from media_server.errors import Conflict, InvalidRequest, JobError
from media_server.films import FilmRequest, advance, derive_seed, parse_film_request, submit_film
from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.events import read_after
from media_server.jobs.spec import ArtifactRecord, Claim, Job, Result
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs
from media_server.models.card import VideoCard
from media_server.models.registry import publish

FRAMES = [30, 20, 14]
BOARD: dict[str, Any] = {
    "v": 1,
    "title": "Cube",
    "shots": [
        {"index": index, "prompt": f"a red cube {index}", "seconds": frames / 16, "num_frames": frames}
        for index, frames in enumerate(FRAMES)
    ],
}
POOLS = ("text", "video", "media")
# says what a shot's clip does, by (shot, retry)
Script = Callable[[int, int], JobError | None]


@pytest.fixture
def film(db: Database, card: VideoCard) -> Job:
    """A film of 64 frames that has just been asked for."""
    publish(db, card, "w")
    return submit_film(db, FilmRequest(idea="a red cube", seconds=4, seed=7, style="flat"), card, shot_retries=2)


def _claim(db: Database, pool: str) -> Claim | None:
    return claims.claim_next(db, pool, f"{pool}-worker", 20.0)


def _artifact(job: Job, name: str, file: str) -> ArtifactRecord:
    return ArtifactRecord(name, f"{job.id}/{job.attempt}/{file}", "application/octet-stream", 1, "00")


def _work(db: Database, claim: Claim, board: dict[str, Any], script: Script) -> None:
    """Do one claimed child as its real worker would."""
    job = claim.job
    claims.beat(db, claim, lease_s=20.0, progress=50.0)
    match job.kind:
        case "storyboard":
            claims.complete(db, claim, Result(result={"storyboard": board}))
        case "video":
            place = job.params["film"]
            error = script(place["shot"], place["retry"])
            if error is not None:
                claims.fail(db, claim, error)
            else:
                claims.complete(
                    db, claim, Result([_artifact(job, "video", "video.mp4")], gpu_seconds=2.0, peak_memory_bytes=100)
                )
        case "join":
            claims.complete(db, claim, Result([_artifact(job, "video", "film.mp4")]))


def _run(db: Database, board: dict[str, Any] = BOARD, script: Script = lambda _shot, _retry: None) -> None:
    while True:
        claimed = [claim for pool in POOLS if (claim := _claim(db, pool)) is not None]
        if not claimed:
            return
        for claim in claimed:
            _work(db, claim, board, script)


def _children(db: Database, film: Job, kind: str | None = None) -> list[Job]:
    page = store.list_jobs(db, parent_id=film.id, kinds=[kind] if kind else None, limit=100, order="asc")
    return page.data


def test_a_film_from_its_idea_to_its_file(db: Database, card: VideoCard, film: Job, rings: list[str]) -> None:
    assert (film.status, film.pool, film.params["num_frames"]) == (Status.QUEUED, "films", 64)
    (storyboard,) = _children(db, film)
    assert (storyboard.kind, storyboard.pool) == ("storyboard", "text")
    assert storyboard.prompts == {"idea": "a red cube", "style": "flat"}
    wanted = {"seconds": 4.0, "shots": None, "seed": 7, "fps": 16, "size": "160x96"}
    assert wanted.items() <= storyboard.params.items()
    assert storyboard.params["video_model"] == "tiny-wan"

    claim = _claim(db, "text")
    assert claim is not None
    begun = store.get(db, film.id)
    assert (begun.status, begun.stage) == (Status.IN_PROGRESS, "storyboard")
    rings.clear()
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    assert rings == ["video"] * 3, "one doorbell a shot, so that each free worker wakes"
    shots = _children(db, film, "video")
    assert [shot.params["num_frames"] for shot in shots] == FRAMES
    assert [shot.params["film"] for shot in shots] == [{"shot": index, "retry": 0} for index in range(3)]
    assert [shot.prompts["prompt"] for shot in shots] == [f"a red cube {index}" for index in range(3)]
    assert [shot.params["seed"] for shot in shots] == [derive_seed(7, index, 0) for index in range(3)]
    assert all(shot.root_id == film.id and shot.params["size"] == "160x96" for shot in shots)

    _run(db)
    done = store.get(db, film.id)
    assert (done.status, done.progress, done.gpu_seconds, done.peak_memory_bytes) == ("completed", 100.0, 6.0, 100)
    (join,) = _children(db, film, "join")
    assert join.params["clips"] == [
        {
            "job_id": shot.id,
            "attempt": 1,
            "key": f"{shot.id}/1/video.mp4",
            "num_frames": frames,
            "shot": index,
        }
        for index, (shot, frames) in enumerate(zip(shots, FRAMES, strict=True))
    ]
    assert (join.params["fps"], join.params["size"], join.params["film_id"]) == (16, "160x96", film.id)
    assert join.params["storyboard"] == BOARD
    assert done.result is not None
    assert done.result["storyboard"] == BOARD
    assert done.result["join_job_id"] == join.id
    assert [(shot["job_id"], shot["retries"]) for shot in done.result["shots"]] == [(shot.id, 0) for shot in shots]
    assert [record.key for record in store.artifacts_of(db, film.id)] == [f"{join.id}/1/film.mp4"]


def test_stages_and_progress_rise_through_the_film(db: Database, film: Job) -> None:
    _run(db)
    seen = [event for event in read_after(db, job_id=film.id) if event.type == "job.progress"]
    stages = [event.data["stage"] for event in seen]
    assert list(dict.fromkeys(stages)) == ["storyboard", "shots", "joining"]
    progress = [event.data["progress"] for event in seen]
    assert progress == sorted(progress)
    by_stage = {"storyboard": (0, 10), "shots": (10, 90), "joining": (90, 100)}
    for event in seen:
        low, high = by_stage[event.data["stage"]]
        assert low <= event.data["progress"] <= high, event
    steps = [event.data["step"] for event in seen if event.data["stage"] == "shots"]
    # with the third shot done it joins at once
    assert (steps[0], steps[-1]) == (0, 2)
    types = [event.type for event in read_after(db, job_id=film.id) if event.type != "job.progress"]
    assert types == ["job.queued", "job.started", "film.completed"]
    # the family's stream holds the children's events too, each child's end once
    ends = [event.type for event in read_after(db, root_id=film.id) if event.type.endswith(".completed")]
    assert sorted(ends) == sorted(
        ["storyboard.completed", *["video.completed"] * 3, "join.completed", "film.completed"]
    )


def test_a_failed_shot_is_made_again_with_another_seed(db: Database, film: Job) -> None:
    error = JobError("invalid_output", "black frames")
    _run(db, script=lambda shot, retry: error if (shot, retry) in {(1, 0), (1, 1), (2, 0)} else None)
    done = store.get(db, film.id)
    assert done.status is Status.COMPLETED
    assert done.result is not None
    assert [shot["retries"] for shot in done.result["shots"]] == [0, 2, 1]
    assert [shot["seed"] for shot in done.result["shots"]] == [
        derive_seed(7, 0, 0),
        derive_seed(7, 1, 2),
        derive_seed(7, 2, 1),
    ]
    (join,) = _children(db, film, "join")
    assert [clip["job_id"] for clip in join.params["clips"]] == [shot["job_id"] for shot in done.result["shots"]]
    assert len(_children(db, film, "video")) == 6


def test_a_shot_that_keeps_failing_fails_the_film_and_keeps_what_was_made(db: Database, film: Job) -> None:
    error = JobError("invalid_output", "black frames")
    _run(db, script=lambda shot, _retry: error if shot == 1 else None)
    failed = store.get(db, film.id)
    assert (failed.status, failed.error_code) == (Status.FAILED, "shot_failed")
    assert failed.error_message == "Shot 2 failed with invalid_output: black frames"
    assert failed.result is not None
    assert failed.result["storyboard"] == BOARD
    assert [shot["status"] for shot in failed.result["shots"]] == ["completed", "failed", "completed"]
    assert store.artifacts_of(db, failed.result["shots"][0]["job_id"]) != []
    assert _children(db, film, "join") == []
    assert len(_children(db, film, "video")) == 2 + 3


def test_a_failing_film_stops_what_waits_and_what_runs(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    first, second = _claim(db, "video"), _claim(db, "video")
    assert first is not None
    assert second is not None
    # a bad request is bad with every seed
    claims.fail(db, first, JobError("invalid_request", "no such size"))
    assert store.get(db, film.id).status is Status.FAILED
    assert [shot.status for shot in _children(db, film, "video")] == ["failed", "in_progress", "cancelled"]
    assert claims.beat(db, second, lease_s=20.0).cancel_requested
    assert claims.confirm_cancel(db, second)
    types = [event.type for event in read_after(db, job_id=film.id)]
    assert types.count("film.failed") == 1


def test_an_ended_film_counts_what_ran_when_it_ended(db: Database, film: Job) -> None:
    """2 s of the shot that is made, 1.5 of the one that fails; 4 of the one that stops a step later come after."""
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    made, bad, late = (_claim(db, "video") for _ in range(3))
    assert made is not None and bad is not None and late is not None
    made_video = Result([_artifact(made.job, "video", "video.mp4")], gpu_seconds=2.0, peak_memory_bytes=100)
    claims.complete(db, made, made_video)
    claims.fail(db, bad, JobError("invalid_request", "no such size"), gpu_seconds=1.5)
    failed = store.get(db, film.id)
    assert (failed.status, failed.gpu_seconds, failed.peak_memory_bytes) == (Status.FAILED, 3.5, 100)
    assert failed.result is not None
    assert [shot["status"] for shot in failed.result["shots"]] == ["completed", "failed", "in_progress"]
    # a shot that was made may be deleted by itself meanwhile; what it took stays counted
    store.delete(db, made.job.id)
    assert claims.confirm_cancel(db, late, gpu_seconds=4.0)
    settled = store.get(db, film.id)
    assert (settled.status, settled.error_code, settled.gpu_seconds) == (Status.FAILED, "shot_failed", 7.5)
    assert settled.result is not None
    assert [shot["status"] for shot in settled.result["shots"]] == ["completed", "failed", "cancelled"]
    assert settled.completed_at == failed.completed_at
    types = [event.type for event in read_after(db, job_id=film.id)]
    assert types.count("film.failed") == 1


def test_a_lost_worker_of_a_failed_film_is_counted_too(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    bad, late = _claim(db, "video"), _claim(db, "video")
    assert bad is not None and late is not None
    claims.fail(db, bad, JobError("invalid_request", "no such size"), gpu_seconds=1.5)
    assert claims.end_leases(db, "video-worker") == 1
    assert claims.sweep(db, doorbell_s=10.0).cancelled == [late.job.id]
    settled = store.get(db, film.id)
    assert settled.gpu_seconds == 1.5
    assert settled.result is not None
    assert [shot["status"] for shot in settled.result["shots"]] == ["failed", "cancelled", "cancelled"]


def test_a_cancelled_film_says_what_was_made_and_what_it_took(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    made, running = _claim(db, "video"), _claim(db, "video")
    assert made is not None and running is not None
    made_video = Result([_artifact(made.job, "video", "video.mp4")], gpu_seconds=2.0, peak_memory_bytes=100)
    claims.complete(db, made, made_video)
    store.request_cancel(db, film.id)
    assert claims.confirm_cancel(db, running, gpu_seconds=0.5)
    cancelled = store.get(db, film.id)
    assert (cancelled.status, cancelled.gpu_seconds, cancelled.peak_memory_bytes) == (Status.CANCELLED, 2.5, 100)
    assert cancelled.result is not None
    assert [shot["status"] for shot in cancelled.result["shots"]] == ["completed", "cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ({"shots": BOARD["shots"][:2]}, "sum to 50 frames, the film has 64"),
        ({"shots": [{"prompt": "a", "num_frames": 64}, {"prompt": "b", "num_frames": 0}]}, "Shot 2 cannot be made"),
        ({"shots": [{"prompt": " ", "num_frames": 64}]}, "prompt: must not be empty"),
        ({"shots": [{"prompt": "a"}]}, "lacks a shot's num_frames"),
        ({}, "lacks a shot's num_frames"),
    ],
)
def test_a_storyboard_that_cannot_be_filmed_fails_the_film(
    db: Database, film: Job, board: dict[str, Any], message: str
) -> None:
    _run(db, board)
    failed = store.get(db, film.id)
    assert (failed.status, failed.error_code) == (Status.FAILED, "storyboard_failed")
    assert message in (failed.error_message or "")
    assert all(child.status.is_terminal for child in _children(db, film))


def test_a_failed_storyboard_or_join_fails_the_film(db: Database, card: VideoCard, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.fail(db, claim, JobError("engine_unavailable", "no engine"))
    failed = store.get(db, film.id)
    assert (failed.error_code, failed.error_message, failed.result) == (
        "storyboard_failed",
        "The storyboard failed with engine_unavailable: no engine",
        None,
    )
    other = submit_film(db, FilmRequest(idea="a red cube", seconds=4), card)
    for pool in ("text", "video", "video", "video"):
        claim = _claim(db, pool)
        assert claim is not None
        _work(db, claim, BOARD, lambda _shot, _retry: None)
    claim = _claim(db, "media")
    assert claim is not None
    claims.fail(db, claim, JobError("join_failed", "disk full"))
    assert store.get(db, other.id).error_code == "join_failed"


def test_a_long_shot_becomes_segments(db: Database, card: VideoCard) -> None:
    publish(db, card, "w")
    film = submit_film(db, FilmRequest(idea="a red cube", seconds=10), card)
    _run(db, {"shots": [{"prompt": "a", "num_frames": 130}, {"prompt": "b", "num_frames": 30}]})
    long, short = _children(db, film, "video")
    assert sum(long.params["extend"]["segment_frames"]) == 130
    assert short.params["extend"] is None
    assert store.get(db, film.id).status is Status.COMPLETED


# the film before each step: waiting, storyboard, shots, joining
@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("is_running", [False, True])
def test_cancel_at_any_point(db: Database, film: Job, steps: int, is_running: bool) -> None:
    pools = ["text", "video", "video", "video", "media"]
    for pool in pools[:steps]:
        claim = _claim(db, pool)
        assert claim is not None
        _work(db, claim, BOARD, lambda _shot, _retry: None)
    running = _claim(db, pools[steps]) if is_running and steps < len(pools) else None
    made = {child.id for child in _children(db, film) if child.status is Status.COMPLETED}
    asked = store.request_cancel(db, film.id)
    if steps >= len(pools):
        assert asked.status is Status.COMPLETED
        return
    if running is not None:
        assert asked.status is Status.IN_PROGRESS
        assert claims.beat(db, running, lease_s=20.0).cancel_requested
        assert claims.confirm_cancel(db, running)
    cancelled = store.get(db, film.id)
    assert (cancelled.status, cancelled.error_code) == (Status.CANCELLED, None)
    assert all(_claim(db, pool) is None for pool in POOLS)
    children = _children(db, film)
    assert {child.id for child in children if child.status is Status.COMPLETED} == made
    assert all(child.status in (Status.COMPLETED, Status.CANCELLED) for child in children)
    assert [event.type for event in read_after(db, job_id=film.id)].count("film.cancelled") == 1


def test_work_that_outruns_the_cancel_leaves_the_film_cancelled(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    store.request_cancel(db, film.id)
    assert claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    assert store.get(db, film.id).status is Status.CANCELLED
    assert _children(db, film, "video") == []


def test_a_cancelled_shot_fails_its_film(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    store.request_cancel(db, _children(db, film, "video")[0].id)
    failed = store.get(db, film.id)
    assert (failed.status, failed.error_message) == (Status.FAILED, "Shot 1 was cancelled.")


@pytest.mark.parametrize("crash_at", range(1, 6))
def test_a_restart_between_any_two_steps_continues(db: Database, film: Job, crash_at: int) -> None:
    """Each worker dies once while it works; everything it had is gone, and the film still has each shot once."""
    done = 0
    while not store.get(db, film.id).status.is_terminal:
        for pool in POOLS:
            claim = _claim(db, pool)
            if claim is None:
                continue
            done += 1
            if done == crash_at:
                assert claims.end_leases(db, f"{pool}-worker") == 1
                # advancing without a reason changes nothing
                with db.write() as tx:
                    tx.lock(film.id)
                    advance(tx, film.id)
                continue
            _work(db, claim, BOARD, lambda _shot, _retry: None)
    assert store.get(db, film.id).status is Status.COMPLETED
    children = _children(db, film)
    assert sorted(child.kind for child in children) == ["join", "storyboard", "video", "video", "video"]
    assert sum(child.attempt for child in children) == len(children) + 1


def test_deleting_a_film_deletes_its_family(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    running = _claim(db, "video")
    assert running is not None
    shots = _children(db, film, "video")
    with pytest.raises(Conflict, match="delete the film instead"):
        store.delete(db, shots[2].id)
    prefixes = store.delete(db, film.id)
    assert running.job.id not in {prefix.rstrip("/") for prefix in prefixes}
    assert claims.confirm_cancel(db, running)
    with db.read() as tx:
        rows = tx.conn.execute(sa.select(jobs.c.status, jobs.c.deleted_at, jobs.c.result, jobs.c.params)).all()
        garbage = set(tx.conn.scalars(sa.text("SELECT prefix FROM garbage")))
    assert all(row.status in ("completed", "cancelled") and row.deleted_at and not row.params for row in rows)
    assert {row.result is None for row in rows} == {True}
    assert {f"{id}/" for id in (film.id, running.job.id, *(shot.id for shot in shots))} <= garbage
    assert store.list_jobs(db).data == []


def test_a_shot_of_a_deleted_film_goes_on_beating_until_it_is_cancelled(db: Database, film: Job) -> None:
    claim = _claim(db, "text")
    assert claim is not None
    claims.complete(db, claim, Result(result={"storyboard": BOARD}))
    running = _claim(db, "video")
    assert running is not None
    store.delete(db, film.id)
    # the storyboard that the film's progress was read from is erased by now
    said = claims.beat(db, running, lease_s=20.0, stage="denoise", step=1, total_steps=4, progress=25.0)
    assert (said.is_ours, said.cancel_requested) == (True, True)
    assert claims.confirm_cancel(db, running)
    with db.read() as tx:
        assert set(tx.conn.scalars(sa.select(jobs.c.status).where(jobs.c.kind != "storyboard"))) == {"cancelled"}


def test_seeds_are_those_of_sha256() -> None:
    # printf '7:0:0' | sha256sum, first 53 bits
    assert derive_seed(7, 0, 0) == 0xF27036D7F5A30F84 >> 11
    assert len({derive_seed(7, shot, retry) for shot in range(20) for retry in range(3)}) == 60
    assert all(0 <= derive_seed(seed, 0, 0) < 2**53 for seed in range(100))


@pytest.mark.parametrize(
    ("values", "param", "rule"),
    [
        ({"idea": " "}, "idea", "must not be empty"),
        ({}, "idea", "is required"),
        ({"idea": "a", "seconds": 0}, "seconds", "greater than 0"),
        ({"idea": "a", "seconds": 601}, "seconds", "less than or equal to 600"),
        ({"idea": "a", "seconds": 1, "shots": 17}, "seconds", "at least one frame a shot at 16 fps"),
        ({"idea": "a", "seconds": 181, "shots": 3}, "seconds", "at most 60 s a shot"),
        ({"idea": "a", "size": "161x96"}, "size", "multiple of 16"),
        ({"idea": "a", "num_inference_steps": 51}, "num_inference_steps", "at most 50"),
        ({"idea": "a", "fps": 61}, "fps", "from 1 to 60"),
        ({"idea": "a", "seed": 2**53}, "seed", "less than 9007199254740992"),
        ({"idea": "a\0b"}, "idea", "NUL"),
        ({"idea": "a", "colour": "red"}, "colour", "is not a field of this request"),
    ],
)
def test_bad_films_are_refused_and_nothing_is_written(
    db: Database, card: VideoCard, values: dict[str, Any], param: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submit_film(db, parse_film_request(values), card)
    assert refused.value.param == param
    assert rule in (refused.value.rule or "")
    assert store.list_jobs(db).data == []


def test_a_model_that_needs_a_first_frame_makes_no_film(db: Database, card: VideoCard) -> None:
    image_only = card.model_copy(update={"conditions": ["first_frame"]})
    with pytest.raises(InvalidRequest) as refused:
        submit_film(db, FilmRequest(idea="a red cube"), image_only)
    assert (refused.value.param, refused.value.value) == ("model", "tiny-wan")
    assert store.list_jobs(db).data == []
