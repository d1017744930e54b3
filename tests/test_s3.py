"""Artifacts in a bucket: the same files by the same keys, over a real HTTP server that speaks S3."""

import hashlib
import io
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from media_server.app import create_app
from media_server.artifacts.store import READ_BYTES, ArtifactStore, open_artifacts
from media_server.errors import NotFound
from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.doorbell import make_celery
from media_server.jobs.spec import JobSpec
from media_server.jobs.states import Status
from media_server.models.registry import publish
from media_server.settings import Settings
from tests import s3_server
from tests.cards import VIDEO_CARD
from tests.fresh_database import open_migrated
from tests.media_server.scripted_worker import ScriptedWorker
from tests.workers.test_media_worker import submit_join
from tests.workers.test_video_worker import PARAMS
from workers.clip_files import ClipFiles
from workers.media_worker import join_film
from workers.pool_worker import PoolContext
from workers.sweeper import collect_garbage

pytestmark = pytest.mark.s3

KEY = "video_1/1/video.mp4"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 server of this process, with one bucket; the AWS variables lead to it, as they lead to any other."""
    with s3_server.running() as bucket, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in bucket.variables.items():
            patch.setenv(name, value)
        yield bucket.url


@pytest.fixture
def url(endpoint: str, request: pytest.FixtureRequest) -> str:
    """The place of one test in the bucket."""
    return f"s3://{s3_server.BUCKET}/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"


@pytest.fixture
def artifacts(url: str) -> ArtifactStore:
    return open_artifacts(url)


@pytest.fixture
def settings(url: str, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, artifacts_url=url, broker_url="redis://127.0.0.1:1/0", beat_s=1e-9)


@pytest.fixture
def db(settings: Settings) -> Iterator[Database]:
    opened = open_migrated(settings.database)
    yield opened
    opened.close()


def test_a_file_is_read_as_it_was_written(artifacts: ArtifactStore, tmp_path: Path) -> None:
    # large enough to be sent in parts
    content = os.urandom(11 * READ_BYTES + 17)
    source = tmp_path / "clip.mp4"
    source.write_bytes(content)
    stored = artifacts.put_file(KEY, source, "video/mp4")
    assert (stored.size_bytes, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert artifacts.size(KEY) == len(content)
    chunks = list(artifacts.read(KEY))
    assert b"".join(chunks) == content
    assert max(map(len, chunks)) <= READ_BYTES
    assert b"".join(artifacts.read(KEY, 5, READ_BYTES + 9)) == content[5 : READ_BYTES + 9]
    # nothing of it lies in a folder
    assert artifacts.root is None and artifacts.local_path(KEY) is None


def test_small_and_empty_files_and_ranges(artifacts: ArtifactStore) -> None:
    artifacts.put_bytes(KEY, b"0123456789", "text/plain")
    for start, end in ((0, 1), (3, 7), (9, None), (5, 99), (10, None), (12, 20)):
        assert b"".join(artifacts.read(KEY, start, end)) == b"0123456789"[start:end]
    assert artifacts.put_bytes("video_1/1/empty", b"", "text/plain").size_bytes == 0
    assert list(artifacts.read("video_1/1/empty")) == []
    assert artifacts.put_file("video_1/1/open", io.BytesIO(b"abc"), "text/plain").size_bytes == 3


def test_what_is_not_there_is_not_found(artifacts: ArtifactStore) -> None:
    for ask in (artifacts.size, artifacts.read):
        with pytest.raises(NotFound):
            ask(KEY)
    assert not artifacts.exists(KEY)
    assert artifacts.delete_prefix("video_1/") == 0


def test_a_prefix_is_a_folder(artifacts: ArtifactStore) -> None:
    for key in ("video_1/1/a", "video_1/2/b", "video_10/1/c", "video_1/inputs/d"):
        artifacts.put_bytes(key, b"x", "text/plain")
    assert sorted(artifacts.list_keys("video_1/")) == ["video_1/1/a", "video_1/2/b", "video_1/inputs/d"]
    walked = dict(artifacts.walk())
    assert sorted(walked) == ["video_1/1/a", "video_1/2/b", "video_1/inputs/d", "video_10/1/c"]
    assert all(abs(time.time() - changed_at) < 300 for changed_at in walked.values())
    assert artifacts.delete_prefix("video_1/2/") == 1
    assert artifacts.delete_prefix("video_1/") == 2
    assert artifacts.exists("video_10/1/c")


def test_a_signed_url_reads_without_us(artifacts: ArtifactStore) -> None:
    artifacts.put_bytes(KEY, b"a clip", "video/mp4")
    signed = artifacts.presigned_url(KEY, 60.0)
    assert signed is not None
    answer = httpx.get(signed, trust_env=False)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"a clip", "video/mp4")


def test_files_are_fetched_from_the_store_where_the_settings_say_so(
    settings: Settings, db: Database, artifacts: ArtifactStore
) -> None:
    publish(db, VIDEO_CARD, "scripted@test:1")
    clip = os.urandom(3000)
    picture = io.BytesIO()
    Image.new("RGB", (160, 96), "red").save(picture, "PNG")
    worker = ScriptedWorker(db, artifacts, clip, picture.getvalue())
    application = create_app(settings.model_copy(update={"redirect_downloads": True}))
    with TestClient(application, base_url="http://127.0.0.1:8000", follow_redirects=False) as http:
        video = http.post("/v1/videos", data={"prompt": "a red ball"}).json()
        worker.run_all()
        path = f"/v1/videos/{video['id']}/content"
        sent = http.get(path)
        assert (sent.status_code, sent.headers["cache-control"], sent.content) == (302, "no-store", b"")
        part = httpx.get(sent.headers["location"], headers={"range": "bytes=1000-1999"}, trust_env=False)
        assert (part.status_code, part.content) == (206, clip[1000:2000])
        # validators are answered here, from the database
        etag = http.head(path).headers["etag"]
        assert http.get(path, headers={"if-none-match": etag}).status_code == 304


def test_a_clips_life_by_http(settings: Settings, db: Database, artifacts: ArtifactStore) -> None:
    """Its input, its files, a part of one, and none of them after it was deleted."""
    publish(db, VIDEO_CARD, "scripted@test:1")
    picture = io.BytesIO()
    Image.new("RGB", (160, 96), "red").save(picture, "PNG")
    clip = os.urandom(3000)
    worker = ScriptedWorker(db, artifacts, clip, picture.getvalue())
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as http:
        files = {"input_reference": ("a.png", picture.getvalue(), "image/png")}
        video = http.post("/v1/videos", data={"prompt": "a red ball"}, files=files).json()
        assert list(artifacts.list_keys(video["id"])) == [f"{video['id']}/inputs/first_frame.png"]
        worker.run_all()
        path = f"/v1/videos/{video['id']}"
        assert http.get(path).json()["status"] == "completed"
        whole = http.get(f"{path}/content")
        assert (whole.status_code, whole.content, whole.headers["content-type"]) == (200, clip, "video/mp4")
        part = http.get(f"{path}/content", headers={"range": "bytes=1000-1999"})
        assert (part.status_code, part.content) == (206, clip[1000:2000])
        assert http.get(f"{path}/content", params={"variant": "manifest"}).json()["v"] == 1
        assert http.delete(path).json()["deleted"] is True
        assert list(artifacts.list_keys(video["id"])) == []


def test_a_video_worker_brings_files_to_disk_and_back(settings: Settings, db: Database, tmp_path: Path) -> None:
    context = _context(settings, db, "video")
    inputs = {"first_frame": "video_x/inputs/first_frame.png"}
    context.artifacts.put_bytes(inputs["first_frame"], b"png", "image/png")
    store.submit(db, JobSpec(kind="video", pool="video", params={**PARAMS, "inputs": inputs}, max_attempts=3))
    claim = claims.claim_next(db, "video", "w", 20.0)
    assert claim is not None
    segment = tmp_path / "made.mkv"
    segment.write_bytes(b"mkv")
    folder = tmp_path / "first"
    folder.mkdir()
    first = ClipFiles(context, claim, folder)
    given, resume = first.fetch()
    assert (Path(given["first_frame"]).read_bytes(), resume) == (b"png", [])
    first.keep_segment(0, segment, {"n": 0})
    # and one whose file is gone by the time that it is needed
    claims.save_checkpoint(db, claim, 1, f"{claim.job.id}/segments/1_001.mkv", {"n": 1})
    made = {"name": "video", "path": str(segment), "content_type": "video/x-matroska"}
    (record,) = first.upload([made])
    assert record.key == f"{claim.job.id}/1/made.mkv"
    # the attempt is lost: its file goes, the next one has the segments up to one that is gone
    first.remove()
    folder = tmp_path / "second"
    folder.mkdir()
    _, resume = ClipFiles(context, claim, folder).fetch()
    assert [(Path(entry["path"]).read_bytes(), entry["data"]) for entry in resume] == [(b"mkv", {"n": 0})]
    assert list(context.artifacts.list_keys(claim.job.id)) == [f"{claim.job.id}/segments/1_000.mkv"]
    first.remove_segments()
    assert list(context.artifacts.list_keys(claim.job.id)) == []


def test_a_film_is_joined_from_the_bucket_into_it(settings: Settings, db: Database) -> None:
    context = _context(settings, db, "media")
    claim = submit_join(context)
    join_film(context, claim)
    job = store.get(db, claim.job.id)
    assert job.status is Status.COMPLETED, job.error_message
    names = sorted(record.name for record in store.artifacts_of(db, job.id))
    assert names == ["contact_sheet", "storyboard", "thumbnail", "timeline", "video"]
    for record in store.artifacts_of(db, job.id):
        content = b"".join(context.artifacts.read(record.key))
        assert (len(content), hashlib.sha256(content).hexdigest()) == (record.size_bytes, record.sha256)
    # what nobody owns any more goes with the sweeper's next round
    store.delete(db, job.id)
    collect_garbage(db, context.artifacts)
    assert list(context.artifacts.list_keys(job.id)) == []
    shutil.rmtree(settings.runtime_dir, ignore_errors=True)


def _context(settings: Settings, db: Database, pool: str) -> PoolContext:
    return PoolContext(
        settings=settings,
        db=db,
        artifacts=open_artifacts(settings),
        celery=make_celery(settings),
        stopping=threading.Event(),
        pool=pool,
        worker="w",
    )
