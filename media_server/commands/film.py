"""`media-server make`: a film from one sentence."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from media_server.client import Client
from media_server.commands.failure import CommandFailed
from media_server.commands.options import connect, say_json, service_options
from media_server.commands.progress import Bar, JobBars
from media_server.commands.serving import serve

FILES = {
    "video": "film.mp4",
    "storyboard": "storyboard.json",
    "timeline": "timeline.otio",
    "contact_sheet": "contact_sheet.png",
}


@click.command()
@click.argument("idea")
@click.option("--seconds", type=float, default=8.0, show_default=True, help="Length of the film.")
@click.option("--shots", type=int, help="Number of shots; left to the storyboard if not given.")
@click.option("--style", help="Style of every shot, in words.")
@click.option("--size", metavar="WxH", help="Size of the picture; the model's own if not given.")
@click.option("--seed", type=int, help="The same seed makes the same film again.")
@click.option("--model", help="Video model by name.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, help="Folder to fill.")
@click.option("--serve", "is_served", is_flag=True, help="Start a service for this film, and stop it afterwards.")
@click.option("--data", metavar="DIR", help="Data folder of the service that --serve starts.")
@service_options
def make(
    idea: str,
    seconds: float,
    shots: int | None,
    style: str | None,
    size: str | None,
    seed: int | None,
    model: str | None,
    out: Path,
    is_served: bool,
    data: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Make a film from one sentence: storyboard, shots, joining."""
    console = Console(stderr=True, quiet=as_json)
    request = {
        "idea": idea,
        "seconds": seconds,
        "shots": shots,
        "style": style,
        "size": size,
        "seed": seed,
        "model": model,
    }
    with _client(url, is_served, data, console) as client:
        film = _follow(client, client.post("/v1/films", request), console, is_served=is_served)
        paths = {name: out / file for name, file in FILES.items()}
        for name, path in paths.items():
            client.download(f"/v1/films/{film['id']}/content?variant={name}", path)
    if as_json:
        say_json({**film, "files": {name: str(path) for name, path in paths.items()}})
    else:
        click.echo("\n".join(str(path) for path in paths.values()))


@contextlib.contextmanager
def _client(url: str | None, is_served: bool, data: str | None, console: Console) -> Iterator[Client]:
    """Connect to the service there is, or to one that lives as long as this command."""
    if not is_served:
        if data is not None:
            raise click.UsageError("--data belongs to --serve")
        with connect(url) as client:
            yield client
        return
    if url is not None:
        raise click.UsageError("--serve starts a service of its own: --url names another")
    with serve(data, console) as address, connect(address) as client:
        yield client


def _follow(client: Client, film: dict[str, Any], console: Console, *, is_served: bool) -> dict[str, Any]:
    """Show a film's progress to its end; returns the film. A service of our own keeps none that nobody waits for.

    Raises CommandFailed if it did not become a film.
    """
    film_id = film["id"]
    console.print(f"{film_id} is queued", highlight=False)
    try:
        JobBars(console, _FilmBars(client, film_id)).show(client.job_events(film_id))
    except (KeyboardInterrupt, SystemExit):
        if is_served:
            # the next service on this data folder would go on with it
            with contextlib.suppress(CommandFailed):
                client.post(f"/v1/jobs/{film_id}/cancel")
                click.echo(f"{film_id} is asked to stop", err=True)
        else:
            click.echo(f"{film_id} goes on without us; `media-server cancel {film_id}` ends it", err=True)
        raise
    film = client.get_when_back(f"/v1/films/{film_id}")
    if film["status"] != "completed":
        error = film.get("error") or {"code": film["status"], "message": "the film was ended before it was finished"}
        raise CommandFailed(f"{film_id} {film['status']}: {error['message']} ({error['code']})")
    return film


class _FilmBars:
    """Names the bars of a film's children; asks the service for children it has not seen."""

    def __init__(self, client: Client, film_id: str) -> None:
        self.client = client
        self.film_id = film_id
        self.bars: dict[str, Bar] = {}

    def __call__(self, job_id: str) -> Bar:
        if job_id not in self.bars:
            children = self.client.get_when_back(f"/v1/films/{self.film_id}")["children"]
            self.bars.update({child["id"]: _bar(child) for child in children})
        return self.bars.setdefault(job_id, Bar(job_id.partition("_")[0]))


def _bar(child: dict[str, Any]) -> Bar:
    if child["kind"] == "video" and child["shot"] is not None:
        again = f" ({child['retry'] + 1})" if child["retry"] else ""
        return Bar(f"shot {child['shot'] + 1}{again}", child["shot"])
    return Bar({"join": "joining"}.get(child["kind"], child["kind"]))
