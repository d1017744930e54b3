"""The card of a language model, from what its folder says, and the files that the front reads."""

import hashlib
import json
import os
import shutil
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from llm.checkpoints.content_hash import hash_folder
from llm.load import load_engine
from media_server.artifacts.store import open_artifacts
from media_server.errors import ConfigurationError
from media_server.models.registry import get_card
from media_server.settings import ModelEntry, Settings
from tests.fresh_database import open_migrated
from tests.llm.byte_tokenizer import EOS, byte_tokenizer
from tests.llm.conftest import tiny_model
from workers import engine_process
from workers.engine_process import find_entry
from workers.text_card import publish_files, text_card


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder as `save_pretrained` leaves it, without a card."""
    path = tmp_path_factory.mktemp("model") / "my-model"
    tiny_model().save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


ENTRY = ModelEntry(name="my model", kind="text", path="/somewhere", pool="words")


def test_a_folder_without_a_card(folder: Path, tmp_path: Path) -> None:
    engine = load_engine(folder, "cpu", kv_tokens=100)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages }}"}]
    config = {"chat_template": templates, "bos_token": {"content": "<|begin|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    card = text_card(engine, ENTRY, folder)
    assert (card.name, card.pool, card.license) == ("my model", "words", "unknown")
    assert (card.eos_token_ids, card.bos) == ([EOS], "<|begin|>")
    # six blocks of 16 hold less than the model's 256
    assert card.context_length == 96
    assert card.hash.startswith("sha256:")
    artifacts = open_artifacts(Settings(data_dir=tmp_path))
    publish_files(artifacts, card, folder)
    publish_files(artifacts, card, folder)
    assert card.chat_template is not None
    assert b"".join(artifacts.read(card.chat_template)) == b"{{ messages }}"
    assert b"".join(artifacts.read(card.tokenizer)) == (folder / "tokenizer.json").read_bytes()


def test_a_card_beside_the_weights_wins_and_a_template_file_too(folder: Path) -> None:
    engine = load_engine(folder, "cpu", kv_tokens=300)
    (folder / "chat_template.jinja").write_text("x")
    (folder / "card.json").write_text(
        json.dumps({"license": "MIT", "revision": "7", "hash": "sha256:ab", "defaults": {"temperature": 0.3}})
    )
    card = text_card(engine, ENTRY, folder)
    assert (card.license, card.revision, card.defaults.temperature) == ("MIT", "7", 0.3)
    assert card.context_length == 256
    # but for its hash, which a copied card would share
    assert card.hash != "sha256:ab"
    assert card.tokenizer == f"models/my-model/{card.hash[7:23]}/tokenizer.json"
    (folder / "card.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"card\.json is not JSON"):
        text_card(engine, ENTRY, folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_an_edited_file_is_taken_up(folder: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "card.json").write_text(json.dumps({"hash": "sha256:ab"}))
    (copy / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (copy / "chat_template.jinja").write_text("one")
    engine = load_engine(copy, "cpu", kv_tokens=100)
    artifacts = open_artifacts(Settings(data_dir=tmp_path))
    before = text_card(engine, ENTRY, copy)
    publish_files(artifacts, before, copy)
    about = (copy / name).stat()
    # as long as before, and no younger
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content.replace(b": ", b":\t") if name.endswith(".json") else content[::-1])
    os.utime(copy / name, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = text_card(engine, ENTRY, copy)
    publish_files(artifacts, after, copy)
    assert after.hash != before.hash
    assert b"".join(artifacts.read(after.tokenizer)) == (copy / "tokenizer.json").read_bytes()
    assert after.chat_template is not None and before.chat_template is not None
    assert b"".join(artifacts.read(after.chat_template)) == (copy / "chat_template.jinja").read_bytes()
    # requests that were written by the files before still find them
    assert b"".join(artifacts.read(before.chat_template)) == b"one"


def test_fine_tunes_of_one_shape_have_hashes_of_their_own(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    first = hash_folder(folder, cache)
    copy = shutil.copytree(folder, tmp_path / "copy")
    # the name, not the place, and not the card
    (copy / "card.json").write_text("{}")
    assert hash_folder(copy) == hash_folder(copy, cache) == first
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert hash_folder(copy, cache) == hash_folder(copy) != first
    assert hash_folder(folder, cache) == first


def test_weights_are_read_once(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    first = hash_folder(copy, cache)
    about = weights.stat()
    weights.write_bytes(bytes(about.st_size))
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    # equal in size and time: what the cache says is believed
    assert hash_folder(copy, cache) == first != hash_folder(copy)
    cache.write_text("{")
    assert hash_folder(copy, cache) == hash_folder(copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "weights.json"]


def test_a_process_that_starts_again_reads_no_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "card.json").write_text("{}")
    data_dir = tmp_path / "data"
    (tmp_path / "config.toml").write_text(
        f'version = 1\ndata_dir = "{data_dir}"\n[[models]]\nname = "tiny"\nkind = "text"\npath = "{copy}"\n'
    )
    db = open_migrated(Settings(data_dir=data_dir).database)
    read: list[str] = []

    def note(file: BufferedReader, algorithm: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, algorithm)

    digest = hashlib.file_digest
    monkeypatch.setattr("llm.checkpoints.content_hash.hashlib.file_digest", note)
    monkeypatch.setattr("workers.engine_process.EngineProcess.run", lambda *_: 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("workers.engine_process.setup_logging", lambda *_: None)
    hashes = set()
    for _ in range(2):
        assert engine_process.main(["--config", str(tmp_path / "config.toml")]) == 0
        hashes.add(get_card(db, "tiny", "text").hash)
    assert read.count("model.safetensors") == 1 and read.count("tokenizer.json") == 2
    assert hashes == {hash_folder(copy)}
    db.close()


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_start(folder: Path, tmp_path: Path) -> None:
    assert hash_folder(folder, tmp_path / "missing" / "weights.json") == hash_folder(folder)


def test_entries_are_found_by_name() -> None:
    settings = Settings(models=(ModelEntry(name="v", kind="video"), ENTRY))
    assert find_entry(settings, None) is find_entry(settings, "my model")
    with pytest.raises(ConfigurationError, match="my model"):
        find_entry(settings, "v")
