"""Options that several commands share, and the two ways in which a command answers: for people and for programs."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from media_server.client import Client, client_of
from media_server.settings import load_settings

Command = TypeVar("Command", bound=Callable[..., Any])

url_option = click.option("--url", metavar="URL", help="Address of the service (MEDIA_SERVER_URL).")
json_option = click.option("--json", "as_json", is_flag=True, help="Answer with JSON on standard output, nothing else.")


def service_options(command: Command) -> Command:
    """Add --url and --json."""
    return url_option(json_option(command))


def connect(url: str | None) -> Client:
    """Make a client of the service that --url or the settings name."""
    return client_of(load_settings(url=url))


def say_json(value: object) -> None:
    """Write a value as JSON on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
