"""`media-server keys`: make, list and revoke API keys, and change what they may use.

These work on the database that the settings name, beside a running service or without one: who can write it needs no
key. What they change holds from the next request on.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from media_server.commands.options import json_option, say_json
from media_server.errors import ConfigurationError, InvalidRequest
from media_server.jobs.database import Database, make_data_dir, migrate, open_database
from media_server.keys import SCOPES, ApiKey, Scope, change_limits, create_key, get_key, list_keys, revoke_key
from media_server.limits import KeyLimits, parse_amount, parse_budget
from media_server.settings import load_settings

Command = TypeVar("Command", bound=Callable[..., Any])

_DAY_S = 86400.0


def _place_options(command: Command) -> Command:
    data = click.option("--data", metavar="DIR", help="Data folder of the service.")
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    return data(click.option("--config", type=file, metavar="FILE", help="TOML file of settings.")(command))


def _limit_options(command: Command) -> Command:
    budget = "[LABEL:]gpu_seconds|tokens=AMOUNT[/month]: what the key, or one project label of its, may spend."
    for option in (
        click.option("--queued-jobs", metavar="N", help="Jobs that may wait at a time."),
        click.option("--text-streams", metavar="N", help="Text requests at a time."),
        click.option("--work-per-day", metavar="N", help="Steps x pixels x frames a day, such as 2e12."),
        click.option("--storage", metavar="BYTES", help="Files that may be kept, such as 10G."),
        click.option("--budget", "budgets", multiple=True, metavar="BUDGET", help=budget + " May be repeated."),
        click.option("--zero-retention/--retention", default=None, help="Forget its requests' words, or keep them."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("name")
@click.option(
    "--scope", "scopes", type=click.Choice(SCOPES), multiple=True, default=("submit", "read"), show_default=True
)
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), help="How long it is valid; for ever if not given."
)
@_limit_options
@_place_options
@json_option
def create(
    name: str,
    scopes: tuple[Scope, ...],
    days: float | None,
    queued_jobs: str | None,
    text_streams: str | None,
    work_per_day: str | None,
    storage: str | None,
    budgets: tuple[str, ...],
    zero_retention: bool | None,
    data: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Make an API key and show it: it is kept nowhere, and cannot be shown again."""
    limits = _limits(queued_jobs, text_streams, work_per_day, storage, budgets)
    limits = limits.model_copy(update={"zero_retention": bool(zero_retention)})
    lifetime_s = None if days is None else days * _DAY_S
    db = _open(data, config, is_new_fine=True)
    key, text = create_key(db, name, scopes=scopes, limits=limits, lifetime_s=lifetime_s)
    if as_json:
        say_json({**_fields(key), "key": text})
        return
    click.echo(text)
    click.echo(f"{key.id} ({name}): {', '.join(sorted(key.scopes))}; keep it now, it is not shown again", err=True)


@click.command(name="list")
@_place_options
@json_option
def list_(data: str | None, config: Path | None, as_json: bool) -> None:
    """List the API keys, revoked ones too."""
    found = list_keys(_open(data, config))
    if as_json:
        say_json([_fields(key) for key in found])
        return
    table = Table(box=None, header_style="bold")
    # the prefix names a key too, and stands in the key itself; ids are in --json
    table.add_column("prefix", no_wrap=True)
    for column in ("name", "scopes", "limits", "used", "state"):
        table.add_column(column, overflow="fold")
    for key in found:
        limits = _limits_text(key.limits)
        used = "never" if key.last_used_at is None else _date(key.last_used_at)
        table.add_row(key.prefix, key.name, " ".join(sorted(key.scopes)), limits, used, _state(key))
    Console().print(table)


@click.command()
@click.argument("key")
@_place_options
@json_option
def revoke(key: str, data: str | None, config: Path | None, as_json: bool) -> None:
    """Revoke an API key, named by its id, its prefix or its name; its jobs go on."""
    revoked = revoke_key(_open(data, config), key)
    say_json(_fields(revoked)) if as_json else click.echo(f"{revoked.id} ({revoked.name}) is revoked")


@click.command()
@click.argument("key")
@_limit_options
@click.option("--none", "is_none", is_flag=True, help="First take all limits off; those given here are set then.")
@_place_options
@json_option
def limit(
    key: str,
    queued_jobs: str | None,
    text_streams: str | None,
    work_per_day: str | None,
    storage: str | None,
    budgets: tuple[str, ...],
    zero_retention: bool | None,
    is_none: bool,
    data: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Change what an API key may use; limits that are not named stay, budgets are given all anew."""
    given = _limits(queued_jobs, text_streams, work_per_day, storage, budgets).model_dump(exclude_defaults=True)
    db = _open(data, config)
    before = get_key(db, key).limits
    if is_none:
        # what is no limit stays
        before = KeyLimits(zero_retention=before.zero_retention)
    if zero_retention is not None:
        given["zero_retention"] = zero_retention
    changed = change_limits(db, key, KeyLimits.model_validate({**before.model_dump(), **given}))
    if as_json:
        say_json(_fields(changed))
    else:
        click.echo(f"{changed.id} ({changed.name}): {_limits_text(changed.limits) or 'no limits'}")


def _open(data: str | None, config: Path | None, *, is_new_fine: bool = False) -> Database:
    """Open the database; make it if the service has never run and that is fine: a key may come before its first start.

    Raises ConfigurationError if the data folder, or the database in it, cannot be used.
    """
    settings = load_settings(config, data_dir=data)
    file = make_url(settings.database).database if settings.database.startswith("sqlite") else None
    if file is not None and not is_new_fine and not Path(file).exists():
        raise ConfigurationError(f"data: there is no database at {file}.", param="data", value=str(settings.data_dir))
    if settings.database_url is None:
        make_data_dir(settings.data_dir)
    try:
        db = open_database(settings.database)
        migrate(db)
    except (OSError, OperationalError) as error:
        reason = error.orig if isinstance(error, OperationalError) else error.strerror
        message = f"data: the database of {settings.data_dir} cannot be opened: {reason}."
        raise ConfigurationError(message, param="data", value=str(settings.data_dir)) from error
    return db


def _limits(
    queued_jobs: str | None,
    text_streams: str | None,
    work_per_day: str | None,
    storage: str | None,
    budgets: tuple[str, ...],
) -> KeyLimits:
    def whole(param: str, text: str | None) -> int | None:
        amount = None if text is None else parse_amount(text, param=param)
        if amount is not None and amount != int(amount):
            raise InvalidRequest(f"{param}: a whole number; got {text!r}.", param=param, value=text)
        return None if amount is None else int(amount)

    return KeyLimits(
        queued_jobs=whole("queued-jobs", queued_jobs),
        text_streams=whole("text-streams", text_streams),
        work_per_day=None if work_per_day is None else parse_amount(work_per_day, param="work-per-day"),
        storage_bytes=whole("storage", storage),
        budgets=tuple(parse_budget(text) for text in budgets),
    )


def _limits_text(limits: KeyLimits) -> str:
    quotas = limits.model_dump(exclude={"budgets", "zero_retention"}, exclude_none=True)
    said = [*(f"{name}={value:.15g}" for name, value in quotas.items()), *map(str, limits.budgets)]
    return ", ".join([*said, *(["zero retention"] if limits.zero_retention else [])])


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": sorted(key.scopes),
        "limits": key.limits.model_dump(mode="json", exclude_defaults=True),
        "created_at": int(key.created_at),
        "last_used_at": None if key.last_used_at is None else int(key.last_used_at),
        "expires_at": None if key.expires_at is None else int(key.expires_at),
        "revoked_at": None if key.revoked_at is None else int(key.revoked_at),
    }


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_date(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"expired {_date(key.expires_at)}" if key.expires_at <= time.time() else f"until {_date(key.expires_at)}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
