"""Bodies that trickle, uploads that crowd, bodies that are compressed: each is answered by name, over a real socket."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from media_server import http_limits
from tests.media_server.routes.conftest import Service

JSON = "application/json"
UPLOAD = "multipart/form-data; boundary=b"


def connect(live: str, path: str, content_type: str, length: int) -> socket.socket:
    address = urlsplit(live)
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=20)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode())
    return connection


def read_all(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read an answer to the end of the connection, which the service must close."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.parametrize(("path", "content_type"), [("/v1/chat/completions", JSON), ("/v1/videos", UPLOAD)])
def test_a_body_that_trickles_is_given_up(
    live: str, monkeypatch: pytest.MonkeyPatch, path: str, content_type: str
) -> None:
    monkeypatch.setattr(http_limits, "BODY_S", 0.4)
    with connect(live, path, content_type, 1000) as connection:
        started = time.monotonic()
        for byte in b"--b" if content_type == UPLOAD else b"   ":
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        status, headers, body = read_all(connection)
    assert (status, headers["connection"]) == (408, "close")
    assert 0.3 < time.monotonic() - started < 10
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout" and "3 bytes in" in error["message"]


def test_a_body_that_comes_at_its_rate_has_the_time_that_it_needs(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "BODY_S", 0.3)
    monkeypatch.setattr(http_limits, "BODY_BYTES_A_SECOND", 100)

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(8):
            time.sleep(0.1)
            yield b" " * 50
        yield b'a red ball"}'

    answer = httpx.post(f"{live}/v1/videos", content=pieces(), headers={"content-type": JSON}, trust_env=False)
    assert answer.status_code == 200, answer.text


def test_uploads_that_crowd_are_sent_away_and_come_again(
    live: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "MAX_UPLOADS", 2)
    before = service.contents()
    waiting = [connect(live, "/v1/videos", UPLOAD, 1000) for _ in range(2)]
    try:
        deadline = time.monotonic() + 10
        while True:
            with connect(live, "/v1/videos", UPLOAD, 1000) as third:
                third.settimeout(0.5)
                try:
                    status, headers, body = read_all(third)
                    break
                except TimeoutError:
                    # the first two are not seen yet
                    assert time.monotonic() < deadline
        assert (status, headers["retry-after"], headers["connection"]) == (503, "5", "close")
        assert json.loads(body)["error"]["code"] == "too_many_uploads"
        # what is no upload is not held up
        answer = httpx.post(f"{live}/v1/videos", json={"prompt": "a"}, trust_env=False)
        assert answer.status_code == 200
        httpx.delete(f"{live}/v1/videos/{answer.json()['id']}", trust_env=False)
    finally:
        for connection in waiting:
            connection.close()
    deadline = time.monotonic() + 10
    while True:
        again = httpx.post(f"{live}/v1/videos", files={"prompt": (None, "a")}, trust_env=False)
        if again.status_code == 200:
            break
        assert time.monotonic() < deadline, again.text
    assert before[1] == service.contents()[1]


def test_a_compressed_body_is_refused_by_name(service: Service) -> None:
    before = service.contents()
    body = gzip.compress(b'{"prompt": "a red ball"}')
    for path in ("/v1/videos", "/v1/chat/completions", "/v1/webhook_endpoints"):
        answer = service.http.post(path, content=body, headers={"content-type": JSON, "content-encoding": "gzip"})
        assert answer.status_code == 415
        assert answer.json()["error"]["message"].endswith("got content-encoding gzip.")
    assert service.contents() == before
    plain = {"content-type": JSON, "content-encoding": "identity"}
    assert service.http.post("/v1/videos", content=b'{"prompt": "a"}', headers=plain).status_code == 200
