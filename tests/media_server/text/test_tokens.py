"""/tokenize and /detokenize, against what a completion of the same words is counted as."""

from typing import Any

import httpx
import pytest

from tests.llm.byte_tokenizer import byte_tokenizer
from tests.media_server.text.conftest import MODEL, TextService


def post(service: TextService, path: str, **body: Any) -> httpx.Response:
    with service.http as http:
        return http.post(path, json=body)


@pytest.mark.parametrize("text", ["a red ball", "", "Zwei Bälle, 二つ\n\n🙂", "<assistant>"])
def test_a_text_goes_there_and_back(service: TextService, text: str) -> None:
    tokens = post(service, "/tokenize", model=MODEL, prompt=text, add_special_tokens=False).json()
    assert tokens["tokens"] == byte_tokenizer().encode(text, add_special_tokens=False).ids
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] > 0
    assert post(service, "/detokenize", tokens=tokens["tokens"]).json() == {"model": MODEL, "prompt": text}


def test_a_conversation_has_the_tokens_that_its_answer_is_charged_for(service: TextService) -> None:
    messages = [{"role": "user", "content": "say hello"}]
    tokens = post(service, "/tokenize", messages=messages, return_token_strs=True).json()
    usage = post(service, "/v1/chat/completions", model=MODEL, messages=messages).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"] == len(tokens["token_strs"])
    assert service.engine.requests[-1].prompt_token_ids == tokens["tokens"]
    # and what was counted can be sent back as it is
    assert post(service, "/v1/completions", prompt=tokens["tokens"]).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31 - 1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    service: TextService, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = post(service, path, **body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] is None if param is None else error["param"].startswith(param)
