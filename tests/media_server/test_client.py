"""The client of the command line: server-sent events, taken up where they broke off; refusals; files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.client import Client, ServerEvent, read_events
from media_server.commands.failure import BrokenOff, CommandFailed, Refused, Unreachable


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
            case 3 | 4:
                # a proxy in front of a service that restarts
                return httpx.Response(502 if len(asked) == 3 else 503, text="<html>bad gateway</html>")
            case _:
                return httpx.Response(200, content=event(3, "film.completed"))

    with client_of(answer) as client:
        assert [event.get("n", 3) for event in client.job_events("film_1")] == [1, 2, 3]
    assert asked == [None, "2", "2", "2", "2"]


def event(seq: int, type: str, job_id: str = "film_1") -> bytes:
    return f"id: {seq}\ndata: {json.dumps({'seq': seq, 'type': type, 'job_id': job_id})}\n\n".encode()


class Job:
    """A service with one job, whose event streams end in order after the parts given, whatever is still to come."""

    def __init__(self, *streams: bytes, statuses: tuple[str, ...]) -> None:
        self.streams = list(streams)
        self.statuses = list(statuses)
        self.asked: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/film_1":
            return httpx.Response(200, json={"id": "film_1", "status": self.statuses.pop(0)})
        assert request.url.path == "/v1/jobs/film_1/events"
        self.asked.append(request.headers.get("last-event-id"))
        stream = self.streams.pop(0)
        return httpx.Response(200 if stream else 204, content=stream)


def test_a_stream_that_ends_in_order_before_its_job_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("media_server.client.time.sleep", lambda _: None)
    # a child's end is not the film's, nor is an end without a word
    child = event(2, "video.completed", "video_1")
    job = Job(
        b": hello\n\n" + event(1, "job.started"),
        child + b'data: {"type": "job.position", "job_id": "video_2"}\n\n',
        b": heartbeat\n\n",
        event(3, "film.failed") + event(4, "film.deleted"),
        statuses=("queued", "in_progress", "in_progress"),
    )
    with client_of(job) as client:
        types = [event["type"] for event in client.job_events("film_1")]
    assert types == ["job.started", "video.completed", "job.position", "film.failed"]
    assert job.asked == [None, "1", "2", "2"]


def test_the_rest_of_a_job_that_has_ended_is_fetched_and_then_it_is_over() -> None:
    # the stream was cut; by the time of the look the job had ended
    job = Job(event(1, "job.started"), event(2, "film.completed"), statuses=("completed",))
    with client_of(job) as client:
        assert [event["seq"] for event in client.job_events("film_1")] == [1, 2]
    # one whose last event is not there, and one of which all was seen
    for rest in (b": nothing\n\n", b""):
        job = Job(event(1, "job.started"), rest, statuses=("cancelled", "cancelled"))
        with client_of(job) as client:
            assert [event["seq"] for event in client.job_events("film_1")] == [1]
        assert job.asked == [None, "1"]


def test_what_waiting_does_not_mend_ends_the_watching_at_once() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"message": "id: nothing of that name", "code": "not_found"}})

    with client_of(answer) as client, pytest.raises(Refused, match="nothing of that name"):
        list(client.job_events("film_1"))
    with client_of(answer) as client, pytest.raises(Refused, match="nothing of that name"):
        client.get_when_back("/v1/films/film_1")


def broken(content: bytes) -> Iterator[bytes]:
    yield content
    raise httpx.RemoteProtocolError("peer closed connection")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    clock = [0.0]
    monkeypatch.setattr("media_server.client.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("media_server.client.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return clock


@pytest.mark.parametrize(
    "follow",
    [
        lambda client, _: list(client.job_events("film_1")),
        lambda client, _: client.get_when_back("/v1/films/film_1"),
        lambda client, folder: client.download("/v1/films/film_1/content", folder / "film.mp4"),
    ],
)
def test_a_service_that_stays_away_is_given_up(
    follow: Callable[[Client, Path], object], now: list[float], tmp_path: Path
) -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    with client_of(gone) as client, pytest.raises(Unreachable, match="http://service"):
        follow(client, tmp_path)
    assert 60 <= now[0] <= 63
    with client_of(lambda _: httpx.Response(504)) as client, pytest.raises(Refused, match="HTTP 504"):
        follow(client, tmp_path)
    assert 120 <= now[0] <= 126
    assert list(tmp_path.iterdir()) == []


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


class File:
    """A file that the service sends three bytes at a time, then breaks off; `versions` are what it is at each try."""

    def __init__(self, *versions: bytes) -> None:
        self.versions = list(versions)
        self.asked: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        asked = request.headers.get("range")
        self.asked.append(asked)
        headers = {"etag": f'"{len(content)}"', "content-length": str(len(content))}
        start, status = 0, 200
        if asked is not None and request.headers["if-range"] == headers["etag"]:
            start, status = int(asked.removeprefix("bytes=").removesuffix("-")), 206
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if start == len(content):
            return httpx.Response(416)
        rest = content[start:]
        return httpx.Response(status, headers=headers, content=rest if len(rest) <= 3 else broken(rest[:3]))


@pytest.mark.parametrize(
    ("versions", "asked"),
    [
        ([b"12345678"], [None, "bytes=3-", "bytes=6-"]),
        # another file by then: it is sent from its beginning
        ([b"abcdef", b"12345678"], [None, "bytes=3-", "bytes=3-", "bytes=6-"]),
    ],
)
def test_a_download_that_breaks_goes_on_where_it_was(
    versions: list[bytes], asked: list[str | None], now: list[float], tmp_path: Path
) -> None:
    file, target = File(*versions), tmp_path / "new" / "film.mp4"
    with client_of(file) as client:
        client.download("/v1/videos/v/content", target)
    assert target.read_bytes() == b"12345678" and list(target.parent.iterdir()) == [target]
    assert file.asked == asked


def test_a_download_whose_end_was_lost_begins_again(now: list[float], tmp_path: Path) -> None:
    tries: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request.headers.get("range"))
        if len(tries) == 1:
            return httpx.Response(200, headers={"etag": '"1"'}, content=broken(b"whole"))
        return httpx.Response(416) if tries[-1] else httpx.Response(200, content=b"whole")

    with client_of(answer) as client:
        client.download("/v1/videos/v/content", tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_bytes() == b"whole" and tries == [None, "bytes=5-", None]


def test_a_download_that_never_ends_leaves_no_half_file(now: list[float], tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        half = b"" if "range" in request.headers else b"half"
        status = 206 if "range" in request.headers else 200
        return httpx.Response(status, headers={"etag": '"1"', "content-range": "bytes 4-7/8"}, content=broken(half))

    with client_of(answer) as client, pytest.raises(BrokenOff, match="peer closed connection"):
        client.download("/v1/videos/v/content", tmp_path / "film.mp4")
    assert list(tmp_path.iterdir()) == [] and now[0] > 60


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        client_of(lambda _: httpx.Response(200, content=b"whole")) as client,
        pytest.raises(CommandFailed, match=r"film\.mp4 cannot be written: "),
    ):
        client.download("/v1/videos/v/content", tmp_path / "file" / "film.mp4")


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


def test_chat_that_ends_before_done_has_not_ended() -> None:
    body = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    for content in (body, broken(body)):
        with (
            client_of(lambda _, sent=content: httpx.Response(200, content=sent)) as client,  # type: ignore[misc]
            pytest.raises(BrokenOff, match="broke off before its end"),
        ):
            list(client.chat({"messages": []}))
