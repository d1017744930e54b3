"""A client of the service's HTTP API for the command line: requests, server-sent events, files.

Server-sent events: WHATWG HTML, section 9.2. A job's stream and a file are taken up again where they broke off, for as
long as a restart of the service may last. Invariant: whatever the network does ends in a CommandFailed.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import httpx

from media_server.commands.failure import BrokenOff, CommandFailed, NotOurs, Refused, Unreachable
from media_server.jobs.states import TERMINAL
from media_server.settings import Settings

REQUEST_TIMEOUT_S = 60.0
# heartbeats come every 15 s
STREAM_TIMEOUT_S = 60.0
RECONNECT_S = 60.0
RETRY_S = 1.0
# what a proxy answers while the service behind it restarts, and the service while parts of it do
_AWAY = frozenset({502, 503, 504})


@dataclass(frozen=True)
class ServerEvent:
    """One server-sent event; `data` is its text."""

    id: str
    event: str
    data: str


class Client:
    """A connection to one service."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            # trust_env off: a proxy for the outer world does not know this service
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False, transport=transport
            )
        except httpx.InvalidURL as error:
            raise CommandFailed(f"{url!r} is no address of a service: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """GET a JSON object; parameters that are None are left out."""
        return self._request("GET", path, params={name: value for name, value in params.items() if value is not None})

    def get_when_back(self, path: str) -> dict[str, Any]:
        """GET a JSON object from a service that may be restarting. Raises CommandFailed after RECONNECT_S."""
        patience = _Patience()
        while True:
            try:
                return self.get(path)
            except CommandFailed as error:
                patience.wait(error)

    def get_text(self, path: str, **params: Any) -> str:
        """GET a text; parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._answer("GET", path, params=given).text

    def post(self, path: str, body: dict[str, Any] | None = None, files: dict[str, Path] | None = None) -> Any:
        """POST a JSON body, or a form if files go with it; fields that are None are left out."""
        fields = {name: value for name, value in (body or {}).items() if value is not None}
        if not files:
            return self._request("POST", path, json=fields)
        # the service reads a file's type from its bytes
        opened = {name: (file.name, file.read_bytes(), "application/octet-stream") for name, file in files.items()}
        return self._request("POST", path, data={name: str(value) for name, value in fields.items()}, files=opened)

    def download(self, path: str, target: Path) -> None:
        """GET a file into `target`, which is there whole or not at all.

        Raises CommandFailed if nothing more of it has come for RECONNECT_S, or if it cannot be written.
        """
        part = target.with_name(target.name + ".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                self._download(path, file)
            part.replace(target)
        except OSError as error:
            raise CommandFailed(f"{target} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _download(self, path: str, file: IO[bytes]) -> None:
        patience = _Patience()
        etag: str | None = None
        while True:
            # identity: a range counts the bytes of the file
            headers = {"accept-encoding": "identity"}
            if etag is not None and file.tell():
                headers |= {"range": f"bytes={file.tell()}-", "if-range": etag}
            try:
                # the service may send us to its object store, which is not shown the key
                with self._opened("GET", path, headers=headers, follow_redirects=True) as response:
                    is_plain = "content-encoding" not in response.headers
                    etag = response.headers.get("etag") if is_plain else None
                    if response.status_code != httpx.codes.PARTIAL_CONTENT:
                        file.seek(0)
                        file.truncate()
                    elif not response.headers.get("content-range", "").startswith(f"bytes {file.tell()}-"):
                        raise BrokenOff(self.url, "it sent another part of the file than was asked for")
                    for chunk in response.iter_bytes():
                        file.write(chunk)
                        patience.reset()
                return
            except CommandFailed as error:
                if isinstance(error, Refused) and error.status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    # all bytes had come, their end had not: what is here is not trusted
                    etag = None
                    continue
                patience.wait(error)

    def job_events(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield a job's events, of a film with its children's, until its last one.

        A stream that ends before that one is taken up again: a service that restarts ends its streams in order.

        Raises CommandFailed if the service has been gone for RECONNECT_S.
        """
        last_id = ""
        patience = _Patience()
        while True:
            seen = last_id
            try:
                headers = {"last-event-id": last_id} if last_id else {}
                for event in self._stream("GET", f"/v1/jobs/{job_id}/events", headers=headers):
                    patience.reset()
                    last_id = event.id or last_id
                    if not event.data:
                        continue
                    frame = _parse(self.url, event.data)
                    yield frame
                    if _is_last(frame, job_id):
                        return
                has_ended = self.get(f"/v1/jobs/{job_id}").get("status") in TERMINAL
            except CommandFailed as error:
                patience.wait(error)
                continue
            # of a job that has ended the next stream is the rest; where that was nothing, all is here
            if has_ended and last_id == seen:
                return
            patience.reset()
            if not has_ended:
                time.sleep(RETRY_S)

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion. Raises BrokenOff if it ends before it is done."""
        for event in self._stream("POST", "/v1/chat/completions", json={**body, "stream": True}):
            if event.data == "[DONE]":
                return
            chunk = _parse(self.url, event.data)
            if isinstance(chunk.get("error"), dict):
                raise Refused(200, str(chunk["error"].get("message")), chunk["error"].get("code"))
            yield chunk
        raise BrokenOff(self.url, "the stream ended without saying that it is done")

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        return _parse(self.url, self._answer(method, path, **arguments).text)

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        with self._failures():
            response = self._http.request(method, path, **arguments)
            _check(response)
            return response

    def _stream(self, method: str, path: str, **arguments: Any) -> Iterator[ServerEvent]:
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=STREAM_TIMEOUT_S)
        with self._opened(method, path, timeout=timeout, **arguments) as response:
            yield from read_events(response.iter_lines())

    @contextlib.contextmanager
    def _opened(self, method: str, path: str, **arguments: Any) -> Iterator[httpx.Response]:
        with self._failures(), self._http.stream(method, path, **arguments) as response:
            _check(response)
            yield response

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what the network raises into our errors."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise Unreachable(self.url) from error
        except httpx.TimeoutException as error:
            raise BrokenOff(self.url, f"it said nothing for {REQUEST_TIMEOUT_S:.0f} s") from error
        except httpx.HTTPError as error:
            raise BrokenOff(self.url, str(error) or type(error).__name__) from error


class _Patience:
    """How long a service may be away: RECONNECT_S since something of it was heard."""

    def __init__(self) -> None:
        self._gone_since: float | None = None

    def reset(self) -> None:
        """Note that it was heard."""
        self._gone_since = None

    def wait(self, error: CommandFailed) -> None:
        """Wait a moment before the next try. Raises the error if the time is up, or if trying again cannot help."""
        can_help = isinstance(error, Unreachable | BrokenOff) or (isinstance(error, Refused) and error.status in _AWAY)
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        if not can_help or now - self._gone_since > RECONNECT_S:
            raise error
        time.sleep(RETRY_S)


def client_of(settings: Settings) -> Client:
    """Make a client of the service that the settings name."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    address = f"[{host}]" if ":" in host else host
    return Client(settings.url or f"http://{address}:{settings.port}", settings.api_key)


def read_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Parse server-sent events; comments and events without data yield nothing."""
    id, event, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(id, event, "\n".join(data))
            event, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            event = value
        elif name == "id" and "\0" not in value:
            id = value


def _is_last(frame: dict[str, Any], job_id: str) -> bool:
    kind, _, state = str(frame.get("type")).partition(".")
    return frame.get("job_id") == job_id and kind != "job" and state in TERMINAL


def _parse(url: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NotOurs(url, repr(text[:60]))
    return found


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"unexpected answer: {response.text[:200]!r}", None
    raise Refused(response.status_code, message, code)
