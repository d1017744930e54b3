"""`media-server jobs` and `media-server cancel`: what is queued, running and done, and how to end it."""

import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from media_server.commands.options import connect, say_json, service_options
from media_server.commands.progress import Bar, JobBars

_WIDE = 200


@click.command()
@click.argument("job_id", required=False)
@click.option("--kind", type=click.Choice(["video", "film", "storyboard", "join"]), help="Only jobs of this kind.")
@click.option("--status", type=click.Choice(["queued", "in_progress", "completed", "failed", "cancelled"]))
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True)
@click.option("--watch", "is_watched", is_flag=True, help="Follow the job to its end.")
@service_options
def jobs(
    job_id: str | None,
    kind: str | None,
    status: str | None,
    limit: int,
    is_watched: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """List jobs, newest first, or show one."""
    if is_watched and job_id is None:
        raise click.UsageError("--watch needs the id of a job")
    with connect(url) as client:
        if job_id is None:
            found = client.get("/v1/jobs", kind=kind, status=status, limit=limit)["data"]
        else:
            if is_watched:
                bars = JobBars(Console(stderr=True, quiet=as_json), lambda id: Bar(id.partition("_")[0]))
                bars.show(client.job_events(job_id))
                found = [client.get_when_back(f"/v1/jobs/{job_id}")]
            else:
                found = [client.get(f"/v1/jobs/{job_id}")]
    if as_json:
        say_json(found if job_id is None else found[0])
    else:
        _show(found)


@click.command()
@click.argument("job_id")
@service_options
def cancel(job_id: str, url: str | None, as_json: bool) -> None:
    """Cancel a job: at once if it is queued, at its next step if it runs."""
    with connect(url) as client:
        job = client.post(f"/v1/jobs/{job_id}/cancel")
    if as_json:
        say_json(job)
    elif job["status"] in ("queued", "in_progress"):
        click.echo(f"{job_id} is asked to stop")
    else:
        click.echo(f"{job_id} is {job['status']}")


def _show(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    # an id is copied to other commands, a state is looked for
    table.add_column("id", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for column in ("stage", "progress", "model", "created"):
        table.add_column(column, overflow="fold")
    for job in found:
        stage = job["stage"] or ""
        if job["status"] == "in_progress" and job["total_steps"]:
            stage += f" {job['step'] or 0}/{job['total_steps']}"
        if job["queue_position"] is not None:
            stage = f"{job['queue_position']} before it"
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["created_at"]))
        table.add_row(job["id"], job["status"], stage, f"{job['progress']} %", job["model"] or "", created)
    console = Console()
    if not console.is_terminal:
        # whoever reads this line by line is not to find a row in several
        console = Console(width=_WIDE)
    console.print(table)
    for job in found:
        if job["error"]:
            console.print(f"{job['id']}: {job['error']['message']} ({job['error']['code']})", soft_wrap=True)
