"""The film's machine: one step further by each transaction that ends a child.

Invariant: whoever calls holds the lock of the film's family.
"""

from collections.abc import Mapping
from typing import Any

from media_server.errors import JobError
from media_server.films.children import (
    Shot,
    StoryboardUnusable,
    insert_join,
    insert_shot,
    list_children,
    list_shots,
)
from media_server.films.progress import describe_parts, show_progress, sum_totals
from media_server.jobs import events, transitions
from media_server.jobs.database import Transaction
from media_server.jobs.rows import load
from media_server.jobs.spec import Job
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs


def end_job(
    tx: Transaction,
    job: Job,
    status: Status,
    *,
    error: JobError | None = None,
    winning_attempt: int | None = None,
    values: Mapping[str, Any] | None = None,
    outcome: str | None = None,
) -> bool:
    """End a job and, if it is a film's child, take the film further; returns whether it was as the caller saw it."""
    ended = transitions.end(
        tx, job, status, error=error, winning_attempt=winning_attempt, values=values, outcome=outcome
    )
    if ended and job.parent_id is not None:
        advance(tx, job.parent_id)
    return ended


def cancel_job(tx: Transaction, job: Job) -> None:
    """Cancel a job: at once if it waits, by asking if it runs; a film with all of its children."""
    if job.status.is_terminal:
        return
    if job.kind == "film":
        transitions.request_cancel(tx, job)
        _cancel_children(tx, job)
        advance(tx, job.id)
    elif job.status is Status.QUEUED:
        end_job(tx, job, Status.CANCELLED)
    else:
        transitions.request_cancel(tx, job)


def child_started(tx: Transaction, child: Job) -> None:
    """Note that a worker has claimed a child: with the first, the film is in progress."""
    assert child.parent_id is not None
    film = load(tx, child.parent_id, with_deleted=True)
    if film.kind != "film" or film.status is not Status.QUEUED:
        return
    tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == film.id, jobs.c.status == Status.QUEUED)
        .values(status=Status.IN_PROGRESS, stage="storyboard", attempt=1, started_at=tx.now())
    )
    started = load(tx, film.id, with_deleted=True)
    events.append(tx, started, "job.started", {"status": started.status, "stage": started.stage})


def child_progressed(tx: Transaction, film_id: str) -> None:
    """Carry a child's progress over to its film; one that is deleted has no readers, and its storyboard is erased."""
    film = load(tx, film_id, with_deleted=True)
    if film.kind == "film" and film.status is Status.IN_PROGRESS and film.deleted_at is None:
        show_progress(tx, film, list_children(tx, film))


def advance(tx: Transaction, film_id: str) -> None:
    """Do what comes next in a film, as its children's rows say; doing it twice does nothing more."""
    film = load(tx, film_id, with_deleted=True)
    if film.kind != "film":
        return
    children = list_children(tx, film)
    if film.status.is_terminal:
        _count_latecomer(tx, film, children)
        return
    if film.cancel_requested_at is not None:
        if all(child.status.is_terminal for child in children):
            # the children of a film that is deleted are erased by now
            parts = describe_parts(children) if film.deleted_at is None else None
            transitions.end(tx, film, Status.CANCELLED, values={**sum_totals(children), "result": parts})
        return
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status in (Status.FAILED, Status.CANCELLED):
        _fail(tx, film, children, JobError("storyboard_failed", _why(storyboard, "The storyboard")))
    elif storyboard.status is Status.COMPLETED:
        try:
            _advance_shots(tx, film, children, (storyboard.result or {})["storyboard"])
        except StoryboardUnusable as unusable:
            _fail(tx, film, children, JobError("storyboard_failed", str(unusable)))


def _advance_shots(tx: Transaction, film: Job, children: list[Job], storyboard: dict[str, Any]) -> None:
    shots = list_shots(storyboard, children)
    if sum(shot.num_frames for shot in shots) != film.params["num_frames"]:
        raise StoryboardUnusable(
            f"The shots sum to {sum(shot.num_frames for shot in shots)} frames, "
            f"the film has {film.params['num_frames']}."
        )
    for shot in shots:
        clip = shot.clip
        if clip is None:
            insert_shot(tx, film, storyboard, shot.index, retry=0)
        elif clip.status is Status.FAILED and _may_retry(film, shot, clip):
            insert_shot(tx, film, storyboard, shot.index, retry=shot.retry + 1)
        elif clip.status in (Status.FAILED, Status.CANCELLED):
            _fail(tx, film, children, JobError("shot_failed", _why(clip, f"Shot {shot.index + 1}")))
            return
    join = next((child for child in children if child.kind == "join"), None)
    if join is None and all(shot.clip and shot.clip.status is Status.COMPLETED for shot in shots):
        insert_join(tx, film, storyboard, shots)
    elif join is not None and join.status is Status.COMPLETED:
        values = {**sum_totals(children), "result": describe_parts(children)}
        transitions.end(tx, film, Status.COMPLETED, values=values)
        return
    elif join is not None and join.status.is_terminal:
        _fail(tx, film, children, JobError("join_failed", _why(join, "Joining")))
        return
    show_progress(tx, film, list_children(tx, film))


def _may_retry(film: Job, shot: Shot, clip: Job) -> bool:
    # another seed does not make a bad request a good one
    return shot.retry < film.params["shot_retries"] and clip.error_code != "invalid_request"


def _fail(tx: Transaction, film: Job, children: list[Job], error: JobError) -> None:
    """End a film as failed; what was made stays, what waits or runs is cancelled."""
    _cancel_children(tx, film)
    children = list_children(tx, film)
    transitions.end(
        tx, film, Status.FAILED, error=error, values={**sum_totals(children), "result": describe_parts(children)}
    )


def _count_latecomer(tx: Transaction, film: Job, children: list[Job]) -> None:
    """Add to an ended film what a child took that still ran when it ended, and say how that child ended."""
    values = sum_totals(children)
    # a film that is deleted has no result, and gets none
    if film.result is not None:
        status = {child.id: child.status for child in children}
        shots = [{**shot, "status": status[shot["job_id"]]} for shot in film.result["shots"]]
        values["result"] = {**film.result, "shots": shots}
    tx.conn.execute(jobs.update().where(jobs.c.id == film.id).values(**values))


def _cancel_children(tx: Transaction, film: Job) -> None:
    for child in list_children(tx, film):
        if child.status is Status.QUEUED:
            transitions.end(tx, child, Status.CANCELLED)
        elif child.status is Status.IN_PROGRESS:
            transitions.request_cancel(tx, child)


def _why(child: Job, what: str) -> str:
    if child.status is Status.CANCELLED:
        return f"{what} was cancelled."
    return f"{what} failed with {child.error_code}: {child.error_message}"
