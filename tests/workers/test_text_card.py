"""The card of a language model, from what its folder says, and the files that the front reads."""

import json
from pathlib import Path

import pytest

from llm.engine import load_engine
from media_server.artifacts.store import open_artifacts
from media_server.errors import ConfigurationError
from media_server.settings import ModelEntry, Settings
from tests.llm.byte_tokenizer import EOS, byte_tokenizer
from tests.llm.conftest import tiny_model
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
    # the pool holds less than the model's 256
    assert card.context_length == 100
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
    assert (card.license, card.revision, card.hash, card.defaults.temperature) == ("MIT", "7", "sha256:ab", 0.3)
    assert card.context_length == 256
    assert card.tokenizer == "models/my-model/ab/tokenizer.json"
    (folder / "card.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"card\.json is not JSON"):
        text_card(engine, ENTRY, folder)


def test_entries_are_found_by_name() -> None:
    settings = Settings(models=(ModelEntry(name="v", kind="video"), ENTRY))
    assert find_entry(settings, None) is find_entry(settings, "my model")
    with pytest.raises(ConfigurationError, match="my model"):
        find_entry(settings, "v")
