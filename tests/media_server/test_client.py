"""The client of the command line: server-sent events, taken up where they broke off; refusals; files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.client import Client, ServerEvent, read_events
from media_server.commands.failure import BrokenOff, Refused, Unreachable


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
                return httpx.Response(200, content=broken(said(1) + said(2) + b"id: 3\nda"))
            case 2:
                raise httpx.ConnectError("restarting")
            case 3:
                return httpx.Response(502, text="<html>bad gateway</html>")
            case _:
                return httpx.Response(200, content=said(3, "film.completed"))

    with client_of(answer) as client:
        assert [event["seq"] for event in client.job_events("film_1")] == [1, 2, 3]
    assert asked == [None, "2", "2", "2"]


def said(seq: int, type: str = "job.progress", job_id: str = "film_1") -> bytes:
    return f"id: {seq}\ndata: {json.dumps({'seq': seq, 'type': type, 'job_id': job_id})}\n\n".encode()


def test_a_stream_that_ends_in_good_order_before_its_job_is_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.client.time.sleep", lambda _: None)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.rpartition("/")[2])
        match len(asked):
            # the API drains: its streams end, and it may still say how the job is, or not
            case 1:
                return httpx.Response(200, content=said(1))
            case 2:
                return httpx.Response(200, json={"status": "in_progress"})
            # the end of a child is not the film's
            case 3:
                return httpx.Response(200, content=said(2, "video.completed", "video_1"))
            case 4:
                return httpx.Response(503, json={"error": {"message": "draining", "code": "unavailable"}})
            # nothing is left to say of a job that has ended since
            case 5:
                return httpx.Response(200, content=b"retry: 2000\n\n")
            case _:
                return httpx.Response(200, json={"status": "completed"})

    with client_of(answer) as client:
        assert [event["seq"] for event in client.job_events("film_1")] == [1, 2]
    assert asked == ["events", "film_1", "events", "film_1", "events", "film_1"]


def test_a_stream_that_is_refused_is_not_asked_for_again() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(401, json={"error": {"message": "the key is revoked", "code": "invalid_api_key"}})

    with client_of(answer) as client, pytest.raises(Refused, match="revoked"):
        list(client.job_events("film_1"))
    assert len(asked) == 1


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


def test_a_download_that_breaks_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.client.time.sleep", lambda _: None)
    asked: list[tuple[str | None, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.headers.get("range"), request.headers.get("if-range")))
        match len(asked):
            case 1:
                return httpx.Response(200, content=broken(b"half"), headers={"etag": '"a"'})
            case 2:
                return httpx.Response(206, content=broken(b" and"), headers={"etag": '"a"'})
            case 3:
                # another file by now: all of it
                return httpx.Response(200, content=broken(b"an"), headers={"etag": '"b"'})
            case _:
                return httpx.Response(206, content=b"other", headers={"etag": '"b"'})

    with client_of(answer) as client:
        client.download("/v1/videos/v/content", tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_bytes() == b"another"
    assert asked == [(None, None), ("bytes=4-", '"a"'), ("bytes=8-", '"a"'), ("bytes=2-", '"b"')]
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"]


def test_a_download_that_breaks_for_good_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.client.RECONNECT_S", 0.0)
    monkeypatch.setattr("media_server.client.AGAIN_S", 0.001)

    def answer(request: httpx.Request) -> httpx.Response:
        if "range" in request.headers:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, content=broken(b"half"), headers={"etag": '"a"'})

    with client_of(answer) as client, pytest.raises(Unreachable):
        client.download("/v1/videos/v/content", tmp_path / "film.mp4")
    assert list(tmp_path.iterdir()) == []
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


@pytest.mark.parametrize("how", ["in good order", "by force", "in silence"])
def test_a_chat_that_breaks_off_is_said_in_one_line(how: str) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        if how == "by force":
            raise httpx.RemoteProtocolError("peer closed connection")
        if how == "in silence":
            raise httpx.ReadTimeout("no heartbeat")

    with client_of(lambda _: httpx.Response(200, content=pieces())) as client, pytest.raises(BrokenOff) as broken_off:
        list(client.chat({"messages": []}))
    assert broken_off.value.message == "the service at http://service went away in the middle of its answer"
    assert broken_off.value.exit_code == 3
