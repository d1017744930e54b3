"""A client of the service's HTTP API for the command line: requests, server-sent events, files.

Server-sent events: WHATWG HTML, section 9.2. A job's stream is taken up again where it broke off, for as long as a
restart of the service may last.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from media_server.commands.failure import BrokenOff, Refused, Unreachable
from media_server.jobs.states import TERMINAL
from media_server.settings import Settings

REQUEST_TIMEOUT_S = 60.0
# heartbeats come every 15 s
STREAM_TIMEOUT_S = 60.0
RECONNECT_S = 60.0
AGAIN_S = 1.0
# what a proxy says of a service that restarts, and the service itself before it is ready
_AWAY = (502, 503, 504)


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
        # trust_env off: a proxy for the outer world does not know this service
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """GET a JSON object; parameters that are None are left out."""
        return self._request("GET", path, params={name: value for name, value in params.items() if value is not None})

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

    def download(self, path: str, target: Path, report: Callable[[int], None] = lambda _: None) -> None:
        """GET a file into `target`; `report` hears each number of bytes that came."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        absence = _Absence(self.url)
        try:
            with part.open("wb") as file:
                etag: str | None = None
                while True:
                    try:
                        headers = {"range": f"bytes={file.tell()}-", "if-range": etag} if etag and file.tell() else {}
                        with self._http.stream("GET", path, headers=headers, follow_redirects=True) as response:
                            _check(response)
                            etag = response.headers.get("etag")
                            if response.status_code != 206:
                                file.seek(0)
                                file.truncate()
                            for chunk in response.iter_bytes():
                                absence.is_over()
                                file.write(chunk)
                                report(len(chunk))
                        break
                    except (httpx.TransportError, Refused) as error:
                        absence.bear(error)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def job_events(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield a job's events, of a film with its children's, until its last one.

        A stream that ends before it, since the service restarts or a proxy has had enough, is taken up again.
        Raises Unreachable if the service has been gone for RECONNECT_S.
        """
        last_id = ""
        absence = _Absence(self.url)
        while True:
            try:
                headers = {"last-event-id": last_id} if last_id else {}
                for event in self._stream("GET", f"/v1/jobs/{job_id}/events", headers=headers):
                    absence.is_over()
                    last_id = event.id or last_id
                    if event.data:
                        said = json.loads(event.data)
                        yield said
                        if said["job_id"] == job_id and said["type"].rpartition(".")[2] in TERMINAL:
                            return
                if self.get(f"/v1/jobs/{job_id}")["status"] in TERMINAL:
                    return
                absence.is_over()
                time.sleep(AGAIN_S)
            except (Unreachable, Refused) as error:
                absence.bear(error)

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion.

        Raises BrokenOff if the stream ends before its last one.
        """
        for event in self._stream("POST", "/v1/chat/completions", json={**body, "stream": True}):
            if event.data == "[DONE]":
                return
            chunk = json.loads(event.data)
            if isinstance(chunk.get("error"), dict):
                raise Refused(200, str(chunk["error"].get("message")), chunk["error"].get("code"))
            yield chunk
        raise BrokenOff(self.url)

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **arguments).json()
        assert isinstance(answer, dict)
        return answer

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise Unreachable(self.url) from error
        _check(response)
        return response

    def _stream(self, method: str, path: str, **arguments: Any) -> Iterator[ServerEvent]:
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=STREAM_TIMEOUT_S)
        try:
            with self._http.stream(method, path, timeout=timeout, **arguments) as response:
                _check(response)
                yield from read_events(response.iter_lines())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(self.url) from error
        except httpx.TransportError as error:
            raise BrokenOff(self.url) from error


class _Absence:
    """How long the service has been away; a restart is waited for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.since: float | None = None

    def is_over(self) -> None:
        """Note that it answers."""
        self.since = None

    def bear(self, error: Exception) -> None:
        """Wait a little before the next try; raises what the service refuses, and Unreachable after RECONNECT_S."""
        if isinstance(error, Refused) and error.status not in _AWAY:
            raise error
        now = time.monotonic()
        self.since = self.since or now
        if now - self.since > RECONNECT_S:
            raise Unreachable(self.url) from error
        time.sleep(AGAIN_S)


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


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = f"unexpected answer: {response.text[:200]!r}", None
    raise Refused(response.status_code, message, code)
