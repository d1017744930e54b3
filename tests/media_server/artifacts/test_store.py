"""Files by key: what is written is read, nothing leaves the folder, prefixes are folders."""

import hashlib
import io
import os
from pathlib import Path

import pytest

from media_server.artifacts.store import READ_BYTES, ArtifactStore, open_artifacts
from media_server.errors import ConfigurationError, InvalidRequest, NotFound
from media_server.settings import load_settings

KEY = "video_1/1/video.mp4"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store in a folder."""
    return open_artifacts(str(tmp_path / "artifacts"))


def test_a_file_is_read_as_it_was_written(store: ArtifactStore, tmp_path: Path) -> None:
    content = os.urandom(2 * READ_BYTES + 17)
    source = tmp_path / "clip.mp4"
    source.write_bytes(content)
    stored = store.put_file(KEY, source, "video/mp4")
    assert (stored.key, stored.content_type, stored.size_bytes) == (KEY, "video/mp4", len(content))
    assert stored.sha256 == hashlib.sha256(content).hexdigest()
    assert store.size(KEY) == len(content)
    assert b"".join(store.read(KEY)) == content
    assert max(len(chunk) for chunk in store.read(KEY)) <= READ_BYTES
    path = store.local_path(KEY)
    assert path is not None
    assert path.read_bytes() == content
    assert store.presigned_url(KEY, 60.0) is None
    record = stored.record("video")
    assert (record.name, record.key, record.state, record.sequence) == ("video", KEY, "final", 0)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 7), (9, None), (0, 10), (5, 99), (10, None), (4, 4), (12, 20)])
def test_ranges_are_pythons(store: ArtifactStore, start: int, end: int | None) -> None:
    store.put_bytes(KEY, b"0123456789", "text/plain")
    assert b"".join(store.read(KEY, start, end)) == b"0123456789"[start:end]


def test_open_files_and_empty_files(store: ArtifactStore) -> None:
    assert store.put_file("a/1/x", io.BytesIO(b"abc"), "text/plain").size_bytes == 3
    assert store.put_bytes("a/1/y", b"", "text/plain").size_bytes == 0
    assert list(store.read("a/1/y")) == []


def test_what_is_not_there_is_not_found(store: ArtifactStore) -> None:
    for ask in (store.size, store.read, store.local_path):
        with pytest.raises(NotFound):
            ask(KEY)
    assert not store.exists(KEY)
    assert store.delete_prefix("video_1/") == 0


def test_a_prefix_is_a_folder(store: ArtifactStore) -> None:
    for key in ("video_1/1/a", "video_1/2/b", "video_10/1/c", "video_1/inputs/d"):
        store.put_bytes(key, b"x", "text/plain")
    assert sorted(store.list_keys("video_1/")) == ["video_1/1/a", "video_1/2/b", "video_1/inputs/d"]
    assert store.delete_prefix("video_1/2/") == 1
    assert store.delete_prefix("video_1/") == 2
    assert store.exists("video_10/1/c")
    assert store.root is not None
    assert sorted(path.name for path in store.root.iterdir()) == ["video_10"]


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", ".hidden", "a\\b", "a/\0", "a b", "ü", "x" * 513],
)
def test_keys_are_plain_names(store: ArtifactStore, key: str) -> None:
    for ask in (store.size, store.local_path, store.exists, store.read):
        with pytest.raises(InvalidRequest):
            ask(key)
    with pytest.raises(InvalidRequest):
        store.put_bytes(key, b"", "text/plain")


def test_links_do_not_lead_out(store: ArtifactStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("canary")
    assert store.root is not None
    (store.root / "link").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in ("link/secret", "file"):
        with pytest.raises(NotFound):
            store.local_path(key)
        with pytest.raises(NotFound):
            list(store.read(key))
    with pytest.raises(NotFound):
        store.put_bytes("link/new", b"x", "text/plain")
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_it_is_opened_by_settings_or_url(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "data")
    store = open_artifacts(settings)
    assert store.root == tmp_path / "data" / "artifacts"
    assert store.root.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigurationError, match="got ftp://"):
        open_artifacts("ftp://user:secret@host/path")
