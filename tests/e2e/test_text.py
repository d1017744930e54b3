"""Text over the real processes: the openai package, a stream that breaks off and is taken up again, a storyboard."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import Service, run_cli, wait_for

# the first test of a run starts the service
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of a rainbow."}]
MODEL = "smollm2-135m-instruct"


def test_chat_by_the_openai_package_streams_what_the_plain_answer_says(service: Service) -> None:
    client = service.openai
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, seed=1)
    text = plain.choices[0].message.content
    assert text and plain.usage is not None and 0 < plain.usage.completion_tokens <= 24
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        plain.choices[0].finish_reason
    ]
    told = chunks[-1].usage
    assert told is not None and told.prompt_tokens_details is not None
    counts = (plain.usage.prompt_tokens, plain.usage.completion_tokens, plain.usage.total_tokens)
    assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == counts
    # the second to ask finds the beginning that the first left, whole blocks of it
    cached = told.prompt_tokens_details.cached_tokens
    assert cached is not None and 0 < cached < told.prompt_tokens and cached % 16 == 0
    assert len(chunks) > 5


def test_a_stream_that_breaks_off_is_taken_up_again(service: Service) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0, "seed": 1}
    body |= {"stream": True, "resume_s": 60}
    with service.http as http:
        whole = read(http.post("/v1/chat/completions", json=body).text)
        begun = []
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for event in split(answer.iter_lines()):
                begun.append(event)
                if len(begun) == 6:
                    break
        last_id = [event["id"] for event in begun if "id" in event][-1]
        request_id = json.loads(begun[0]["data"])["id"]
        rest = http.get(f"/v1/chat/completions/{request_id}/events", headers={"last-event-id": last_id})
        assert rest.status_code == 200
    taken_up = read("".join(f"{name}: {event[name]}\n" for event in begun for name in ("data",)) + rest.text)
    assert taken_up == whole and len(whole) > 20


def split(lines: Any) -> Any:
    event: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if not line and "data" in event:
            yield event
            event = {}
        elif name in ("id", "data"):
            event[name] = value


def read(text: str) -> str:
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def test_chat_by_the_command_line(service: Service) -> None:
    done = run_cli("chat", "Say hello.", "--max-tokens", "12", "--temperature", "0", "--url", service.url, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["content"] and 0 < answer["usage"]["completion_tokens"] <= 12
    plain = run_cli("chat", "Say hello.", "--max-tokens", "12", "--temperature", "0", "--url", service.url)
    assert plain.stdout == answer["content"] + "\n"


def test_a_storyboard_is_valid_and_its_frames_sum(service: Service) -> None:
    with service.http as http:
        answer = http.post("/v1/storyboards", json={"idea": "a red ball finds a blue friend", "seconds": 5, "shots": 2})
    assert answer.is_success, answer.text
    job_id = answer.json()["id"]
    assert wait_for(lambda: service.ended(job_id), 90, "the storyboard")["status"] == "completed"
    storyboard = service.get(f"/v1/storyboards/{job_id}")["storyboard"]
    assert len(storyboard["shots"]) == 2
    assert sum(shot["num_frames"] for shot in storyboard["shots"]) == 5 * 16
    assert all(shot["prompt"] for shot in storyboard["shots"])
