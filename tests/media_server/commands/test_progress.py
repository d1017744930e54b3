"""What a person sees of a film while it is made, from the events alone."""

import io
from typing import Any

from rich.console import Console

from media_server.commands.progress import Bar, JobBars

NAMES = {"storyboard_1": Bar("storyboard"), "video_1": Bar("shot 1", 0), "join_1": Bar("joining")}


def event(job_id: str, type: str, attempt: int = 1, **data: Any) -> dict[str, Any]:
    return {"job_id": job_id, "type": type, "attempt": attempt, "data": data}


FILM = [
    event("film_1", "job.queued"),
    event("storyboard_1", "job.queued"),
    event("storyboard_1", "job.started"),
    event("storyboard_1", "job.progress", progress=20.0, text='{"shots": [{"prompt": "a red ball '),
    event("storyboard_1", "job.progress", progress=60.0, text='rolls"}, {"prom'),
    event("storyboard_1", "job.progress", progress=90.0, text='pt": "a blue \\"friend\\""}'),
    event("storyboard_1", "storyboard.completed", status="completed"),
    event("video_1", "job.started"),
    event("video_1", "job.progress", stage="denoise", step=3, total_steps=12, progress=25.0, eta_s=9.2),
    event("video_1", "job.attempt", attempt=2),
    event("video_1", "video.failed", error={"code": "out_of_memory", "message": "too large"}),
    event("join_1", "join.completed", status="completed"),
    event("film_1", "film.completed"),
]


def shown(*, is_terminal: bool) -> tuple[str, JobBars]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120, color_system=None)
    bars = JobBars(console, NAMES.__getitem__)
    bars.show(FILM)
    return out.getvalue(), bars


def test_without_a_terminal_each_change_of_state_is_a_line() -> None:
    text, _ = shown(is_terminal=False)
    assert text.splitlines() == [
        "storyboard: started",
        "  1. a red ball rolls",
        '  2. a blue \\"friend\\"',
        "storyboard: done",
        "shot 1: started",
        "shot 1: started (attempt 2)",
        "shot 1: failed: too large",
        "joining: done",
    ]


def test_on_a_terminal_every_job_has_a_bar_with_its_stage() -> None:
    _, bars = shown(is_terminal=True)
    tasks = bars.progress.tasks
    assert [(task.description, task.completed) for task in tasks] == [
        ("storyboard", 100.0),
        ("shot 1", 0.0),
        ("joining", 100.0),
    ]
    bars.take(event("video_1", "job.progress", stage="denoise", step=3, total_steps=12, progress=25.0, eta_s=9.2))
    assert tasks[1].fields["detail"] == "denoising 3/12, 9 s left" and tasks[1].completed == 25.0
