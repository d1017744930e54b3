"""The application on a real SQLite store and a real folder, with a scripted worker in the place of the models."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from media_server.app import create_app
from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.jobs.database import Database
from media_server.jobs.tables import metadata
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.cards import TEXT_CARD, VIDEO_CARD
from tests.fresh_database import open_migrated
from tests.media_server import scripted_worker
from tests.media_server.scripted_worker import ScriptedWorker

ClipWriter = Callable[..., bytes]


@dataclass
class Service:
    """The application with what stands behind it."""

    settings: Settings
    http: TestClient
    db: Database
    artifacts: ArtifactStore
    worker: ScriptedWorker

    def contents(self) -> tuple[dict[str, int], set[str]]:
        """Count the rows of every table and list every file of the store: what a refused request must not change."""
        with self.db.read() as tx:
            rows = {
                table.name: len(tx.conn.execute(table.select()).all())
                for table in metadata.sorted_tables
                # a request is counted whatever became of it
                if table.name != "counters"
            }
        root = Path(self.settings.artifacts)
        return rows, {str(path.relative_to(root)) for path in root.rglob("*")}

    def completed_video(self, **fields: Any) -> dict[str, Any]:
        """Make a clip and wait for it."""
        answer = self.http.post("/v1/videos", json={"prompt": "a red ball", **fields})
        assert answer.status_code == 200, answer.text
        self.worker.run_all()
        video: dict[str, Any] = self.http.get(f"/v1/videos/{answer.json()['id']}").json()
        assert video["status"] == "completed"
        return video


@pytest.fixture(scope="session")
def write_clip() -> ClipWriter:
    """Write a real clip of grey frames: path, number of frames, size, frames a second."""
    return scripted_worker.write_clip


@pytest.fixture(scope="session")
def clip_bytes(write_clip: ClipWriter, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A real MP4 of 32 frames, 160x96, 16 fps."""
    return write_clip(tmp_path_factory.mktemp("clip") / "clip.mp4", 32)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    # nothing listens there: doorbells are lost, which no request may notice
    return Settings(data_dir=tmp_path / "data", broker_url="redis://127.0.0.1:1/0", max_upload_bytes=4 << 20)


@pytest.fixture
def service(settings: Settings, clip_bytes: bytes) -> Iterator[Service]:
    db = open_migrated(settings.database)
    publish(db, VIDEO_CARD, "scripted@test:1")
    publish(db, TEXT_CARD, "engine@test:1")
    artifacts = open_artifacts(settings)
    worker = ScriptedWorker(db, artifacts, clip_bytes, scripted_worker.draw_picture("JPEG", (64, 64)))
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as http:
        yield Service(settings, http, db, artifacts, worker)
    db.close()


@pytest.fixture
def app(service: Service) -> FastAPI:
    """The application once more, to be served on a port."""
    return create_app(service.settings)


@pytest.fixture
def live(app: FastAPI) -> Iterator[str]:
    """The application behind uvicorn on a free loopback port; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def working(service: Service) -> Iterator[Service]:
    """The service with its scripted worker at work in a thread."""
    stopping = threading.Event()

    def work() -> None:
        while not stopping.wait(0.02):
            service.worker.run_all()

    thread = threading.Thread(target=work)
    thread.start()
    yield service
    stopping.set()
    thread.join()
