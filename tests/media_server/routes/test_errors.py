"""Every refusal is OpenAI's error object with field, rule and value, as a problem document, and writes nothing."""

import io
import json
import socket
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from sqlalchemy.exc import OperationalError

from media_server.app import create_app


def check_problem(answer: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Check the shape that every error has; returns the body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]
    body: dict[str, Any] = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert (body["status"], body["detail"]) == (status, body["error"]["message"])
    assert body["type"] == f"urn:media-server:error:{code}"
    assert body["title"]
    return body


def _image(format: str = "PNG", size: tuple[int, int] = (64, 64)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size).save(content, format)
    return content.getvalue()


BAD_CLIPS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "empty prompt": ({"prompt": "  "}, "prompt", "  "),
    "no prompt": ({}, "prompt", None),
    "prompt too long": ({"prompt": "x" * 501}, "prompt", 501),
    "prompt of another type": ({"prompt": 7}, "prompt", 7),
    "size off the rule": ({"prompt": "a", "size": "161x96"}, "size", "161x96"),
    "size too large": ({"prompt": "a", "size": "1280x720"}, "size", "1280x720"),
    "size unreadable": ({"prompt": "a", "size": "big"}, "size", "big"),
    "too long": ({"prompt": "a", "seconds": 31}, "seconds", 496),
    "far too long": ({"prompt": "a", "seconds": 1e308}, "seconds", 1e308),
    "far too long in all": ({"prompt": "a", "extend": {"seconds": 1e308}}, "extend.seconds", 1e308),
    "no length": ({"prompt": "a", "seconds": 0}, "seconds", 0),
    "seconds that are no number": ({"prompt": "a", "seconds": True}, "seconds", True),
    "seed that is no number": ({"prompt": "a", "seed": False}, "seed", False),
    "priority that is no number": ({"prompt": "a", "priority": True}, "priority", True),
    "density that is no number": ({"prompt": "a", "attention": {"density": True}}, "attention.density", True),
    "seconds unreadable": ({"prompt": "a", "seconds": "soon"}, "seconds", "soon"),
    "lengths disagree": ({"prompt": "a", "seconds": 1, "num_frames": 3}, "num_frames", None),
    "fps": ({"prompt": "a", "fps": 500}, "fps", 500),
    "seed": ({"prompt": "a", "seed": 2**53}, "seed", 2**53),
    "steps": ({"prompt": "a", "num_inference_steps": 51}, "num_inference_steps", 51),
    "guidance": ({"prompt": "a", "guidance_scale": -1}, "guidance_scale", -1),
    "second expert": ({"prompt": "a", "guidance_scale_2": 1}, "guidance_scale_2", 1),
    "attention": ({"prompt": "a", "attention": {"mode": "sparse"}}, "attention.mode", "sparse"),
    "codec": ({"prompt": "a", "output": {"codec": "av1"}}, "output.codec", "av1"),
    "segments": ({"prompt": "a", "seconds": 10, "extend": {"segments": 1}}, "extend.segments", 1),
    "metadata": ({"prompt": "a", "metadata": {"k": 1}}, "metadata.k", 1),
    "webhook": ({"prompt": "a", "webhook_url": "http://example.com/"}, "webhook_url", None),
    "webhook to no name": ({"prompt": "a", "webhook_url": "https://xn--/"}, "webhook_url", None),
    "webhook with a space": ({"prompt": "a", "webhook_url": "https://exa mple.com"}, "webhook_url", None),
    "image URL to no name": ({"prompt": "a", "input_reference": "https://xn--/a.png"}, "input_reference", None),
    "webhook inside": ({"prompt": "a", "webhook_url": "https://127.0.0.1/"}, "webhook_url", None),
    "image URL inside": ({"prompt": "a", "input_reference": "https://localhost/a.png"}, "input_reference", None),
    "image URL of another scheme": ({"prompt": "a", "input_reference": "file:///etc/passwd"}, "input_reference", None),
    "data URI": ({"prompt": "a", "last_frame": "data:image/png;base64,!"}, "last_frame", None),
    "two images": ({"prompt": "a", "last_frame": {"image_url": "x", "file_id": "y"}}, "last_frame", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CLIPS)
def test_a_bad_clip_names_field_rule_and_value_and_writes_nothing(service: Any, name: str) -> None:
    fields, param, value = BAD_CLIPS[name]
    before = service.contents()
    answer = service.http.post("/v1/videos", json=fields)
    code = "invalid_url" if "URL" in name or "URI" in name or "webhook" in name else "invalid_request"
    body = check_problem(answer, 400, code, param)
    assert body["rule"]
    if value is not None:
        assert body["value"] == value
    assert service.contents() == before


def test_the_same_refusals_by_form(service: Any) -> None:
    before = service.contents()
    answer = service.http.post("/v1/videos", files={"prompt": (None, "a"), "attention[density]": (None, "2")})
    assert check_problem(answer, 400, "invalid_request", "attention.density")["value"] == "2"
    answer = service.http.post("/v1/videos", files={"prompt": (None, "a"), "loras[]": (None, "x")})
    body = check_problem(answer, 400, "unknown_parameter", "loras")
    assert body["rule"] == "this field is not known here"
    answer = service.http.post("/v1/videos", data={"prompt": "a"}, files={"prompt": ("a.txt", b"x", "text/plain")})
    assert check_problem(answer, 400, "invalid_request", "prompt")
    images = [("input_reference", ("a.png", _image(), "image/png")) for _ in range(2)]
    answer = service.http.post("/v1/videos", data={"prompt": "a"}, files=images)
    assert "UploadFile" not in answer.text
    assert check_problem(answer, 400, "invalid_request", "input_reference")["value"] == "['(a file)', '(a file)']"
    answer = service.http.post("/v1/videos", data={"prompt": "a", "metadata": '{"a": "1", "a": "2"}'})
    body = check_problem(answer, 400, "invalid_request", "metadata")
    assert body["rule"] == "each name stands once in one object"
    assert service.contents() == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "seconds": 1e999}', "seconds"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 4000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 9000 + b"}", None),
        (b'{"prompt": "a", "label": "\\ud800"}', "label"),
        (b'{"prompt": "a", "metadata": {"k": "\\u0000"}}', "metadata.k"),
        (b'{"prompt": "a", "metadata": {"\\u0000": "v"}}', "metadata.?"),
        (b'{"prompt": "a", "\\udfff": 1}', "?"),
        (b'{"prompt": "a", "input_reference": {"file_id": "../x"}}', "input_reference.file_id"),
    ],
)
def test_what_neither_json_nor_the_database_can_say(service: Any, body: bytes, param: str | None) -> None:
    before = service.contents()
    answer = service.http.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    check_problem(answer, 400, "invalid_request" if param else "malformed_json", param)
    assert len(answer.content) < 2000
    assert service.contents() == before
    assert service.http.get("/v1/videos/%00").status_code == 400


def test_unknown_model(service: Any) -> None:
    before = service.contents()
    body = check_problem(
        service.http.post("/v1/videos", json={"prompt": "a", "model": "sora-2"}), 404, "model_not_found", "model"
    )
    assert (body["rule"], body["value"]) == ("one of tiny-wan", "sora-2")
    check_problem(service.http.post("/v1/films", json={"idea": "a", "model": "x"}), 404, "model_not_found", "model")
    check_problem(service.http.get("/v1/models/sora-2"), 404, "model_not_found", "model")
    assert service.contents() == before


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"%PDF-1.7 not an image", 415, "unsupported_media"),
        (_image("BMP"), 415, "unsupported_media"),
        (_image("GIF"), 415, "unsupported_media"),
        (b"", 415, "unsupported_media"),
        (_image()[:60], 400, "invalid_request"),
        (_image(size=(4, 4)), 400, "invalid_request"),
    ],
)
def test_wrong_file_type(service: Any, content: bytes, status: int, code: str) -> None:
    before = service.contents()
    answer = service.http.post(
        "/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", content, "image/png")}
    )
    assert check_problem(answer, status, code, "input_reference")["rule"]
    assert service.contents() == before


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b'{"prompt": "a"', "application/json", 400, "malformed_json"),
        (b'["prompt"]', "application/json", 400, "malformed_json"),
        (b"prompt", "text/plain", 415, "unsupported_media"),
        (b"--x\r\n", "multipart/form-data", 400, "malformed_form"),
        (b"garbage", "multipart/form-data; boundary=x", 400, "malformed_form"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/films", "/v1/videos/extensions"])
def test_malformed_bodies(service: Any, path: str, content: bytes, content_type: str, status: int, code: str) -> None:
    before = service.contents()
    answer = service.http.post(path, content=content, headers={"content-type": content_type})
    assert check_problem(answer, status, code)["rule"]
    assert service.contents() == before


def test_huge_bodies_are_refused_by_their_length_and_while_they_stream(service: Any) -> None:
    before = service.contents()
    limit = service.settings.max_body_bytes
    huge = b'{"prompt": "' + b"a" * limit + b'"}'
    for answer in (
        service.http.post("/v1/videos", content=huge, headers={"content-type": "application/json"}),
        service.http.post("/v1/films", content=iter([huge[:1000], huge[1000:]])),
        service.http.post(
            "/v1/videos",
            data={"prompt": "a"},
            files={"input_reference": ("a.png", bytes(service.settings.max_upload_bytes + 1), "image/png")},
        ),
    ):
        body = check_problem(answer, 413, "too_large")
        assert "bytes" in body["rule"]
    assert service.contents() == before


def test_streamed_bodies_never_reach_the_handler_past_the_limit(service: Any) -> None:
    sent = 0

    def chunks() -> Any:
        nonlocal sent
        while True:
            sent += 1 << 16
            if sent > service.settings.max_body_bytes * 4:
                return
            yield b" " * (1 << 16)

    answer = service.http.post("/v1/videos", content=chunks(), headers={"content-type": "application/json"})
    check_problem(answer, 413, "too_large")


def test_paths_methods_and_queries(service: Any) -> None:
    check_problem(service.http.get("/v1/nothing"), 404, "unknown_url")
    answer = service.http.put("/v1/videos")
    check_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    for path, param, value in (
        ("/v1/videos?limit=0", "limit", "0"),
        ("/v1/videos?limit=many", "limit", "many"),
        ("/v1/videos?order=up", "order", "up"),
        ("/v1/videos?after=video_0", "after", "video_0"),
        ("/v1/jobs?status=lost", "status", "lost"),
    ):
        body = check_problem(service.http.get(path), 400, "invalid_request", param)
        assert body["value"] == value and body["rule"]
    for path in ("/v1/videos/video_0", "/v1/films/film_0", "/v1/jobs/x", "/v1/jobs/x/events", "/v1/videos/x/content"):
        check_problem(service.http.get(path), 404, "not_found", "id")
    check_problem(service.http.post("/v1/jobs/x/cancel"), 404, "not_found", "id")
    check_problem(service.http.post("/v1/videos/x/remix", json={"prompt": "a"}), 404, "not_found", "video_id")
    film = service.http.post("/v1/films", json={"idea": "a"}).json()
    check_problem(service.http.get(f"/v1/videos/{film['id']}"), 404, "not_found", "id")


def test_a_body_that_is_named_too_long_is_shortened_in_the_answer(service: Any) -> None:
    answer = service.http.post("/v1/videos", json={"prompt": "a", "size": "9" * 5000})
    body = check_problem(answer, 400, "invalid_request", "size")
    assert len(json.dumps(body)) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/videos", {"prompt": "a"}),
        ("/v1/films", {"idea": "a"}),
        ("/v1/storyboards", {"idea": "a"}),
    ],
)
def test_metadata_is_bounded_wherever_it_is_taken(service: Any, path: str, body: dict[str, Any]) -> None:
    before = service.contents()
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {f"k{number}": "v" for number in range(17)}):
        answer = service.http.post(path, json={**body, "metadata": metadata})
        check_problem(answer, 400, "invalid_request", "metadata")
    assert service.contents() == before
    most = {f"{number:064d}": "v" * 512 for number in range(16)}
    answer = service.http.post(path, json={**body, "metadata": most})
    assert answer.status_code in (200, 202) and answer.json()["metadata"] == most


def test_pages_of_other_origins_may_read_nothing_in(service: Any) -> None:
    before = service.contents()
    answer = service.http.post("/v1/videos", data={"prompt": "a"}, headers={"origin": "https://evil.example"})
    check_problem(answer, 403, "cross_origin")
    # what is no origin is not ours either
    for origin in ("http://[", "http://[::1", "null", "", "http://", "127.0.0.1:8000"):
        answer = service.http.post("/v1/videos", json={"prompt": "a"}, headers={"origin": origin})
        check_problem(answer, 403, "cross_origin")
    assert service.contents() == before
    answer = service.http.post("/v1/videos", json={"prompt": "a"}, headers={"origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 200
    # a name that somebody else's DNS points to loopback
    check_problem(service.http.get("/v1/videos", headers={"host": "evil.example:8000"}), 403, "unknown_host")
    assert service.http.get("/v1/videos", headers={"host": "["}).status_code < 500
    for own in ("localhost:8000", "127.0.0.2", "[::1]:8000"):
        assert service.http.get("/v1/videos", headers={"host": own}).status_code == 200


def test_a_service_behind_a_proxy_has_its_own_name(service: Any) -> None:
    named = service.settings.model_copy(update={"url": "https://media.example"})
    with TestClient(create_app(named), base_url="https://media.example") as http:
        answer = http.post("/v1/videos", json={"prompt": "a"}, headers={"origin": "https://media.example"})
        assert answer.status_code == 200
        check_problem(http.get("/v1/videos", headers={"host": "other.example"}), 403, "unknown_host")


def test_what_was_not_foreseen_is_500_without_a_word_of_the_inside(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr("media_server.routes.models.list_cards", broken)
    answer = service.http.get("/v1/models")
    check_problem(answer, 500, "internal_error")
    assert "secret" not in answer.text


def test_a_database_that_refuses_is_503(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*args: Any, **kwargs: Any) -> Any:
        raise OperationalError("SELECT secret", {}, Exception("database is locked"))

    monkeypatch.setattr("media_server.routes.models.list_cards", locked)
    answer = service.http.get("/v1/models")
    check_problem(answer, 503, "database_unavailable")
    assert answer.headers["retry-after"] == "1"
    assert "secret" not in answer.text


def test_files_of_a_row_that_could_not_be_written_are_removed(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = service.contents()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OperationalError("INSERT", {}, Exception("disk I/O error"))

    monkeypatch.setattr("media_server.jobs.store.submit_in", refuse)
    answer = service.http.post(
        "/v1/videos", data={"prompt": "a"}, files={"input_reference": ("a.png", _image(), "image/png")}
    )
    check_problem(answer, 503, "database_unavailable")
    assert service.contents() == before


def test_a_number_is_not_true_of_an_endpoint(service: Any) -> None:
    hook = {"name": "n", "url": "https://example.com/hook", "event_types": ["*"]}
    made = service.http.post("/v1/webhook_endpoints", json=hook).json()
    path = f"/v1/webhook_endpoints/{made['id']}"
    body = check_problem(service.http.post(path, json={"is_enabled": 0}), 400, "invalid_request", "is_enabled")
    assert (body["rule"], body["value"]) == ("true or false, not a number", 0)
    assert service.http.get(path).json()["is_enabled"] is True
    # a form has no other way to say it
    assert service.http.post(path, data={"is_enabled": "false"}).json()["is_enabled"] is False


def test_true_is_no_number_of_a_film(service: Any) -> None:
    before = service.contents()
    for name in ("seconds", "shots", "seed", "priority"):
        body = check_problem(
            service.http.post("/v1/films", json={"idea": "a", name: True}), 400, "invalid_request", name
        )
        assert (body["rule"], body["value"]) == ("a number, not true or false", True)
    assert service.contents() == before


def test_a_caller_that_is_gone_before_its_request_is_whole_is_no_fault_of_the_service(
    live: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(live.rpartition(":")[2])
    headers = b"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    with caplog.at_level("INFO"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"POST /v1/videos HTTP/1.1\r\n" + headers + b"{")
        deadline = time.monotonic() + 60
        while not any("broke off" in record.message for record in caplog.records):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/storyboards", "/v1/films"])
def test_a_body_may_not_be_larger_for_being_called_a_form(path: str, service: Any) -> None:
    body = b'{"idea": "' + b"x" * service.settings.max_body_bytes + b'"}'
    kinds = {"multipart/form-data+json": (413, "too_large"), "application/x+json": (413, "too_large")}
    if path != "/v1/films":
        # which takes no form
        kinds["multipart/form-data; boundary=b"] = (400, "malformed_json")
    for kind, (status, code) in kinds.items():
        check_problem(service.http.post(path, content=body, headers={"content-type": kind}), status, code)
