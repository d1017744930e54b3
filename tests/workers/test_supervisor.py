"""The supervisor's plan: which processes, on which devices, with how many threads, behind which socket."""

import errno
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from media_server.cli import run
from media_server.errors import ConfigurationError
from media_server.jobs import store
from media_server.jobs.claims import claim_next
from media_server.jobs.database import open_database
from media_server.jobs.spec import JobSpec
from media_server.settings import ModelEntry, Settings, load_settings
from tests.fresh_database import open_migrated
from workers import supervisor
from workers.leases import end_leases_of_the_dead, worker_id
from workers.plan import plan_children, share_cores
from workers.supervisor import open_listener, service_url


def argument(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_machine_without_gpu_runs_one_of_each(tmp_path: Path) -> None:
    children = plan_children(Settings(data_dir=tmp_path, gpus=()), 7)
    names = [child.name for child in children]
    assert names == ["valkey", "api", "video-0", "engine-0", "storyboards", "media", "batches", "deliveries", "sweeper"]
    by_name = {child.name: child for child in children}
    assert by_name["api"].pass_fds == (7,) and argument(by_name["api"].command, "--fd") == "7"
    assert argument(by_name["video-0"].command, "--device") == "cpu"
    with_leases = {name for name, child in by_name.items() if child.has_leases}
    assert with_leases == {"video-0", "storyboards", "media", "batches"}
    assert [child.name for child in children if child.is_engine] == ["engine-0"]


TWO_MODELS = (ModelEntry(name="small", kind="video"), ModelEntry(name="large", kind="video", pool="wan-14b"))


def video_workers(settings: Settings) -> list[tuple[str, str]]:
    commands = [child.command for child in plan_children(settings, 7) if child.name.startswith("video-")]
    return [(argument(command, "--device"), argument(command, "--pool")) for command in commands]


def test_one_video_worker_a_gpu_each_on_its_pool(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, gpus=(0, 2), gpu_pools={2: "wan-14b"}, models=TWO_MODELS)
    assert video_workers(settings) == [("cuda:0", "video"), ("cuda:2", "wan-14b")]


def test_every_video_model_has_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    settings = Settings(data_dir=tmp_path, gpus=(), models=TWO_MODELS)
    assert video_workers(settings) == [("cpu", "video"), ("cpu", "wan-14b")]
    # together they take the threads that one would have
    alone = settings.model_copy(update={"models": TWO_MODELS[:1]})
    threads = [
        sum(int(argument(child.command, "--threads")) for child in plan_children(each, 7) if "worker" in child.command)
        for each in (settings, alone)
    ]
    assert threads == [12, 12]
    gpus = settings.model_copy(update={"gpus": (0, 1, 2)})
    assert video_workers(gpus) == [("cuda:0", "video"), ("cuda:1", "wan-14b"), ("cuda:2", "video")]
    named = gpus.model_copy(update={"gpu_pools": {0: "wan-14b"}})
    assert video_workers(named) == [("cuda:0", "wan-14b"), ("cuda:1", "video"), ("cuda:2", "video")]


def test_what_would_never_be_ready_is_refused_at_the_start(tmp_path: Path) -> None:
    too_few = Settings(data_dir=tmp_path, gpus=(0,), models=TWO_MODELS)
    with pytest.raises(ConfigurationError, match=r"^models: no GPU is left for the pool 'wan-14b'") as caught:
        plan_children(too_few, 7)
    assert caught.value.param == "models"
    unknown = Settings(data_dir=tmp_path, gpus=(0, 1), gpu_pools={1: "fast"}, models=TWO_MODELS)
    with pytest.raises(ConfigurationError, match=r"^gpus: GPU 1 has the pool 'fast'.*video, wan-14b") as caught:
        plan_children(unknown, 7)
    assert caught.value.param == "gpus"


def test_what_lives_elsewhere_is_not_started(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path,
        gpus=(),
        broker_url="redis://elsewhere:6379",
        engine_url="http://elsewhere:8001/v1",
        models=(ModelEntry(name="m", kind="text"),),
    )
    names = [child.name for child in plan_children(settings, 7)]
    assert names == ["api", "storyboards", "media", "batches", "deliveries", "sweeper"]


def test_clips_have_their_gpus_to_themselves(tmp_path: Path) -> None:
    def engine(**settings: Any) -> str:
        children = plan_children(Settings(data_dir=tmp_path, **settings), 7)
        return next(argument(child.command, "--device") for child in children if child.is_engine)

    assert engine(gpus=(0, 1)) == "cpu"
    assert engine(gpus=(0, 1), engine_device="cuda:1") == "cuda:1"
    assert engine(gpus=(0, 1), models=(ModelEntry(name="smollm2-135m-instruct", kind="text"),)) == "cuda:0"
    assert engine(gpus=()) == "cpu"
    with pytest.raises(ConfigurationError, match="engine_device"):
        load_settings(engine_device="gpu")


def test_a_child_that_cannot_be_started_ends_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path, gpus=(), models=())
    db = open_database(settings.database)
    with open_listener("127.0.0.1", 0) as listener:
        watching = supervisor.Supervisor(settings, db, listener)
        child = watching.children[-1]

        def refuse() -> int:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(child, "start", refuse)
        watching._care_for(child)
    db.close()
    assert "cannot be started: [Errno 11] Resource temporarily unavailable; it is tried again" in caplog.text
    assert child.restart_at > time.monotonic()


def test_gpus_are_asked_for_only_when_the_settings_leave_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.plan.find_gpus", lambda: (0, 1, 2))
    for gpus, workers in ((None, 3), ((1,), 1)):
        children = plan_children(Settings(data_dir=tmp_path, gpus=gpus), 7)
        assert sum(child.name.startswith("video-") for child in children) == workers


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 16, 64])
def test_video_and_text_do_not_fight_for_cores(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    video, engine = share_cores(Settings(data_dir=tmp_path), is_cpu_only=True)
    assert video >= 1 and engine >= 1
    assert video + engine <= max(2, cores)
    named = Settings(data_dir=tmp_path, video_threads=3, engine_threads=5)
    assert share_cores(named, is_cpu_only=True) == (3, 5)


def test_threads_reach_the_libraries(tmp_path: Path) -> None:
    children = plan_children(Settings(data_dir=tmp_path, gpus=(), video_threads=3), 7)
    by_name = {child.name: child for child in children}
    assert by_name["video-0"].extra_env["OMP_NUM_THREADS"] == argument(by_name["video-0"].command, "--threads") == "3"
    assert by_name["api"].extra_env["OMP_NUM_THREADS"] == "1"


def test_a_port_that_is_taken_is_refused_with_its_number() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} on 127.0.0.1 is in use"):
            open_listener("127.0.0.1", port)
        # the socket listens already: whoever connects before the API is up waits, and is not refused
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    with pytest.raises(ConfigurationError, match="cannot be listened on"):
        open_listener("no-such-host.invalid", 1)


def test_address_for_this_machine(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, port=8123)
    assert service_url(settings) == "http://127.0.0.1:8123"
    assert service_url(settings.model_copy(update={"host": "0.0.0.0"})) == "http://127.0.0.1:8123"
    assert service_url(settings.model_copy(update={"host": "::"})) == "http://[::1]:8123"


def test_leases_of_dead_processes_of_this_machine_end(tmp_path: Path) -> None:
    db = open_migrated(f"sqlite:///{tmp_path / 'db'}")
    # no process has a number beyond the kernel's limit of 2^22
    owners = {
        "dead": worker_id("video-0", 2**22 + 1),
        "alive": worker_id("video-0"),
        "elsewhere": "video-0@elsewhere:1",
    }
    for pool, owner in owners.items():
        store.submit(db, JobSpec(kind="video", pool=pool))
        assert claim_next(db, pool, owner, 600.0) is not None
    assert end_leases_of_the_dead(db) == 1
    assert claim_next(db, "dead", "next", 600.0) is not None
    assert claim_next(db, "alive", "next", 600.0) is None
    assert claim_next(db, "elsewhere", "next", 600.0) is None
    db.close()


def test_a_service_starts_though_its_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a service nothing could be freed; leases that cannot be ended now end by themselves."""
    settings = Settings(data_dir=tmp_path, gpus=(), models=())
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorname = "SQLITE_FULL"
    tries = []

    def refuse(_: object) -> int:
        tries.append(1)
        raise OperationalError("UPDATE", {}, full)

    monkeypatch.setattr(supervisor, "end_leases_of_the_dead", refuse)
    db = open_database(settings.database)
    with open_listener("127.0.0.1", 0) as listener:
        starting = supervisor.Supervisor(settings, db, listener)
        monkeypatch.setattr(starting, "_start_all", lambda: False)
        assert starting.run() == 1
    db.close()
    assert len(tries) == 2 and "could not be ended" in caplog.text


def test_a_data_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `up` sets its own logging; what it says to a person is the command line's
    monkeypatch.setattr(supervisor, "setup_logging", lambda *_: None)
    file = tmp_path / "file"
    file.write_text("")
    for bad in (file, file / "below", Path("/proc/x"), Path("/proc")):
        assert run(["up", "--port", "0", "--data", str(bad)]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"media-server: data: {bad} cannot be the data folder: ") and told.count("\n") == 1
    assert run(["up", "--data", ""]) == 1
    assert "must name a folder" in capsys.readouterr().err
