"""Chat templates without transformers: the same text as transformers makes, refusals by name, a sandbox that holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from media_server.artifacts.store import open_artifacts
from media_server.errors import InvalidRequest, NotReady
from media_server.models.card import TextCard
from media_server.settings import Settings
from media_server.text.templates import TextModel, TextModels, compile_template
from tests.llm.byte_tokenizer import EOS, byte_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|begin|>system\n"
    "You are helpful.<|end|>\n' }}{% endif %}{{'<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello <b>\n  there"},
    {"role": "assistant", "content": "Hé 🎬"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


def card(template: str | None = "t") -> TextCard:
    return TextCard(
        name="tiny", pool="text", revision="1", hash="sha256:00", license="none", origin="test", context_length=99,
        tokenizer="models/tiny/0/tokenizer.json", chat_template=template, eos_token_ids=[EOS], bos="<|begin|>",
    )  # fmt: skip


def model(template: str | None) -> TextModel:
    compiled = None if template is None else compile_template(template)
    return TextModel(card(template and "t"), byte_tokenizer(), compiled)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        # whitespace control, filters and loop controls, as templates in the wild use them
        "{%- for m in messages %}\n  {%- if loop.index > 2 %}{% break %}{% endif %}\n{{- m | tojson }}\n{%- endfor %}",
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n{% endif %}\n"
        "{% endfor %}",
    ],
)
def test_the_same_tokens_as_transformers(template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<|begin|>", chat_template=template)
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = model(template).encode_chat(MESSAGES)
    assert byte_tokenizer().decode(ids, skip_special_tokens=False) == wanted


def test_what_a_template_refuses_is_said() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}x"
    with pytest.raises(InvalidRequest, match="start with a user") as refused:
        model(template).encode_chat([{"role": "system", "content": "x"}])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="has no chat template"):
        model(None).encode_chat(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}"]
)
def test_templates_stay_in_their_sandbox(template: str) -> None:
    with pytest.raises(InvalidRequest):
        model(template).encode_chat(MESSAGES)


def test_models_are_loaded_once_from_the_store(tmp_path: Path) -> None:
    artifacts = open_artifacts(Settings(data_dir=tmp_path))
    models = TextModels(artifacts)
    described = card("models/tiny/0/chat_template.jinja")
    with pytest.raises(NotReady, match="tokenizer"):
        models.load(described)
    artifacts.put_bytes("models/tiny/0/tokenizer.json", byte_tokenizer().to_str().encode(), "application/json")
    artifacts.put_bytes("models/tiny/0/chat_template.jinja", CHATML.encode(), "text/plain")
    loaded = models.load(described)
    assert models.load(described) is loaded
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert json.loads(loaded.tokenizer.to_str())["model"]["type"] == "BPE"
    # a card with other defaults is another card
    assert models.load(described.model_copy(update={"context_length": 5})).card.context_length == 5
