"""A PostgreSQL server of the tests' own: Debian's package or any other, on a unix socket, gone with the tests.

`make test` installs Debian's package where it may; elsewhere the tests that need it say that it is missing.
"""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
def running(programs: Path, folder: Path) -> Iterator[str]:
    """Run a server on an empty folder and give the URL of its database `postgres`; writes are not made durable.

    `folder` exists; its path must be short: it carries the server's socket.
    """
    user = _USER if os.geteuid() == 0 else None
    data = folder / "pg"
    if user:
        entry = pwd.getpwnam(_USER)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(
        [str(programs / "initdb"), "-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync"],
        check=True, capture_output=True, env=environment, cwd=folder, user=user, group=user,
    )  # fmt: skip
    options = {
        "listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off", "synchronous_commit": "off",
        "full_page_writes": "off", "max_connections": "200", "shared_buffers": "32MB", "autovacuum": "off",
    }  # fmt: skip
    command = [str(programs / "postgres"), "-D", str(data), *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, user=user, group=user)
    try:
        ask = [str(programs / "pg_isready"), "-q", "-t", "60", "-h", str(folder)]
        while subprocess.run(ask, check=False, env=environment).returncode != 0:
            assert server.poll() is None, (folder / "server.log").read_text()
        yield f"postgresql://{_USER}@/postgres?host={folder}"
    finally:
        # SIGINT: ends the sessions that are open, and waits for none
        server.send_signal(2)
        server.wait(60)


def _has_user() -> bool:
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return False
    return True
