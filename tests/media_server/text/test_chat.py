"""/v1/chat/completions over a real socket: OpenAI's exact shapes, streams and their resumption, leaving, refusals."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.media_server.text.conftest import MODEL, TextService


def chat(service: TextService, text: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    with service.http as http:
        return http.post("/v1/chat/completions", json=body)


def frames(answer: httpx.Response) -> list[tuple[str | None, Any]]:
    """Take a stream apart into (id, data)."""
    found: list[tuple[str | None, Any]] = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


def contents(found: list[tuple[str | None, Any]]) -> str:
    chunks = [data for _, data in found if data != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def test_a_plain_answer_has_openais_shape(service: TextService) -> None:
    answer = chat(service, "say hello", max_tokens=7)
    assert answer.status_code == 200
    body = answer.json()
    # the fields of OpenAI's reference for a chat completion
    assert set(body) == {
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier",
    }  # fmt: skip
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # "<user>say hello\n<assistant>" in bytes
    assert body["usage"] == {
        "prompt_tokens": 27,
        "completion_tokens": 5,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert abs(body["created"] - time.time()) < 60
    assert "0123456789ab" in body["system_fingerprint"]
    assert service.engine.requests[-1].sampling.max_tokens == 7


@pytest.mark.parametrize("seed", range(4))
def test_any_chunks_give_the_same_text(service: TextService, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine, "seed", seed)
    text = 'naïve 한글 🎬 \\ "quotes" \u2028 line'
    assert chat(service, f"say {text}").json()["choices"][0]["message"]["content"] == text
    streamed = chat(service, f"say {text}", stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert contents(frames(streamed)) == text


def test_a_stream_has_openais_chunks(service: TextService) -> None:
    found = frames(chat(service, "say hi", stream=True, stream_options={"include_usage": True}))
    assert found[-1] == (None, "[DONE]")
    chunks = [data for _, data in found[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    without = frames(chat(service, "say hi", stream=True))
    assert all("usage" not in data for _, data in without[:-1])
    # ids count events, each once, in order
    ids = [int(id.removesuffix("-0")) for id, _ in found if id is not None]
    assert ids == sorted(set(ids))


def test_several_answers_and_logprobs(service: TextService) -> None:
    body = chat(service, "say abc", n=3, logprobs=True, top_logprobs=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == "abc" for choice in body["choices"])
    tokens = body["choices"][1]["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["a", "b", "c"]
    assert tokens[0]["bytes"] == [97]
    assert tokens[0]["top_logprobs"] == [{"token": "x", "logprob": -2.5, "bytes": [120]}] * 2
    assert body["usage"]["completion_tokens"] == 9


def test_the_unmodified_openai_package(service: TextService) -> None:
    client = openai.OpenAI(api_key="none", base_url=f"{service.url}/v1", max_retries=0)
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say yes"}], seed=4, stop=["x"], temperature=0.5
    )
    assert answer.choices[0].message.content == "yes"
    sampling = service.engine.requests[-1].sampling
    assert (sampling.seed, sampling.stop, sampling.temperature) == (4, ["x"], 0.5)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "say yes"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "yes"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens if answer.usage else False
    plain = client.completions.create(model=MODEL, prompt="say on and on", max_tokens=9, logprobs=1)
    assert plain.choices[0].text == "on and on"
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.tokens == list("on and on")
    pieces = client.completions.create(model=MODEL, prompt="say on", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "on"


def test_formats_become_grammars(service: TextService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(service, "say {}", response_format={"type": "json_object"})
    assert service.engine.requests[-1].grammar.type == "json_object"  # type: ignore[union-attr]
    chat(
        service,
        "say {}",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )
    grammar = service.engine.requests[-1].grammar
    assert grammar is not None
    assert (grammar.type, json.loads(grammar.value)) == ("json_schema", schema)
    chat(service, "say x", grammar={"type": "choice", "value": ["left", "right"]})
    grammar = service.engine.requests[-1].grammar
    assert grammar is not None
    assert (grammar.type, json.loads(grammar.value)) == ("choice", ["left", "right"])


def test_messages_of_parts_and_roles_reach_the_template(service: TextService) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "fine"}]},
    ]
    with service.http as http:
        answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert answer.json()["usage"]["prompt_tokens"] == len("<system>Be brief.\n<user>say fine\n<assistant>")


def test_a_stream_is_taken_up_again_while_resume_s_lasts(service: TextService) -> None:
    text = "one two three four five"
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"slowly say {text}"}], "resume_s": 60}
    seen: list[str] = []
    with service.http as http, http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            seen.append(line)
            if sum(line.startswith("id: ") for line in seen) == 3:
                break
    # the client has left; the request goes on
    begun = "\n".join(seen) + "\n\n"
    last_id = [line[4:] for line in seen if line.startswith("id: ")][-1]
    completion_id = json.loads(next(line[6:] for line in seen if line.startswith("data: ")))["id"]
    with service.http as http:
        rest = http.get(f"/v1/chat/completions/{completion_id}/events", headers={"last-event-id": last_id})
        again = http.get(f"/v1/chat/completions/{completion_id}/events")
    assert contents(frames(httpx.Response(200, text=begun)) + frames(rest)) == text
    assert contents(frames(again)) == text
    assert frames(rest)[-1] == (None, "[DONE]")
    assert completion_id not in service.engine.aborted


def test_a_client_that_leaves_ends_its_request(service: TextService) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "endlessly say xxx"}]}
    before = len(service.engine.aborted)
    with service.http as http, http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_for_abort(service, before + 1)
    asked = len(service.engine.requests)
    url, content = httpx.URL(service.url), json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: len(service.engine.requests) > asked, "the engine was not asked")
    wait_for_abort(service, before + 2)
    completion_id = service.engine.requests[-1].id
    assert service.engine.aborted[-1] == completion_id
    # nothing is kept for whoever did not ask for it
    with service.http as http:
        assert http.get(f"/v1/chat/completions/{completion_id}/events").status_code == 404


def wait_for_abort(service: TextService, count: int) -> None:
    wait_until(lambda: len(service.engine.aborted) >= count, "the engine was not told")


def wait_until(is_so: Callable[[], bool], reproach: str) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, reproach
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"metadata": {"scene": 12}}, "metadata.scene", "invalid_request"),
        ({"metadata": {"x" * 65: "a"}}, "metadata", "invalid_request"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata", "invalid_request"),
        ({"grammar": {"type": "choice", "value": ["a"] * 10_001}}, "grammar", "invalid_request"),
        ({"grammar": {"type": "choice", "value": ["a" * 1000] * 101}}, "grammar", "invalid_request"),
        ({"grammar": {"type": "regex", "value": "a" * 100_001}}, "grammar", "invalid_request"),
        ({"grammar": {"type": "lark", "value": "start: A\nA: /a/" + " & /a/" * 9}}, "grammar", "invalid_request"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$x": "a" * 100_000}}}},
            "response_format.json_schema.schema",
            "invalid_request",
        ),
        ({"temperature": 3}, "temperature", "invalid_request"),
        ({"n": 0}, "n", "invalid_request"),
        ({"n": 99}, "n", "invalid_request"),
        ({"top_logprobs": 2}, None, "invalid_request"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "invalid_request"),
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"resume_s": 500}, "resume_s", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_request"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    service: TextService, fields: dict[str, Any], param: str | None, code: str
) -> None:
    before = len(service.engine.requests)
    answer = chat(service, "say x", **fields)
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"] is None if param is None else error["param"].startswith(param)
    assert len(service.engine.requests) == before


def test_an_ampersand_in_a_text_is_no_intersection(service: TextService) -> None:
    marks = 'start: A\nA: ' + " | ".join('"&amp;"' for _ in range(20)) + " | /&&&&&&&&&&/"
    assert chat(service, "say x", grammar={"type": "lark", "value": marks}).status_code == 200


def test_fields_that_ask_for_nothing_pass(service: TextService) -> None:
    neutral = {"store": False, "tools": [], "tool_choice": "none", "service_tier": "auto", "user": "u", "stop": None}
    neutral |= {"metadata": {"scene": "12"}, "safety_identifier": "u", "prompt_cache_key": "k"}
    assert chat(service, "say x", **neutral).status_code == 200


def test_an_engines_refusal_is_an_error_before_the_stream_begins(service: TextService) -> None:
    for stream in (False, True):
        answer = chat(service, "refuse", stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_collapsed_says_so_and_is_not_whole(service: TextService) -> None:
    answer = chat(service, "collapse say half").json()["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", "collapse")
    assert answer["message"]["content"] == "half"
    streamed = frames(chat(service, "collapse say half", stream=True))
    ends = [data["choices"][0] for _, data in streamed if data != "[DONE]" and data["choices"][0]["finish_reason"]]
    assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("length", "collapse")]
    unguarded = chat(service, "collapse say half", collapse_guard=False).json()["choices"][0]
    assert unguarded["finish_reason"] == "stop" and "stop_reason" not in unguarded
    # the openai package reads it as an answer that is cut off
    client = openai.OpenAI(api_key="none", base_url=f"{service.url}/v1", max_retries=0)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": 'collapse say {"n": 1}'}],
            response_format=Half,
        )


class Half(BaseModel):
    n: int


def test_a_failure_in_a_stream_is_a_frame_with_an_error(service: TextService) -> None:
    found = frames(chat(service, "break say half", stream=True))
    assert found[-1][1]["error"]["code"] == "model_error"
    assert "[DONE]" not in [data for _, data in found]
    client = openai.OpenAI(api_key="none", base_url=f"{service.url}/v1", max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "break say half"}], stream=True
    )
    with pytest.raises(openai.APIError, match="The model failed"):
        list(stream)
    assert chat(service, "break say half").status_code == 500


def test_without_an_engine_the_answer_says_so(service: TextService) -> None:
    from media_server.text.messages import engine_key

    service.engine.redis.delete(engine_key("engine-0"))
    try:
        answer = chat(service, "say x")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
    finally:
        service.engine.announce()


def test_malformed_bodies(service: TextService) -> None:
    with service.http as http:
        answer = http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "malformed_json"
        answer = http.get("/v1/chat/completions/chatcmpl_x/events", headers={"last-event-id": "soon"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "last-event-id"


def test_nothing_of_a_conversation_is_on_disk(service: TextService) -> None:
    """Text lives in Valkey's memory, which writes no file, for as long as its stream can be taken up."""
    word = "canary-5be0d2"
    assert word in chat(service, f"say {word}").text
    assert chat(service, f"say {word}", stream=True, resume_s=60).status_code == 200
    folders = (service.settings.data_dir, service.settings.runtime_dir)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "media-server.db" for path in files)
    assert [path.name for path in files if word.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a\0"}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "stop": "\ud800"}, "stop"),
        ("completions", {"prompt": "\udfff"}, "prompt"),
        ("completions", {"prompt": "a", "label": "\0"}, "label"),
        ("storyboards", {"idea": "a", "seconds": 5, "label": "\ud800"}, "label"),
        ("storyboards", {"idea": "a\0", "seconds": 5}, "idea"),
    ],
)
def test_text_that_cannot_be_stored_is_refused_by_its_field(
    service: TextService, path: str, body: dict[str, Any], param: str
) -> None:
    before = len(service.engine.requests)
    with service.http as http:
        answer = http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["param"], answer.json()["rule"]) == (param, "neither NUL nor half a surrogate pair")
    assert len(service.engine.requests) == before


def test_a_grammar_that_is_too_complex_is_the_callers_fault(service: TextService) -> None:
    answer = chat(service, "entangle say half", grammar={"type": "regex", "value": "a{1000000}"})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"], answer.json()["param"]) == ("grammar_too_complex", "grammar")
    assert frames(chat(service, "entangle say half", stream=True))[-1][1]["error"]["code"] == "grammar_too_complex"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": True}, {"n": True}, {"seed": False}, {"temperature": True}, {"stop_token_ids": [True]},
        {"logit_bias": {"1": True}}, {"priority": True},
    ],
)  # fmt: skip
def test_true_is_no_number(service: TextService, fields: dict[str, Any]) -> None:
    answer = chat(service, "say x", **fields)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["param"], answer.json()["rule"]) == (next(iter(fields)), "a number, not true or false")
    # and booleans are booleans
    assert chat(service, "say x", logprobs=True, ignore_eos=False).status_code == 200
