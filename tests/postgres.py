"""A PostgreSQL server of the tests' own: Debian's package or any other, on a unix socket or over TLS, gone with them.

`make test` installs Debian's package where it may; elsewhere the tests that need it say that it is missing.
"""

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

from tests.free_port import free_port

PASSWORD = "between-machines"
_DEBIAN = Path("/usr/lib/postgresql")
# PostgreSQL refuses to run as root; Debian's package makes this user
_USER = "postgres"


def find_programs() -> Path | None:
    """Find the folder of initdb and postgres, or None if there is none that may be run."""
    if os.geteuid() == 0 and not _has_user():
        return None
    found = shutil.which("initdb")
    folders = [*([Path(found).resolve().parent] if found else []), *sorted(_DEBIAN.glob("*/bin"), reverse=True)]
    return next((folder for folder in folders if (folder / "postgres").exists() and (folder / "initdb").exists()), None)


def why_missing() -> str:
    """Say what to do to have the tests run."""
    return "PostgreSQL is not installed here: apt-get install postgresql"


@contextmanager
def running(programs: Path, folder: Path, *, over_tls: bool = False) -> Iterator[str]:
    """Run a server on an empty folder and give the URL of its database `postgres`; writes are not made durable.

    `folder` exists; its path must be short: it carries the server's socket. `over_tls`: for other machines, by TCP with
    a password and a certificate that the URL has verified; in the clear it answers nobody.
    """
    user = _USER if os.geteuid() == 0 else None
    data = folder / "pg"
    if user:
        entry = pwd.getpwnam(_USER)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    environment = {**os.environ, "LC_ALL": "C"}
    ways = ["--auth-local=trust", "--auth-host=scram-sha-256", "--pwfile=password"] if over_tls else ["-A", "trust"]
    (folder / "password").write_text(PASSWORD)
    subprocess.run(
        [str(programs / "initdb"), "-D", str(data), "-U", _USER, *ways, "-E", "UTF8", "--no-sync"],
        check=True, capture_output=True, env=environment, cwd=folder, user=user, group=user,
    )  # fmt: skip
    options = {
        "listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off", "synchronous_commit": "off",
        "full_page_writes": "off", "max_connections": "200", "shared_buffers": "32MB", "autovacuum": "off",
    }  # fmt: skip
    url = f"postgresql://{_USER}@/postgres?host={folder}"
    if over_tls:
        port = free_port()
        _certify(folder, user)
        options |= {
            "listen_addresses": "127.0.0.1", "port": str(port), "ssl": "on",
            "ssl_cert_file": str(folder / "database.pem"), "ssl_key_file": str(folder / "database.key"),
        }  # fmt: skip
        access = data / "pg_hba.conf"
        access.write_text(re.sub(r"(?m)^host\b", "hostssl", access.read_text()))
        url = (
            f"postgresql://{_USER}:{PASSWORD}@127.0.0.1:{port}/postgres"
            f"?sslmode=verify-full&sslrootcert={folder / 'database-authority.pem'}"
        )
    command = [str(programs / "postgres"), "-D", str(data), *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, user=user, group=user)
    try:
        ask = [str(programs / "pg_isready"), "-q", "-t", "60", "-h", str(folder), "-p", options.get("port", "5432")]
        while subprocess.run(ask, check=False, env=environment).returncode != 0:
            assert server.poll() is None, (folder / "server.log").read_text()
        yield url
    finally:
        # SIGINT: ends the sessions that are open, and waits for none
        server.send_signal(2)
        server.wait(60)


def _certify(folder: Path, user: str | None) -> None:
    """Write a certificate of an authority of its own for the server, whose key nobody else may read."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "database-authority.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "database.pem"))
    key = folder / "database.key"
    key.touch(mode=0o600)
    key.write_bytes(certificate.private_key_pem.bytes())
    if user:
        shutil.chown(key, user, user)


def _has_user() -> bool:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return False
    return True
