"""The runtime folder after the service: gone, unless something in it is used or is not ours to remove."""

import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from media_server.errors import ConfigurationError
from media_server.settings import Settings
from workers import supervisor
from workers.gpu_program import hold_lock
from workers.runtime_folder import remove_runtime_folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The runtime folder of a service that has stopped: short enough for a socket."""
    path = Settings(data_dir=tmp_path / "data").runtime_dir
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path / "valkey.sock"))
        dead.listen()
    (path / "cpu-video-0.lock").touch()
    yield path
    for left in path.iterdir() if path.exists() else ():
        left.unlink()
    if path.exists():
        path.rmdir()


def test_dead_sockets_and_free_locks_go_with_it(folder: Path) -> None:
    remove_runtime_folder(folder)
    assert not folder.exists()
    remove_runtime_folder(folder)


@pytest.mark.parametrize("what", ["socket", "lock", "file"])
def test_what_is_used_or_not_known_keeps_all_of_it(folder: Path, what: str) -> None:
    before = {path.name for path in folder.iterdir()}
    with socket.socket(socket.AF_UNIX) as server, (folder / "cpu-video-0.lock").open() as held:
        if what == "socket":
            server.bind(str(folder / "z.sock"))
            server.listen()
            before.add("z.sock")
        elif what == "lock":
            fcntl.flock(held, fcntl.LOCK_EX)
        else:
            (folder / "z").touch()
            before.add("z")
        remove_runtime_folder(folder)
        assert {path.name for path in folder.iterdir()} == before
    if what == "lock":
        remove_runtime_folder(folder)
        assert not folder.exists()


def test_a_lock_whose_file_was_taken_away_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cuda-0.lock"
    flock, calls = fcntl.flock, []

    def take(file: object, how: int) -> None:
        flock(file, how)  # type: ignore[arg-type]
        calls.append(how)
        if len(calls) == 1:
            # between its opening and its locking
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", take)
    with hold_lock(path), path.open() as other:
        assert len(calls) == 2
        monkeypatch.undo()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_start_leaves_no_folder_refused_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIA_SERVER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    path = Settings(data_dir=tmp_path / "data").runtime_path
    seen: list[bool] = []

    def run(supervisor: supervisor.Supervisor) -> int:
        seen.append(supervisor.settings.runtime_dir.exists())
        return 0

    monkeypatch.setattr("workers.supervisor.Supervisor.run", run)
    with pytest.raises(ConfigurationError, match="media-server keys create"):
        supervisor.main(["--host", "0.0.0.0", "--port", "0"])
    assert not path.exists()
    assert supervisor.main(["--host", "127.0.0.1", "--port", "0"]) == 0
    assert (seen, path.exists()) == ([True], False)
