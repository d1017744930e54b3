"""`media-server usage`: what was used, as a table or as CSV."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from media_server.commands.options import connect, say_json, service_options

_GROUPS = click.Choice(["key", "film", "shot", "label", "model", "job"])
_AMOUNTS = ("gpu_seconds", "prompt_tokens", "completion_tokens", "storage_bytes")
_DATE = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


@click.command()
@click.option(
    "--by", "groups", type=_GROUPS, multiple=True, default=("key",), show_default=True, help="May be repeated."
)
@click.option("--since", type=_DATE, help="What was used from then on (UTC).")
@click.option("--until", type=_DATE, help="What was used before then (UTC).")
@click.option("--key", "key_id", metavar="ID", help="Only this key's.")
@click.option("--label", help="Only of this project label.")
@click.option("--film", "film_id", metavar="ID", help="Only of this film.")
@click.option(
    "--csv", "csv_path", type=click.Path(path_type=Path), metavar="FILE", help="Write CSV; - is standard output."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Lines of the table.")
@service_options
def usage(
    groups: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    key_id: str | None,
    label: str | None,
    film_id: str | None,
    csv_path: Path | None,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Report GPU seconds, tokens and storage by key, film, shot, label, model or job."""
    query = {
        "group_by": list(groups),
        "since": _seconds(since),
        "until": _seconds(until),
        "key_id": key_id,
        "label": label,
        "film_id": film_id,
    }
    with connect(url) as client:
        if csv_path is not None:
            content = client.get_text("/v1/usage/export", **query).encode()
            if str(csv_path) == "-":
                sys.stdout.buffer.write(content)
            else:
                csv_path.write_bytes(content)
            return
        found = client.get("/v1/usage", **query, limit=limit)
    if as_json:
        say_json(found["data"])
        return
    lines = found["data"]
    columns = [name for name in (lines[0] if lines else ()) if any(line[name] is not None for line in lines)]
    table = Table(box=None, header_style="bold")
    for name in columns:
        is_amount = name in _AMOUNTS
        table.add_column(name.replace("_", " "), justify="right" if is_amount else "left", overflow="fold")
    for line in lines:
        table.add_row(*(_shown(line[name]) for name in columns))
    console = Console()
    console.print(table)
    if found["has_more"]:
        console.print(f"more than {limit} lines; --csv writes all of them", style="dim")


def _seconds(date: datetime | None) -> float | None:
    return None if date is None else date.replace(tzinfo=UTC).timestamp()


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
