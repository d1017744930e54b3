"""Fetching what a caller names: which addresses are refused, and that a connection goes where the check looked."""

import asyncio
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from media_server import http_fetch
from media_server.errors import InvalidRequest
from media_server.http_fetch import Fetched, check_url, fetch, is_public, resolve

PNG = b"\x89PNG not really"


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["host"])  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        body = PNG if self.path in ("/a.png", "/slow") else b"x" * 5000
        self.send_response(404 if self.path == "/gone" else 200)
        self.send_header("content-type", "image/png")
        if self.path != "/endless":
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.path == "/slow":
            self.server.release.wait(20)  # type: ignore[attr-defined]
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    server.hosts, server.release = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def _fetch(url: str, *, timeout_s: float = 5.0, tls: ssl.SSLContext | None = None) -> Fetched:
    return asyncio.run(
        fetch(url, param="input_reference", max_bytes=4096, timeout_s=timeout_s, allow_private=True, tls=tls)
    )


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "0.0.0.0",
        "169.254.169.254", "100.64.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.170",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::7f00:1", "fe80::1", "fc00::1",
        "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "2002:7f00:1::", "2001:0:7f00:1::", "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
    ],
)  # fmt: skip
def test_addresses_of_the_inside_are_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "2001:4860:4860::8888", "64:ff9b::808:808"]
)
def test_addresses_of_the_open_internet_are_taken(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png", "ftp://example.com/a.png", "file:///etc/passwd", "https://user:secret@example.com/",
        "https:///a.png", "https://127.0.0.1/a.png", "https://[::1]/a.png", "https://[::ffff:127.0.0.1]/",
        "https://localhost/", "https://2130706433/", "https://0x7f000001/", "https://127.1/", "https://169.254.169.254/",
        "https://no-such-host.invalid/", "https://" + "a" * 3000, "not a url",
    ],
)  # fmt: skip
def test_urls_that_are_not_allowed(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(url, param="input_reference", allow_private=False)
    assert caught.value.param == "input_reference" and caught.value.rule
    body = str(caught.value.to_body())
    assert not any(text in body for text in ("127.0.0.1", "169.254", "::1", "secret"))


def test_a_host_with_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 443)) for ip in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answers)
    with pytest.raises(InvalidRequest, match="public address"):
        resolve("https://rebinding.example/a.png", param="image", allow_private=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answers[:1])
    assert resolve("https://rebinding.example/a.png", param="image", allow_private=False).address == "8.8.8.8"


def test_the_name_is_resolved_once_and_the_connection_goes_there(
    site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = socket.getaddrinfo, []

    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        if host == "pictures.example":
            # a second look-up would find another place
            host = "127.0.0.1" if asked.count(host) == 1 else "192.0.2.1"
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    port = site.server_address[1]
    assert _fetch(f"http://pictures.example:{port}/a.png") == Fetched(PNG, "image/png")
    assert asked.count("pictures.example") == 1
    assert site.hosts == [f"pictures.example:{port}"]  # type: ignore[attr-defined]


def test_each_redirect_is_checked_again(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    base = f"http://127.0.0.1:{site.server_address[1]}"
    assert _fetch(f"{base}/to//a.png").content == PNG
    with pytest.raises(InvalidRequest, match="scheme"):
        _fetch(f"{base}/to/file:///etc/passwd")
    with pytest.raises(InvalidRequest, match="redirects"):
        _fetch(f"{base}{'/to/' * 12}/a.png")
    hops: list[str] = []

    def strict_after_the_first(url: str, *, param: str, allow_private: bool) -> Any:
        hops.append(url)
        return resolve(url, param=param, allow_private=len(hops) == 1)

    monkeypatch.setattr(http_fetch, "resolve", strict_after_the_first)
    with pytest.raises(InvalidRequest, match="public address"):
        _fetch(f"{base}/to/https://127.0.0.1:1/a.png")
    assert len(hops) == 2


@pytest.mark.parametrize(("path", "reason"), [("/big", "4096 bytes"), ("/endless", "4096 bytes"), ("/gone", "200")])
def test_size_and_status(site: ThreadingHTTPServer, path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        _fetch(f"http://127.0.0.1:{site.server_address[1]}{path}")


def test_seconds_are_capped_and_a_closed_port_says_nothing(site: ThreadingHTTPServer) -> None:
    with pytest.raises(InvalidRequest, match=r"within 0\.3 s"):
        _fetch(f"http://127.0.0.1:{site.server_address[1]}/slow", timeout_s=0.3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(InvalidRequest, match="can be fetched") as caught:
            _fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/a.png")
    assert "127.0.0.1" not in str(caught.value.to_body())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program to make a certificate")
def test_the_pinned_connection_verifies_the_name_of_the_url(
    site: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=pictures.example",
         "-addext", "subjectAltName=DNS:pictures.example"],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    site.socket = server_side.wrap_socket(site.socket, server_side=True)
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.1" if ".example" in str(host) else host, *a, **k)
    )
    trusted = ssl.create_default_context(cafile=str(certificate))
    port = site.server_address[1]
    assert _fetch(f"https://pictures.example:{port}/a.png", tls=trusted).content == PNG
    with pytest.raises(InvalidRequest, match="can be fetched"):
        _fetch(f"https://other.example:{port}/a.png", tls=trusted)


@pytest.mark.parametrize(
    "url",
    [
        "https://xn--/",
        "https://xn--a-/x",
        "https://exa mple.com",
        "https://a%41.com/",
        "https://a|b.com",
        "https://a<b",
    ],
)
def test_a_host_that_is_no_name_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_url(url, param="webhook_url", allow_private=False)
    assert (caught.value.code, caught.value.param) == ("invalid_url", "webhook_url")
    assert caught.value.rule


@pytest.mark.parametrize("url", ["https://bücher.de/a b", "https://xn--bcher-kva.de", "https://a_b.example.com:8443/"])
def test_a_host_that_is_a_name_is_taken(url: str) -> None:
    assert check_url(url, param="webhook_url", allow_private=False).host


def test_a_redirect_to_a_host_that_is_no_name_is_refused(site: ThreadingHTTPServer) -> None:
    with pytest.raises(InvalidRequest, match="valid URL"):
        _fetch(f"http://127.0.0.1:{site.server_port}/to/https://xn--/")
