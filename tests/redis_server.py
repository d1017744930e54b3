"""A Redis server of the tests' own that speaks TLS alone and wants a password: the broker of a house of many machines.

Debian's redis-tools holds the server's program under the name of its checker, without a service that would start.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import trustme

from tests.free_port import free_port
from workers.valkey import wait_until_answering

PASSWORD = "between-machines"


def find_program() -> Path | None:
    """Find redis-server, or the program that is one if it is called so; None if there is neither."""
    found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    return Path(found).resolve() if found else None


@contextmanager
def running(program: Path, folder: Path) -> Iterator[str]:
    """Run a server with a certificate of an authority of its own and give its URL, which names the authority's file."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    server = folder / "redis-server"
    server.symlink_to(program)
    port = free_port()
    options = {
        "bind": "127.0.0.1", "port": "0", "tls-port": str(port), "tls-auth-clients": "no", "requirepass": PASSWORD,
        "tls-cert-file": str(folder / "server.pem"), "tls-key-file": str(folder / "server.pem"),
        "save": "", "dir": str(folder), "logfile": str(folder / "redis.log"),
    }  # fmt: skip
    command = [str(server), *(part for name, value in options.items() for part in (f"--{name}", value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={folder / 'authority.pem'}"
        assert wait_until_answering(url, 60), (folder / "redis.log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def kind_of(url: str) -> str:
    """Name the server at a URL: `redis` or `valkey`."""
    with redis.Redis.from_url(url) as client:
        found = client.info("server")
    assert isinstance(found, dict)
    return str(found.get("server_name", "redis"))
