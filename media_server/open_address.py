"""Whom the service's address is open to: a service without keys listens to this machine alone."""

import ipaddress

from media_server.errors import ConfigurationError
from media_server.jobs.database import Database
from media_server.keys import has_valid_keys
from media_server.settings import Settings


def refuse_open_address(settings: Settings, db: Database) -> None:
    """Raise ConfigurationError if the service would listen to other machines without a key that opens it."""
    if is_loopback(settings.host) or has_valid_keys(db):
        return
    raise ConfigurationError(
        f"Without a valid API key the service listens on loopback only, and {settings.host} is not: make a key first "
        "with `media-server keys create NAME`, or listen on 127.0.0.1.",
        param="host",
        rule="loopback, or a valid key",
        value=settings.host,
    )


def is_loopback(host: str) -> bool:
    """Say whether a bind address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
