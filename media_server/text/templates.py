"""From messages to token ids, by the tokenizer and chat template that a model's worker published.

Templates are transformers' dialect of Jinja2 and run in a sandbox; no transformers and no torch is imported.
Invariant: a chat's special tokens come from its template alone, so none is written twice.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from media_server.artifacts.store import ArtifactStore
from media_server.errors import InvalidRequest, NotReady
from media_server.models.card import TextCard


@dataclass(frozen=True)
class TextModel:
    """A language model as the front knows it."""

    card: TextCard
    tokenizer: Tokenizer
    template: jinja2.Template | None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Write a conversation as the model was trained to read it, ready for its answer.

        Raises InvalidRequest if the model has no chat template or its template refuses the messages.
        """
        if self.template is None:
            raise InvalidRequest(
                f"messages: {self.card.name} has no chat template; use /v1/completions.",
                param="messages",
                rule="a model with a chat template",
                value=self.card.name,
            )
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=True, bos_token=self.card.bos or "", eos_token="", tools=None
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"messages: the chat template of {self.card.name} refuses them: {error}.",
                param="messages",
                rule=str(error),
            ) from error
        return self._encode(text, has_special=False)

    def encode_text(self, text: str, *, has_special: bool = True) -> list[int]:
        """Encode a text as it stands; `has_special`: with the special tokens that the tokenizer adds to any text."""
        return self._encode(text, has_special=has_special)

    @property
    def num_token_ids(self) -> int:
        """How many ids the tokenizer knows, from 0 on."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Write ids below `num_token_ids` out as text."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Give each token as the vocabulary writes it."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _encode(self, text: str, *, has_special: bool) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=has_special).ids
        return token_ids


class TextModels:
    """The language models in use, loaded from the artifact store once each."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts
        self._lock = threading.Lock()
        self._loaded: dict[str, TextModel] = {}

    def load(self, card: TextCard) -> TextModel:
        """Give the model of a card; blocks while its files are read for the first time.

        Raises NotReady if they cannot be read.
        """
        with self._lock:
            # the keys carry the hash of all that decides what a model reads and writes
            found = self._loaded.get(card.tokenizer)
            if found is None or found.card != card:
                found = self._load(card)
                self._loaded[card.tokenizer] = found
            return found

    def _load(self, card: TextCard) -> TextModel:
        try:
            tokenizer = Tokenizer.from_buffer(b"".join(self._artifacts.read(card.tokenizer)))
            template = None
            if card.chat_template is not None:
                template = compile_template(b"".join(self._artifacts.read(card.chat_template)).decode())
        except Exception as error:
            raise NotReady(
                f"The tokenizer or the chat template of {card.name} cannot be read.", param="model", value=card.name
            ) from error
        return TextModel(card, tokenizer, template)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes HTML
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
