"""`media-server backup` and `media-server restore`: the data folder, copied while the service runs, and put back."""

from pathlib import Path

import click
from sqlalchemy.exc import OperationalError

from media_server import backup as backups
from media_server.commands.failure import CommandFailed
from media_server.commands.options import json_option, say_json
from media_server.settings import Settings, load_settings

_config = click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help="TOML file."
)
_data = click.option("--data", metavar="DIR", help="Data folder of the service.")


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@_data
@_config
@json_option
def backup(target: Path, data: str | None, config: Path | None, as_json: bool) -> None:
    """Copy jobs, keys and files to a new folder, or to a new file that ends in .tar; the service may run meanwhile."""
    settings = load_settings(config, data_dir=data)
    try:
        report = backups.back_up(settings, target)
    except (OSError, OperationalError) as error:
        raise CommandFailed(f"the backup was not made: {_reason(error)}") from error
    _say(report, target, as_json=as_json)
    for line in _left_out(settings):
        click.echo(line, err=True)
    if report.bad:
        raise CommandFailed(f"{len(report.bad)} files are gone or damaged and are not in the backup: {report.bad[0]} …")


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@_data
@_config
@json_option
def restore(source: Path, data: str | None, config: Path | None, as_json: bool) -> None:
    """Put a backup into an empty data folder; start the service on it afterwards."""
    settings = load_settings(config, data_dir=data)
    try:
        report = backups.restore(settings, source)
    except OSError as error:
        raise CommandFailed(f"the backup was not restored: {_reason(error)}") from error
    _say(report, settings.data_dir, as_json=as_json)


def _say(report: backups.Report, place: Path, *, as_json: bool) -> None:
    if as_json:
        fields = {"parts": report.parts, "files": report.num_files, "bytes": report.size_bytes, "bad": report.bad}
        say_json({"place": str(place), **fields})
    else:
        parts = " and ".join(report.parts) or "the webhook secret alone"
        click.echo(f"{place}: {parts}, {report.num_files} files, {report.size_bytes} bytes")


def _left_out(settings: Settings) -> list[str]:
    """Say what an operator backs up by other means."""
    lines = []
    if not settings.database.startswith("sqlite"):
        lines.append("the database is PostgreSQL's: run pg_dump first, then this, so that its files are all here")
    if settings.artifacts_url is not None and "://" in settings.artifacts_url:
        lines.append("the files are in S3: back the bucket up by its own means")
    return lines


def _reason(error: OSError | OperationalError) -> str:
    if isinstance(error, OperationalError):
        return str(error.orig)
    return f"{error.filename or 'the disk'}: {error.strerror}" if error.strerror else str(error)
