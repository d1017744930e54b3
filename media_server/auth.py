"""Who is asking, what they may do, and whether a browser was tricked into asking for somebody else.

Once a key was made, every request needs one: `read` to look, `submit` to make, cancel and delete, `admin` for what is
everybody's. Without any key the service is this machine's alone: it listens on loopback, and whoever reaches it there
may do everything. `Owner` is the dependency of every route, and each id, list and stream is looked up for it.
A page of any site can post a form to 127.0.0.1, and browsers say so in `Origin`; or it can point a name of its own
here, and browsers say so in `Host`. Both are refused.
"""

from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.requests import Request

from media_server.errors import Forbidden, NotFound, Unauthorized
from media_server.jobs.database import Database
from media_server.jobs.spec import Job, JobKind
from media_server.keys import SCOPES, Scope, find_key, find_valid_key, has_keys
from media_server.limits import KeyLimits
from media_server.open_address import is_loopback
from media_server.settings import Settings

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


# where a batch's worker says for whom it sends a request within its own process; no request from outside can set it
ACTING_FOR = "acting_for"


@dataclass(frozen=True)
class ActingFor:
    """Whoever has left work to be done later: the id of the key, None for a service without keys."""

    owner_key_id: str | None


@dataclass(frozen=True)
class Caller:
    """The owner of what a request makes, and of what it may see; no id is whoever uses a service without keys."""

    owner_key_id: str | None = None
    scopes: frozenset[Scope] = frozenset(SCOPES)
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def is_admin(self) -> bool:
        """Whether what is everybody's is this caller's too."""
        return "admin" in self.scopes

    @property
    def list_owner(self) -> str | None:
        """Whose things a list shows; None is everybody's."""
        return None if self.is_admin else self.owner_key_id

    def answer_s(self, settings: Settings) -> float | None:
        """How long an answer in words is had after its job's end, if no words are kept for this caller; else None."""
        return settings.answer_s if settings.zero_retention or self.limits.zero_retention else None

    def may_see(self, owner_key_id: str | None) -> bool:
        """Whether what belongs to this owner exists for the caller."""
        return self.is_admin or owner_key_id == self.owner_key_id

    def check(self, job: Job, *, kind: JobKind | None = None) -> Job:
        """Give the job back if it is this caller's, and of that kind.

        Raises NotFound otherwise: what belongs to others does not exist.
        """
        if not self.may_see(job.owner_key_id):
            # word for word what is said of an id that nothing has
            raise NotFound(f"No job has the id {job.id!r}.", param="id", value=job.id)
        if kind not in (None, job.kind):
            raise NotFound(f"No {kind} has the id {job.id!r}.", param="id", value=job.id)
        return job


def identify(request: Request) -> Caller:
    """Find out who is asking.

    Raises Unauthorized without a valid key where one is needed, and Forbidden if the key's scopes do not reach so far,
    if a page of another origin sends a request that changes something, or reaches a service on loopback by a name that
    is not its own.
    """
    settings: Settings = request.app.state.settings
    _check_origin(request, settings)
    caller = _authenticate(request, settings)
    needed: Scope = "read" if request.method in _SAFE_METHODS else "submit"
    if not caller.is_admin and needed not in caller.scopes:
        raise _out_of_scope(needed)
    request.state.caller = caller
    return caller


Owner = Annotated[Caller, Depends(identify)]


def is_still_allowed(request: Request, caller: Caller) -> bool:
    """Say whether what a stream was opened with still opens it: its key may be revoked or past its end by now."""
    try:
        found = _authenticate(request, request.app.state.settings)
    except Unauthorized:
        return False
    return found.owner_key_id == caller.owner_key_id


def _authenticate(request: Request, settings: Settings) -> Caller:
    db: Database = request.app.state.db
    if isinstance(acting := request.scope["state"].get(ACTING_FOR), ActingFor):
        return _caller_of(db, acting)
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (key := find_key(db, text.strip())) is not None:
        return Caller(key.id, key.scopes, key.limits)
    # clients that must send something send anything to a service without keys
    if is_loopback(settings.host) and not has_keys(db):
        return Caller()
    if not text:
        raise Unauthorized(
            "This service needs an API key: send it as `Authorization: Bearer msk_…`.",
            code="missing_api_key",
            param="authorization",
            rule="a valid API key",
        )
    # the key itself goes into no answer and no log
    raise Unauthorized(
        "The API key is not valid: it is not known, was revoked, or is past its end.",
        param="authorization",
        rule="a valid API key",
    )


def _caller_of(db: Database, acting: ActingFor) -> Caller:
    """Find what a key may do now that has left work behind; what no key has left belongs to none."""
    if acting.owner_key_id is None:
        return Caller()
    key = find_valid_key(db, acting.owner_key_id)
    if key is None:
        raise Unauthorized(
            "The API key that sent this was revoked, or is past its end.",
            param="authorization",
            rule="a valid API key",
        )
    return Caller(key.id, key.scopes, key.limits)


def _check_origin(request: Request, settings: Settings) -> None:
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


def _netloc(url: str) -> str | None:
    """Give host and port of a URL; None if it is none, such as `null` or half an IPv6 address."""
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def _out_of_scope(needed: Scope) -> Forbidden:
    return Forbidden(
        f"This key does not have the scope {needed!r}, which this request needs.",
        code="out_of_scope",
        param="authorization",
        rule=f"a key with the scope {needed}",
    )
