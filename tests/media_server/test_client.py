"""The client of the command line: server-sent events, taken up where they broke off; refusals; files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.client import Client, ServerEvent, read_events
from media_server.commands.failure import Refused, Unreachable


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://service", "key", transport=httpx.MockTransport(answer))


def test_events_as_the_standard_has_them() -> None:
    # the examples of WHATWG HTML, section 9.2.6, and a comment, a retry and a carriage of two data lines
    lines = [": stream", "", "data: first event", "id: 1", "", "data:second event", "id", "", "data:  third event", ""]
    lines += ["event: job.progress", "data: a", "data: b", "", "retry: 2000", "", "event: nothing", ""]
    assert list(read_events(lines)) == [
        ServerEvent("1", "message", "first event"),
        ServerEvent("", "message", "second event"),
        ServerEvent("", "message", " third event"),
        ServerEvent("", "job.progress", "a\nb"),
    ]


@given(st.lists(st.integers(1, 7), min_size=1))
def test_bytes_in_any_chunks_give_the_same_events(sizes: list[int]) -> None:
    text = "".join(f'id: {number}\nevent: job.progress\ndata: {{"n": "é{number}"}}\n\n' for number in range(3)).encode()

    def chunks() -> Iterator[bytes]:
        rest, turn = text, 0
        while rest:
            size = sizes[turn % len(sizes)]
            yield rest[:size]
            rest, turn = rest[size:], turn + 1

    response = httpx.Response(200, content=chunks())
    events = list(read_events(response.iter_lines()))
    assert [(event.id, json.loads(event.data)["n"]) for event in events] == [(str(n), f"é{n}") for n in range(3)]


def test_a_stream_that_breaks_is_taken_up_after_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.client.time.sleep", lambda _: None)
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("last-event-id"))
        match len(asked):
            case 1:
                return httpx.Response(
                    200, content=broken(b'id: 1\ndata: {"n": 1}\n\nid: 2\ndata: {"n": 2}\n\nid: 3\nda')
                )
            case 2:
                raise httpx.ConnectError("restarting")
            case _:
                return httpx.Response(200, content=b'id: 3\ndata: {"n": 3}\n\n')

    with client_of(answer) as client:
        assert [event["n"] for event in client.job_events("film_1")] == [1, 2, 3]
    assert asked == [None, "2", "2"]


def broken(content: bytes) -> Iterator[bytes]:
    yield content
    raise httpx.RemoteProtocolError("peer closed connection")


def test_a_service_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("media_server.client.time.monotonic", lambda: now[0])
    monkeypatch.setattr("media_server.client.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    with client_of(answer) as client, pytest.raises(Unreachable, match="http://service"):
        list(client.job_events("film_1"))
    assert 60 <= now[0] <= 63


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            400,
            {"error": {"message": "size: multiples of 16; got '161x96'.", "code": "invalid_request"}},
            "size: multip",
        ),
        (502, "<html>bad gateway</html>", "unexpected answer"),
    ],
)
def test_refusals_say_what_the_service_said(status: int, content: object, message: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return (
            httpx.Response(status, json=content)
            if isinstance(content, dict)
            else httpx.Response(status, text=str(content))
        )

    with client_of(answer) as client, pytest.raises(Refused, match=message) as refused:
        client.post("/v1/films", {"idea": "x"})
    assert refused.value.exit_code == 4 and str(status) in refused.value.message


def test_fields_left_open_are_not_sent_and_the_key_is(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    with client_of(answer) as client:
        client.post("/v1/films", {"idea": "x", "shots": None})
        client.post("/v1/videos", {"prompt": "x", "seed": 7}, {"input_reference": picture})
        client.get("/v1/jobs", status=None, limit=5)
    assert json.loads(seen[0].content) == {"idea": "x"}
    assert seen[0].headers["authorization"] == "Bearer key"
    assert seen[1].headers["content-type"].startswith("multipart/form-data") and b'filename="a.png"' in seen[1].content
    assert str(seen[2].url) == "http://service/v1/jobs?limit=5"


def test_a_download_that_breaks_leaves_no_half_file(tmp_path: Path) -> None:
    with client_of(lambda _: httpx.Response(200, content=broken(b"half"))) as client, pytest.raises(Unreachable):
        client.download("/v1/videos/v/content", tmp_path / "film.mp4")
    assert not (tmp_path / "film.mp4").exists()
    heard: list[int] = []
    with client_of(lambda _: httpx.Response(200, content=b"whole")) as client:
        client.download("/v1/videos/v/content", tmp_path / "new" / "film.mp4", heard.append)
    assert (tmp_path / "new" / "film.mp4").read_bytes() == b"whole" and sum(heard) == 5


def test_chat_ends_at_done_and_raises_what_the_stream_says() -> None:
    body = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\ndata: {"never": 1}\n\n'
    with client_of(lambda _: httpx.Response(200, content=body)) as client:
        assert len(list(client.chat({"messages": []}))) == 1
    failed = b'data: {"error": {"message": "the engine is gone", "code": "engine_unavailable"}}\n\n'
    with (
        client_of(lambda _: httpx.Response(200, content=failed)) as client,
        pytest.raises(Refused, match="the engine is gone"),
    ):
        list(client.chat({"messages": []}))
