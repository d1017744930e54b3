"""`media-server clip`: one clip from a prompt, or from a picture and a prompt."""

from pathlib import Path

import click
from rich.console import Console

from media_server.commands.failure import CommandFailed
from media_server.commands.options import connect, say_json, service_options
from media_server.commands.progress import Bar, JobBars

_Picture = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("prompt")
@click.option("--seconds", type=float, help="Length; the model's own if not given.")
@click.option("--size", metavar="WxH", help="Size of the picture; the model's own if not given.")
@click.option("--seed", type=int, help="The same seed makes the same clip again.")
@click.option("--steps", type=int, help="Denoise steps.")
@click.option("--guidance", type=float, help="Guidance scale.")
@click.option("--negative", metavar="TEXT", help="What must not be seen.")
@click.option("--image", type=_Picture, help="Picture that the clip begins with.")
@click.option("--last-image", type=_Picture, help="Picture that the clip ends with.")
@click.option("--model", help="Video model by name.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("clip.mp4"), show_default=True, help="File to write."
)
@service_options
def clip(
    prompt: str,
    seconds: float | None,
    size: str | None,
    seed: int | None,
    steps: int | None,
    guidance: float | None,
    negative: str | None,
    image: Path | None,
    last_image: Path | None,
    model: str | None,
    out: Path,
    url: str | None,
    as_json: bool,
) -> None:
    """Make one clip from a prompt and, if given, a picture."""
    console = Console(stderr=True, quiet=as_json)
    request = {
        "prompt": prompt,
        "model": model,
        "seconds": None if seconds is None else f"{seconds:g}",
        "size": size,
        "seed": seed,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": negative,
    }
    files = {name: path for name, path in (("input_reference", image), ("last_frame", last_image)) if path is not None}
    with connect(url) as client:
        video = client.post("/v1/videos", request, files)
        for adjustment in video.get("adjustments") or ():
            console.print(f"adjusted: {adjustment}", highlight=False, markup=False)
        try:
            JobBars(console, lambda _: Bar("clip")).show(client.job_events(video["id"]))
        except KeyboardInterrupt:
            click.echo(f"{video['id']} goes on without us; `media-server cancel {video['id']}` ends it", err=True)
            raise
        video = client.get_when_back(f"/v1/videos/{video['id']}")
        if video["status"] != "completed":
            error = video.get("error") or {"code": video["status"], "message": "the clip was ended before it was done"}
            raise CommandFailed(f"{video['id']} {video['status']}: {error['message']} ({error['code']})")
        client.download(f"/v1/videos/{video['id']}/content", out)
    if as_json:
        say_json({**video, "files": {"video": str(out)}})
    else:
        click.echo(str(out))
