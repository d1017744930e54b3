"""How far a film is, what it is made of, and what it took: read from its children."""

from typing import Any

from media_server.films.children import list_shots
from media_server.jobs import events
from media_server.jobs.database import Transaction
from media_server.jobs.spec import Job
from media_server.jobs.states import Status
from media_server.jobs.tables import jobs

# where each stage's share of the film's progress begins
_STORYBOARD_UNTIL, _SHOTS_UNTIL = 10.0, 90.0


def show_progress(tx: Transaction, film: Job, children: list[Job]) -> None:
    """Write a film's stage and progress, and an event if a reader would see a difference."""
    stage, step, total_steps, progress = _stage(children)
    progress = max(progress, film.progress)
    tx.conn.execute(
        jobs.update()
        .where(jobs.c.id == film.id, jobs.c.status == Status.IN_PROGRESS)
        .values(stage=stage, step=step, total_steps=total_steps, progress=progress)
    )
    # a step of a shot is a fraction of the film: say what a reader can see
    if (stage, step, int(progress)) != (film.stage, film.step, int(film.progress)):
        data = {"stage": stage, "step": step, "total_steps": total_steps, "progress": progress}
        events.append(tx, film, "job.progress", data)


def _stage(children: list[Job]) -> tuple[str, int | None, int | None, float]:
    """Give stage, shots done, shots in all, and progress in percent."""
    join = next((child for child in children if child.kind == "join"), None)
    if join is not None:
        return "joining", None, None, _SHOTS_UNTIL + (100.0 - _SHOTS_UNTIL) * join.progress / 100.0
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status is not Status.COMPLETED:
        return "storyboard", None, None, _STORYBOARD_UNTIL * storyboard.progress / 100.0
    shots = list_shots((storyboard.result or {})["storyboard"], children)
    mean = sum(shot.clip.progress for shot in shots if shot.clip) / len(shots)
    done = sum(1 for shot in shots if shot.clip and shot.clip.status is Status.COMPLETED)
    return "shots", done, len(shots), _STORYBOARD_UNTIL + (_SHOTS_UNTIL - _STORYBOARD_UNTIL) * mean / 100.0


def describe_parts(children: list[Job]) -> dict[str, Any] | None:
    """Say what a film is made of, as far as it was made."""
    storyboard = next(child for child in children if child.kind == "storyboard")
    if storyboard.status is not Status.COMPLETED:
        return None
    board = (storyboard.result or {}).get("storyboard")
    clips = sorted(
        (child for child in children if child.kind == "video"),
        key=lambda clip: (clip.params["film"]["shot"], clip.params["film"]["retry"]),
    )
    latest = {clip.params["film"]["shot"]: clip for clip in clips}
    join = next((child for child in children if child.kind == "join"), None)
    return {
        "storyboard": board,
        "shots": [
            {
                "shot": index,
                "job_id": clip.id,
                "status": clip.status,
                "seed": clip.params["seed"],
                "retries": clip.params["film"]["retry"],
                "num_frames": clip.params["num_frames"],
            }
            for index, clip in sorted(latest.items())
        ],
        "storyboard_job_id": storyboard.id,
        "join_job_id": join.id if join else None,
    }


def sum_totals(children: list[Job]) -> dict[str, Any]:
    """Give the columns of what all of a film's jobs took."""
    peaks = [child.peak_memory_bytes for child in children if child.peak_memory_bytes is not None]
    return {
        "gpu_seconds": sum(child.gpu_seconds or 0.0 for child in children),
        "peak_memory_bytes": max(peaks, default=None),
    }
