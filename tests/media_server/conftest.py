"""What the front's tests share: a model card, and databases of both kinds."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from media_server.jobs.database import Database, migrate, open_database
from media_server.models.card import VideoCard
from tests.postgres import find_programs, running, why_missing


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a PostgreSQL server with an empty, migrated database `migrated`."""
    programs = find_programs()
    if programs is None:
        pytest.skip(why_missing())
    # the socket's path must be short, and open to the server's user: the run's own folder is not
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    with running(programs, folder) as url:
        _create_database(url, "migrated")
        opened = open_database(_named(url, "migrated"))
        migrate(opened)
        opened.close()
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def is_postgres(request: pytest.FixtureRequest) -> bool:
    """Which of the two stores a test runs on."""
    return bool(request.param == "postgresql")


@pytest.fixture
def database_url(is_postgres: bool, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database of its own: empty, or, for tests that take `db`, the migrated one that `db` opens."""
    is_migrated = "db" in request.fixturenames
    if is_postgres:
        template = "migrated" if is_migrated else "template1"
        return _create_database(request.getfixturevalue("postgres"), f"test_{uuid.uuid4().hex}", template)
    path = tmp_path / "jobs.db"
    if is_migrated:
        shutil.copyfile(request.getfixturevalue("migrated_file"), path)
    return f"sqlite:///{path}"


def _create_database(server: str, name: str, template: str = "template1") -> str:
    """Copy a database of the server and give the URL of the copy; nothing is dropped, since the server goes."""
    engine = sa.create_engine(make_url(server).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy"))
    engine.dispose()
    return _named(server, name)


def _named(server: str, name: str) -> str:
    return make_url(server).set(database=name).render_as_string(hide_password=False)


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
def db(database_url: str, rings: list[str]) -> Iterator[Database]:
    """A migrated database."""
    opened = open_database(database_url, rings.append)
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
