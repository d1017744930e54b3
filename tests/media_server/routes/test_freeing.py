"""A disk without a byte left, a real one in memory: what frees room still works, at the reserve's expense."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from media_server.artifacts.reserve import give_reserve, keep_reserve
from media_server.jobs.database import lock_data_dir
from media_server.settings import Settings
from workers.sweeper import sweep_once

DISK_BYTES = 12 << 20
RESERVE_BYTES = 2 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux":
        pytest.skip("a small disk is a tmpfs, which only Linux has")
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this user may not mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


@pytest.fixture(params=[RESERVE_BYTES, 0])
def settings(small_disk: Path, request: pytest.FixtureRequest) -> Settings:
    return Settings(
        data_dir=small_disk / "data",
        broker_url="redis://127.0.0.1:1/0",
        # the watermark would refuse before the disk is full
        min_free_bytes=0,
        reserve_bytes=request.param,
    )


def fill(folder: Path, service: Any) -> None:
    """Leave not a byte, also not in what SQLite has set aside for itself: until a small write is refused."""
    path = folder / "ballast"
    while True:
        with path.open("ab", buffering=0) as file:
            for size in (1 << 16, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue
        answer = service.http.post("/v1/videos", json={"prompt": "a" * 400})
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
            return


def test_deleting_and_cancelling_work_on_a_full_disk(service: Any, settings: Settings, small_disk: Path) -> None:
    made = [service.http.post("/v1/videos", json={"prompt": "a"}).json()["id"] for _ in range(3)]
    service.worker.do(service.worker.claim("video"))
    assert keep_reserve(settings) is bool(settings.reserve_bytes)
    with lock_data_dir(settings.data_dir):
        pass
    fill(small_disk, service)
    # a service that was killed can be started on it
    with lock_data_dir(settings.data_dir):
        pass
    deleted = service.http.delete(f"/v1/videos/{made[0]}")
    if settings.reserve_bytes == 0:
        # without a reserve nothing can be freed: this is what it is for
        assert deleted.status_code == 507
        return
    assert deleted.status_code == 200
    assert not (small_disk / "data" / "artifacts" / made[0]).exists()
    cancelled = service.http.post(f"/v1/jobs/{made[1]}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert service.http.delete(f"/v1/videos/{made[2]}").status_code == 200
    # once there is room, the sweeper sets the reserve aside again
    assert not (small_disk / "data" / "reserve").exists()
    (small_disk / "ballast").unlink()
    sweep_once(settings, service.db, service.artifacts)
    assert (small_disk / "data" / "reserve").stat().st_size == RESERVE_BYTES
    assert service.http.post("/v1/videos", json={"prompt": "a"}).status_code == 200


def test_the_reserve_is_kept_only_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path, reserve_bytes=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 199_999}))
    assert not keep_reserve(settings) and list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert keep_reserve(settings) and keep_reserve(settings)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [100_000]
    # another size is another reserve
    assert keep_reserve(settings.model_copy(update={"reserve_bytes": 50_000}))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [50_000]
    assert give_reserve(settings) and not give_reserve(settings) and list(tmp_path.iterdir()) == []
    elsewhere = settings.model_copy(update={"database_url": "postgresql://db/x"})
    assert not keep_reserve(elsewhere) and not give_reserve(elsewhere)
