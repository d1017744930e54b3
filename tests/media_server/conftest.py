"""What the front's tests share: a model card, and databases (PostgreSQL too, by MEDIA_SERVER_TEST_POSTGRES_URL)."""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from media_server.jobs.database import Database, migrate, open_database
from media_server.models.card import VideoCard

POSTGRES_URL = os.environ.get("MEDIA_SERVER_TEST_POSTGRES_URL")


@pytest.fixture(params=["sqlite", "postgresql"] if POSTGRES_URL else ["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database of its own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.db'}"
        return
    assert POSTGRES_URL is not None
    schema = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(make_url(POSTGRES_URL).set(drivername="postgresql+psycopg"))
    with engine.begin() as conn:
        conn.execute(sa.schema.CreateSchema(schema))
    yield make_url(POSTGRES_URL).update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(False)
    with engine.begin() as conn:
        conn.execute(sa.schema.DropSchema(schema, cascade=True))
    engine.dispose()


@pytest.fixture
def rings() -> list[str]:
    """Pools whose doorbell the database rang."""
    return []


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty, migrated SQLite database, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "jobs.db"
    opened = open_database(f"sqlite:///{path}")
    migrate(opened)
    opened.close()
    return path


@pytest.fixture
def db(database_url: str, migrated_file: Path, rings: list[str]) -> Iterator[Database]:
    """A migrated database."""
    if database_url.startswith("sqlite"):
        shutil.copyfile(migrated_file, database_url.removeprefix("sqlite:///"))
    opened = open_database(database_url, rings.append)
    migrate(opened)
    yield opened
    opened.close()


@pytest.fixture
def card() -> VideoCard:
    """The card of a small video model: at most 57 frames in one piece, continued from a clip's last frame."""
    return VideoCard.model_validate(
        {
            "v": 1,
            "name": "tiny-wan",
            "kind": "video",
            "pool": "video",
            "revision": "1",
            "hash": "sha256:00",
            "license": "Apache-2.0",
            "origin": "drawn",
            "layout": "wan-ti2v",
            "size": {
                "default": "160x96",
                "multiple_of": 16,
                "min": [64, 64],
                "max": [256, 256],
                "max_pixels": 36864,
                "trained": ["96x96", "160x96"],
            },
            "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
            "fps": 16,
            "fps_range": [1, 60],
            "defaults": {"num_inference_steps": 8, "guidance_scale": 4.0, "seconds": 2, "flow_shift": 3.0},
            "limits": {"max_prompt_chars": 200, "max_steps": 50, "max_seconds": 60, "max_guidance_scale": 30},
            "cost": {
                "seconds_fixed": 0.5,
                "seconds_per_step_token": 0.001,
                "seconds_per_frame_pixel": 1e-7,
                "bytes_fixed": 1000,
                "bytes_per_token": 10,
            },
            "conditions": ["text", "first_frame"],
        }
    )
