"""From a job's row to the object that the API answers with; the one border between the store's types and HTTP's."""

from collections.abc import Mapping, Sequence
from typing import Any

from media_server import http_objects as objects
from media_server.errors import NotFound
from media_server.ids import prefix_of
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.place import Place, eta_of
from media_server.jobs.spec import Job
from media_server.jobs.states import Status

# parameters that have a field of their own on the video object, or are of no concern to a caller
_NOT_PARAMETERS = {
    "fps",
    "num_frames",
    "seed",
    "film",
    "width",
    "height",
    "size",
    "seconds",
    "inputs",
    "adjusted",
    "model_hash",
    "source",
}


# of jobs that wait, by id
Places = Mapping[str, Place]


def progress_fields(db: Database, job: Job, places: Places | None = None) -> dict[str, Any]:
    """Give the fields that each job object has; `places` are those in their queues, if they are known already."""
    place = _place(db, job) if places is None else places.get(job.id)
    # rows that earlier releases completed still have the step that was beaten last
    is_counting = job.status is not Status.COMPLETED
    return {
        "status": job.status,
        "progress": int(job.progress),
        "stage": job.stage,
        "step": job.step if is_counting else None,
        "total_steps": job.total_steps if is_counting else None,
        "eta_s": job.eta_s if place is None else eta_of(job, place),
        "queue_position": None if place is None else place.ahead,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "is_cancel_requested": job.cancel_requested_at is not None,
        "created_at": int(job.created_at),
        "started_at": _whole(job.started_at),
        "completed_at": _whole(job.completed_at),
        "expires_at": _whole(job.expires_at),
        "gpu_seconds": job.gpu_seconds,
        "peak_memory_bytes": job.peak_memory_bytes,
        "predicted_gpu_seconds": job.predicted_gpu_seconds,
        "predicted_peak_memory_bytes": job.predicted_peak_memory_bytes,
        "error": failure_of(job),
        "metadata": job.metadata,
        "label": job.label,
    }


def video_object(db: Database, job: Job, places: Places | None = None) -> objects.Video:
    """Describe a clip."""
    params = job.params
    is_made = job.status is Status.COMPLETED
    num_frames = _num_frames(job)
    source = params.get("source") or {}
    return objects.Video(
        id=job.id,
        object="video",
        model=job.model or "",
        prompt=job.prompts.get("prompt"),
        seconds=f"{num_frames / params['fps']:g}",
        size=f"{params['width']}x{params['height']}",
        remixed_from_video_id=job.remixed_from_id,
        extended_from_video_id=source.get("id"),
        fps=params["fps"],
        num_frames=num_frames,
        seed=params["seed"],
        parent_id=job.parent_id,
        film_id=film_id_of(job),
        adjustments=params.get("adjusted", []),
        parameters={name: value for name, value in params.items() if name not in _NOT_PARAMETERS},
        report=job.result,
        content_url=f"/v1/videos/{job.id}/content" if is_made else None,
        manifest_url=f"/v1/videos/{job.id}/content?variant=manifest" if is_made else None,
        **progress_fields(db, job, places),
    )


def film_object(db: Database, job: Job, children: list[Job]) -> objects.Film:
    """Describe a film; `children` are its jobs, in order."""
    params = job.params
    return objects.Film(
        id=job.id,
        object="film",
        model=job.model,
        idea=job.prompts.get("idea"),
        seconds=params["seconds"],
        num_frames=params["num_frames"],
        shots=params["shots"],
        style=job.prompts.get("style"),
        size=params["size"],
        fps=params["fps"],
        seed=params["seed"],
        storyboard=_storyboard(job, children),
        children=[child_object(child) for child in children],
        report=job.result and {name: value for name, value in job.result.items() if name != "storyboard"},
        content_url=f"/v1/films/{job.id}/content" if job.status is Status.COMPLETED else None,
        **progress_fields(db, job),
    )


def job_object(db: Database, job: Job, places: Places | None = None) -> objects.Job:
    """Describe a job of any kind."""
    return objects.Job(
        id=job.id,
        object="job",
        kind=job.kind,
        model=job.model,
        pool=job.pool,
        priority=job.priority,
        parent_id=job.parent_id,
        root_id=job.root_id,
        result=job.result,
        url=url_of(job),
        events_url=f"/v1/jobs/{job.id}/events",
        **progress_fields(db, job, places),
    )


def child_object(job: Job) -> objects.Child:
    """Describe a job of a film in short."""
    film = job.params.get("film") or {}
    return objects.Child(
        id=job.id,
        kind=job.kind,
        status=job.status,
        progress=int(job.progress),
        stage=job.stage,
        shot=film.get("shot"),
        retry=film.get("retry"),
        error=failure_of(job),
        url=url_of(job),
    )


def failure_of(job: Job) -> objects.JobFailure | None:
    """Say why a job failed, if it did."""
    if job.error_code is None:
        return None
    return objects.JobFailure(code=job.error_code, message=job.error_message or "")


def film_id_of(job: Job) -> str | None:
    """Name the film that a job belongs to, if it does."""
    return job.root_id if job.root_id != job.id and prefix_of(job.root_id) == "film" else None


def url_of(job: Job) -> str:
    """Name the resource that answers for a job as what it is."""
    collection = {"video": "videos", "film": "films", "storyboard": "storyboards"}.get(job.kind, "jobs")
    return f"/v1/{collection}/{job.id}"


def page_places(db: Database, page: Sequence[Job]) -> Places:
    """Find the places of the jobs of a page that wait, in one go."""
    waiting = [job for job in page if _waits(job)]
    return store.find_places(db, waiting) if waiting else {}


def list_page(items: list[Any], has_more: bool) -> dict[str, Any]:
    """Make the fields of a page; each item has an `id`."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }


def poll_after_ms(status: Status, eta_s: float | None) -> str:
    """Advise a poller: often when the end is near, seldom when it is far.

    The openai package reads this from the first answer only and keeps to it, so it stays short.
    """
    if status.is_terminal:
        return "1000"
    return str(min(2000, max(250, int((eta_s if eta_s is not None else 5.0) * 100))))


def _num_frames(clip: Job) -> int:
    """Count the frames of a clip's file: as it was written, or as it will be."""
    written = (clip.result or {}).get("file")
    if isinstance(written, dict) and "num_frames" in written:
        # a chain that its drift policy has stopped is shorter than what was asked for
        return int(written["num_frames"])
    # an extension's file begins with the clip that it continues
    return int(clip.params["num_frames"]) + int((clip.params.get("source") or {}).get("num_frames", 0))


def _storyboard(film: Job, children: list[Job]) -> dict[str, Any] | None:
    made = next((child.result for child in children if child.kind == "storyboard" and child.result), None)
    return (made or film.result or {}).get("storyboard")


def _waits(job: Job) -> bool:
    # nobody claims a film: its children wait, each in its own queue
    return job.status is Status.QUEUED and job.kind != "film"


def _place(db: Database, job: Job) -> Place | None:
    if not _waits(job):
        return None
    if job.place is not None:
        return job.place
    try:
        return store.find_place(db, job.id)
    except NotFound:
        # deleted between two looks
        return None


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)
