"""The one tree of errors, and ids."""

import json

import pytest

from media_server import errors
from media_server.ids import PREFIXES, new_id, prefix_of


def test_an_error_speaks_openai_and_rfc_9457() -> None:
    error = errors.InvalidRequest("size: too big, got 9.", param="size", rule="at most 8", value=9)
    assert error.to_body() == {
        "error": {
            "message": "size: too big, got 9.",
            "type": "invalid_request_error",
            "param": "size",
            "code": "invalid_request",
        },
        "type": "urn:media-server:error:invalid_request",
        "title": "Invalid request",
        "status": 400,
        "detail": "size: too big, got 9.",
        "param": "size",
        "rule": "at most 8",
        "value": 9,
    }
    assert json.loads(json.dumps(errors.NotFound("x", code="gone").to_body()))["error"]["code"] == "gone"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("InvalidRequest", 400),
        ("Unauthorized", 401),
        ("Forbidden", 403),
        ("NotFound", 404),
        ("Conflict", 409),
        ("TooLarge", 413),
        ("UnsupportedMedia", 415),
        ("Unprocessable", 422),
        ("NotReady", 503),
        ("InsufficientStorage", 507),
    ],
)
def test_statuses(kind: str, status: int) -> None:
    assert getattr(errors, kind)("x").status == status


def test_headers_steer_the_client() -> None:
    assert errors.RateLimited("x", retry_after_s=2.1).headers() == {"retry-after": "3"}
    assert errors.RateLimited("x", retry_after_s=0.0).headers() == {"retry-after": "1"}
    assert errors.Conflict("x").headers() == {"x-should-retry": "false"}


def test_codes_from_other_programs() -> None:
    assert errors.JobError.from_wire("out_of_memory", "m") == errors.JobError("out_of_memory", "m")
    assert errors.JobError.from_wire("odd", "m") == errors.JobError("internal_error", "odd: m")


def test_ids_sort_by_time_and_name_their_kind() -> None:
    made = [new_id("video") for _ in range(1000)]
    assert made == sorted(set(made))
    assert prefix_of(made[0]) == "video"
    # version 7, variant 10
    assert made[0].removeprefix("video_")[12] == "7"
    assert made[0].removeprefix("video_")[16] in "89ab"
    assert {prefix_of(new_id(prefix)) for prefix in PREFIXES} == PREFIXES  # type: ignore[arg-type]
    for bad in (
        "video",
        "video_",
        "clip_" + "0" * 32,
        "video_" + "0" * 31,
        "video_" + "G" * 32,
        "../video_" + "0" * 32,
    ):
        assert prefix_of(bad) is None
