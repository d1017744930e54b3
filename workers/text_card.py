"""The card of a language model, from its folder, and the files that the front needs of it."""

import json
from pathlib import Path
from typing import Any

from llm.checkpoints.content_hash import hash_folder
from llm.engine import Engine
from media_server.artifacts.store import ArtifactStore
from media_server.errors import ConfigurationError
from media_server.models.card import TextCard
from media_server.settings import ModelEntry

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"


def text_card(engine: Engine, entry: ModelEntry, folder: Path, hash_cache: Path | None = None) -> TextCard:
    """Describe a loaded model: card.json beside the weights where there is one, the rest from its configuration.

    The hash is that of the folder's content, whatever the card says: a copied card makes no two models one.
    `hash_cache` is a file that remembers the hashes of the weights; None: they are read.
    """
    known = _read_json(folder / "card.json")
    model_hash = hash_folder(folder, hash_cache)
    prefix = f"models/{_segment(entry.name)}/{model_hash.removeprefix('sha256:')[:16]}"
    has_template = _template(folder) is not None
    settings = _read_json(folder / "tokenizer_config.json")
    return TextCard.model_validate(
        {
            "revision": "",
            "license": "unknown",
            "origin": str(_read_json(folder / "config.json").get("_name_or_path") or folder.name),
            **known,
            "v": 1,
            "kind": "text",
            "name": entry.name,
            "pool": entry.pool_name,
            "hash": model_hash,
            "context_length": min(engine.context_length, engine.scheduler.kv_cache.num_tokens),
            "tokenizer": f"{prefix}/{_TOKENIZER}",
            "chat_template": f"{prefix}/{_TEMPLATE}" if has_template else None,
            "bos": _token(settings.get("bos_token")),
            "eos_token_ids": list(engine.eos_token_ids),
        }
    )


def publish_files(artifacts: ArtifactStore, card: TextCard, folder: Path) -> None:
    """Put tokenizer and chat template where the front reads them; keys carry the hash of all that is in them."""
    files = {card.tokenizer: (folder / _TOKENIZER).read_bytes()}
    template = _template(folder)
    if card.chat_template is not None and template is not None:
        files[card.chat_template] = template.encode()
    for key, content in files.items():
        if not artifacts.exists(key):
            artifacts.put_bytes(key, content, "application/json" if key.endswith(".json") else "text/plain")


def _template(folder: Path) -> str | None:
    """Read the chat template: a file of its own, or a field of tokenizer_config.json."""
    path = folder / _TEMPLATE
    if path.is_file():
        return path.read_text()
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        # several by name; the plain one is for chat
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token(value: object) -> str | None:
    """Read a token of tokenizer_config.json: text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _segment(name: str) -> str:
    """Make a model's name fit for one segment of a key."""
    return "".join(character if character.isalnum() or character in "._-" else "-" for character in name).lstrip(".")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path.parent.name}/{path.name} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
