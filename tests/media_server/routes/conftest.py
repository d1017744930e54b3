"""The application on a real SQLite store and a real folder, with a scripted worker in the place of the models."""

import shutil
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
from media_server.jobs.database import Database, migrate, open_database
from media_server.jobs.tables import metadata
from media_server.models.card import TextCard, VideoCard
from media_server.models.registry import publish
from media_server.settings import Settings
from tests.media_server import scripted_worker
from tests.media_server.scripted_worker import ScriptedWorker

VIDEO_CARD = VideoCard.model_validate(
    {
        "name": "tiny-wan",
        "pool": "video",
        "revision": "test",
        "hash": "sha256:00",
        "license": "Apache-2.0",
        "origin": "drawn for the tests",
        "layout": "wan-ti2v",
        "size": {
            "default": "160x96",
            "multiple_of": 16,
            "min": [64, 64],
            "max": [256, 256],
            "max_pixels": 36864,
            "trained": ["160x96"],
        },
        "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
        "fps": 16,
        "fps_range": [1, 60],
        "defaults": {"num_inference_steps": 8, "guidance_scale": 3.0, "seconds": 2},
        "limits": {"max_prompt_chars": 500, "max_steps": 50, "max_seconds": 30, "max_guidance_scale": 20},
        "conditions": ["text", "first_frame", "last_frame", "overlap"],
    }
)
TEXT_CARD = TextCard.model_validate(
    {
        "name": "smollm2-135m-instruct",
        "pool": "text",
        "revision": "test",
        "hash": "sha256:01",
        "license": "Apache-2.0",
        "origin": "none",
        "context_length": 8192,
        "tokenizer": "models/smollm2-135m-instruct/01/tokenizer.json",
        "eos_token_ids": [2],
    }
)


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


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that is migrated once; the tests have copies of it."""
    path = tmp_path_factory.mktemp("database") / "media-server.db"
    db = open_database(f"sqlite:///{path}")
    migrate(db)
    db.close()
    return path


@pytest.fixture
def service(settings: Settings, migrated: Path, clip_bytes: bytes) -> Iterator[Service]:
    settings.data_dir.mkdir()
    shutil.copy(migrated, settings.data_dir)
    db = open_database(settings.database)
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
