"""`media-server models`: what the service has loaded, or what this machine is configured to load."""

import click
from rich.console import Console
from rich.table import Table

from media_server.commands.options import connect, say_json, service_options
from media_server.settings import load_settings


@click.command()
@click.option("--local", "is_local", is_flag=True, help="This machine's configuration; needs no running service.")
@service_options
def models(is_local: bool, url: str | None, as_json: bool) -> None:
    """List the models of the service, or with --local those configured here."""
    if is_local:
        _show_local(as_json)
        return
    with connect(url) as client:
        found = client.get("/v1/models")["data"]
    if as_json:
        say_json(found)
        return
    table = Table("model", "kind", "ready", "licence", "defaults", box=None, header_style="bold")
    for model in found:
        card = model.get("card") or {}
        size = (card.get("size") or {}).get("default", "")
        fps = f" {card['fps']} fps" if card.get("fps") else ""
        ready = "yes" if model.get("is_ready") else "no"
        table.add_row(model["id"], model.get("kind", ""), ready, card.get("license", ""), f"{size}{fps}")
    Console().print(table)


def _show_local(as_json: bool) -> None:
    settings = load_settings()
    found = [
        {
            "name": entry.name,
            "kind": entry.kind,
            "pool": entry.pool_name,
            "path": str(settings.model_path(entry)),
            "is_present": settings.model_path(entry).is_dir(),
        }
        for entry in settings.models
    ]
    if as_json:
        say_json(found)
        return
    table = Table("model", "kind", "pool", "present", box=None, header_style="bold")
    table.add_column("folder", overflow="fold")
    for model in found:
        # the embedded language model is converted when the service first starts
        table.add_row(*(str(model[name]) for name in ("name", "kind", "pool", "is_present", "path")))
    Console().print(table)
