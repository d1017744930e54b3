"""Who is asking, and whether a browser was tricked into asking for somebody else.

Keys are not issued yet: every caller is the anonymous owner, and the service listens on loopback unless told otherwise.
`Owner` is the dependency of every route, and each id, list and stream is looked up for it, so that keys come in here.
A page of any site can post a form to 127.0.0.1, and browsers say so in `Origin`; or it can point a name of its own
here, and browsers say so in `Host`. Both are refused.
"""

import ipaddress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.requests import Request

from media_server.errors import Forbidden, NotFound
from media_server.jobs.spec import Job, JobKind
from media_server.settings import Settings

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Caller:
    """The owner of what a request makes, and of what it may see; no id is the anonymous owner."""

    owner_key_id: str | None = None

    def check(self, job: Job, *, kind: JobKind | None = None) -> Job:
        """Give the job back if it is this caller's, and of that kind.

        Raises NotFound otherwise: what belongs to others does not exist.
        """
        if job.owner_key_id != self.owner_key_id or kind not in (None, job.kind):
            raise NotFound(f"No {kind or 'job'} has the id {job.id!r}.", param="id", value=job.id)
        return job


def identify(request: Request) -> Caller:
    """Find out who is asking.

    Raises Forbidden if a page of another origin sends a request that changes something, or reaches a service on
    loopback by a name that is not its own.
    """
    settings: Settings = request.app.state.settings
    own = urlsplit(settings.url).hostname if settings.url else None
    host = request.url.hostname or ""
    if is_loopback(settings.host) and not is_loopback(host) and host != own:
        raise Forbidden(
            "This service listens on loopback and is reached by a loopback name; to give it another, set `url`.",
            code="unknown_host",
            rule="Host is a loopback name, or that of the setting `url`",
            value=host[:200],
        )
    origin = request.headers.get("origin")
    if origin is not None and request.method not in _SAFE_METHODS and _netloc(origin) != request.url.netloc:
        raise Forbidden(
            "Requests that change something are not taken from pages of another origin.",
            code="cross_origin",
            rule="Origin is this service",
            value=origin[:200],
        )
    return Caller()


Owner = Annotated[Caller, Depends(identify)]


def _netloc(url: str) -> str | None:
    """Give host and port of a URL; None if it is none, such as `null` or half an IPv6 address."""
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Say whether a bind address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
