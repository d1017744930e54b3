"""Clips by HTTP: the life of one, lists, files, remixes and extensions, each field where OpenAI's client expects it."""

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from PIL import Image

from media_server.artifacts.store import ArtifactStore
from media_server.jobs.tables import jobs
from media_server.models.registry import publish
from tests.cards import VIDEO_CARD
from workers.sweeper import collect_garbage


def test_the_life_of_a_clip(service: Any) -> None:
    answer = service.http.post(
        "/v1/videos",
        json={
            "prompt": "a red ball",
            "seconds": "2",
            "size": "160x96",
            "seed": 7,
            "metadata": {"a": "b"},
            "label": "x",
        },
        headers={"x-request-id": "my-request", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "my-request"
    assert 250 <= int(answer.headers["openai-poll-after-ms"]) <= 2000
    video = answer.json()
    assert video["id"].startswith("video_")
    expected = {
        "object": "video", "status": "queued", "progress": 0, "model": "tiny-wan", "prompt": "a red ball",
        "seconds": "2", "size": "160x96", "error": None, "completed_at": None, "expires_at": None,
        "remixed_from_video_id": None, "fps": 16, "num_frames": 32, "seed": 7, "queue_position": 0, "attempt": 0,
        "metadata": {"a": "b"}, "label": "x", "adjustments": [], "film_id": None, "manifest_url": None,
    }  # fmt: skip
    assert {name: video[name] for name in expected} == expected
    assert isinstance(video["created_at"], int)

    claim = service.worker.claim("video")
    assert claim.job.traceparent == f"00-{'a' * 32}-{'b' * 16}-01"
    assert claim.job.prompts == {"prompt": "a red ball"}
    assert "a red ball" not in json.dumps(claim.job.params)
    running = service.http.get(f"/v1/videos/{video['id']}").json()
    assert (running["status"], running["queue_position"], running["attempt"]) == ("in_progress", None, 1)
    service.worker.do(claim)
    answer = service.http.get(f"/v1/videos/{video['id']}")
    done = answer.json()
    assert (done["status"], done["progress"], done["gpu_seconds"], done["peak_memory_bytes"]) == (
        "completed", 100, 0.5, 1 << 20,
    )  # fmt: skip
    assert (done["stage"], done["step"], done["total_steps"]) == (None, None, None)
    # rows of earlier releases keep the step that was beaten last
    with service.db.write() as tx:
        tx.conn.execute(jobs.update().where(jobs.c.id == video["id"]).values(step=2, total_steps=3))
    old = service.http.get(f"/v1/videos/{video['id']}").json()
    assert (old["step"], old["total_steps"]) == (None, None)
    assert done["report"] == {"drift": {"verdict": "none"}}
    assert service.http.get(done["manifest_url"]).json() == {"v": 1, "seed": 7}
    assert service.http.get(done["content_url"]).content == service.worker.clip


def test_a_clip_says_how_long_its_file_is(service: Any) -> None:
    # a chain of 120 frames that its drift policy stopped
    service.worker.report = {"file": {"num_frames": 45}}
    video = service.completed_video(num_frames=120)
    assert (video["num_frames"], video["seconds"]) == (45, "2.8125")
    assert video["parameters"]["extend"]["segments"] == 3


def test_the_index_of_a_spritesheet_finds_it(service: Any) -> None:
    video = service.completed_video()
    url = f"/v1/videos/{video['id']}/content?variant=spritesheet_vtt"
    index = service.http.get(url)
    assert index.headers["content-type"].startswith("text/vtt")
    picture = index.text.splitlines()[-1].partition("#")[0]
    found = service.http.get(urljoin(url, picture))
    assert (found.status_code, found.headers["content-type"]) == (200, "image/jpeg")
    assert found.content == service.worker.picture
    assert service.http.head(f"/v1/videos/{video['id']}/spritesheet.jpg").status_code == 200


def test_a_failed_clip_is_answered_with_200_and_its_error(service: Any) -> None:
    service.worker.failures = ["the GPU has no room"]
    video = service.http.post("/v1/videos", json={"prompt": "a red ball"}).json()
    service.worker.run_all()
    answer = service.http.get(f"/v1/videos/{video['id']}")
    assert answer.status_code == 200
    assert answer.json()["status"] == "failed"
    assert answer.json()["error"] == {"code": "out_of_memory", "message": "the GPU has no room"}
    content = service.http.get(f"/v1/videos/{video['id']}/content")
    assert content.status_code == 404
    assert content.json()["error"]["code"] == "job_failed"
    assert "the GPU has no room" in content.json()["error"]["message"]


def test_bracket_form_of_the_sdk(service: Any) -> None:
    form = {
        "prompt": "a red ball",
        "seconds": "1",
        "num_inference_steps": "4",
        "extend[segments]": "1",
        "extend[anchor]": "false",
        "attention[mode]": "dense",
        "output[crf]": "20",
        "metadata[project]": "demo",
        "priority": "3",
    }
    answer = service.http.post("/v1/videos", files={name: (None, value) for name, value in form.items()})
    assert answer.status_code == 200, answer.text
    video = answer.json()
    assert (video["num_frames"], video["metadata"], video["parameters"]["num_inference_steps"]) == (
        16, {"project": "demo"}, 4,
    )  # fmt: skip
    assert video["parameters"]["output"]["crf"] == 20
    job = service.http.get(f"/v1/jobs/{video['id']}").json()
    assert job["priority"] == 3
    form["extend[anchor]"] = "true"
    refused = service.http.post("/v1/videos", files={name: (None, value) for name, value in form.items()})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extend.anchor")
    as_text = service.http.post("/v1/videos", data={"prompt": "a", "metadata": '{"k": "v"}', "output": '{"crf": 30}'})
    assert (as_text.json()["metadata"], as_text.json()["parameters"]["output"]["crf"]) == ({"k": "v"}, 30)


def test_lists_page_like_openais(service: Any) -> None:
    ids = [service.http.post("/v1/videos", json={"prompt": f"ball {n}"}).json()["id"] for n in range(5)]
    first = service.http.get("/v1/videos", params={"limit": 2}).json()
    assert [item["id"] for item in first["data"]] == ids[:-3:-1]
    assert (first["object"], first["first_id"], first["last_id"], first["has_more"]) == ("list", ids[4], ids[3], True)
    second = service.http.get("/v1/videos", params={"limit": 5, "after": first["last_id"]}).json()
    assert [item["id"] for item in second["data"]] == ids[2::-1]
    assert second["has_more"] is False
    oldest = service.http.get("/v1/videos", params={"limit": 1, "order": "asc"}).json()
    assert oldest["data"][0]["id"] == ids[0]
    empty = service.http.get("/v1/videos", params={"after": ids[0]}).json()
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)


def test_files_that_the_store_does_not_let_go_of_are_left_to_the_sweeper(service: Any, monkeypatch: Any) -> None:
    video = service.completed_video()

    def refuse(self: ArtifactStore, prefix: str) -> int:
        raise OSError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactStore, "delete_prefix", refuse)
        answer = service.http.delete(f"/v1/videos/{video['id']}")
    assert (answer.status_code, answer.json()["deleted"]) == (200, True)
    assert service.http.get(f"/v1/videos/{video['id']}").status_code == 404
    assert list(service.artifacts.list_keys(video["id"]))
    collect_garbage(service.db, service.artifacts)
    assert list(service.artifacts.list_keys(video["id"])) == []


def test_delete_takes_row_files_and_prompt(service: Any) -> None:
    before = service.contents()[1]
    video = service.completed_video()
    answer = service.http.delete(f"/v1/videos/{video['id']}")
    assert answer.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
    for path in (f"/v1/videos/{video['id']}", f"/v1/videos/{video['id']}/content", f"/v1/jobs/{video['id']}"):
        assert service.http.get(path).status_code == 404
    rows, files = service.contents()
    assert rows["prompts"] == 0
    assert files == before
    assert service.http.delete(f"/v1/videos/{video['id']}").status_code == 404


def test_deleting_a_running_clip_stops_it(service: Any) -> None:
    video = service.http.post("/v1/videos", json={"prompt": "a"}).json()
    claim = service.worker.claim("video")
    assert service.http.delete(f"/v1/videos/{video['id']}").status_code == 200
    assert service.http.get(f"/v1/videos/{video['id']}").status_code == 404
    service.worker.do(claim)
    assert service.contents()[0]["artifacts"] == 0


def test_content_before_it_is_made_says_why(service: Any) -> None:
    video = service.http.post("/v1/videos", json={"prompt": "a"}).json()
    answer = service.http.get(f"/v1/videos/{video['id']}/content")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["content-type"] == "application/problem+json"
    assert "queued" in answer.json()["error"]["message"]
    service.http.post(f"/v1/jobs/{video['id']}/cancel")
    answer = service.http.get(f"/v1/videos/{video['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_cancelled")


def test_content_in_parts(service: Any) -> None:
    video = service.completed_video()
    url, whole = f"/v1/videos/{video['id']}/content", service.worker.clip
    full = service.http.get(url)
    assert full.status_code == 200 and full.content == whole
    assert full.headers["content-type"] == "video/mp4"
    assert full.headers["accept-ranges"] == "bytes"
    assert full.headers["content-disposition"] == f'inline; filename="{video["id"]}-video.mp4"'
    etag = full.headers["etag"]
    assert etag.startswith('"sha256-')
    head = service.http.head(url)
    assert head.status_code == 200 and head.content == b"" and int(head.headers["content-length"]) == len(whole)
    part = service.http.get(url, headers={"range": "bytes=10-19"})
    assert part.status_code == 206 and part.content == whole[10:20]
    assert part.headers["content-range"] == f"bytes 10-19/{len(whole)}"
    assert part.headers["content-length"] == "10"
    assert service.http.get(url, headers={"range": "bytes=-7"}).content == whole[-7:]
    beyond = service.http.get(url, headers={"range": f"bytes={len(whole)}-"})
    assert beyond.status_code == 416 and beyond.headers["content-range"] == f"bytes */{len(whole)}"
    assert beyond.json()["error"]["code"] == "range_not_satisfiable"
    assert service.http.get(url, headers={"range": "bytes=0-9", "if-range": etag}).status_code == 206
    assert service.http.get(url, headers={"range": "bytes=0-9", "if-range": '"old"'}).content == whole
    not_modified = service.http.get(url, headers={"if-none-match": etag})
    assert not_modified.status_code == 304 and not_modified.content == b""
    assert service.http.get(url, headers={"if-match": '"old"'}).status_code == 412
    saved = service.http.get(url, params={"download": "true"})
    assert saved.headers["content-disposition"].startswith("attachment")
    types = {"thumbnail": "image/jpeg", "spritesheet": "image/jpeg", "last_frame": "image/png"}
    for variant, content_type in types.items():
        assert service.http.get(url, params={"variant": variant}).headers["content-type"] == content_type
    unasked = service.http.get(url, params={"variant": "frames"})
    assert (unasked.status_code, unasked.json()["error"]["code"]) == (404, "no_such_variant")
    assert "last_frame, manifest, spritesheet, spritesheet_vtt, thumbnail, video" in unasked.json()["rule"]
    refused = service.http.get(url, params={"variant": "soundtrack"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "variant"


@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_ranges_over_http_are_python_slices(service: Any, data: st.DataObject) -> None:
    if not hasattr(service, "ranged"):
        service.ranged = service.completed_video()["content_url"]
    whole = service.worker.clip
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.none() | st.integers(first, len(whole) + 50))
    suffix = data.draw(st.booleans())
    if suffix:
        wanted, expected = f"bytes=-{first + 1}", whole[-(first + 1) :]
    else:
        wanted = f"bytes={first}-{'' if last is None else last}"
        expected = whole[first : None if last is None else last + 1]
    answer = service.http.get(service.ranged, headers={"range": wanted})
    assert answer.status_code == 206
    assert answer.content == expected


def _png(size: tuple[int, int], color: str = "blue") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, "PNG")
    return content.getvalue()


def test_an_uploaded_image_becomes_the_first_frame(service: Any) -> None:
    answer = service.http.post(
        "/v1/videos",
        data={"prompt": "a ball", "size": "160x96"},
        files={"input_reference": ("../../etc/passwd", _png((400, 400)), "text/html")},
    )
    assert answer.status_code == 200, answer.text
    video = answer.json()
    (adjustment,) = video["adjustments"]
    assert (adjustment["param"], adjustment["asked"], adjustment["given"]) == ("input_reference", "400x400", "160x96")
    assert "central 400x240 of 400x400" in adjustment["rule"]
    claim = service.worker.claim("video")
    key = claim.job.params["inputs"]["first_frame"]
    assert key == f"{video['id']}/inputs/first_frame.png"
    stored = Image.open(service.artifacts.local_path(key))
    assert (stored.format, stored.mode, stored.size) == ("PNG", "RGB", (160, 96))
    assert stored.getpixel((80, 48)) == (0, 0, 255)


def test_a_clips_last_frame_by_id(service: Any) -> None:
    source = service.completed_video()
    answer = service.http.post("/v1/videos", json={"prompt": "on", "input_reference": {"file_id": source["id"]}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["adjustments"] == []
    claim = service.worker.claim("video")
    stored = Image.open(service.artifacts.local_path(claim.job.params["inputs"]["first_frame"]))
    assert stored.getpixel((0, 0)) == (255, 0, 0)
    # the copy is the new clip's own
    service.http.delete(f"/v1/videos/{source['id']}")
    assert service.artifacts.exists(claim.job.params["inputs"]["first_frame"])


def test_remix_keeps_all_but_the_prompt(service: Any) -> None:
    made = service.http.post(
        "/v1/videos",
        data={"prompt": "a red ball", "seed": "11", "num_frames": "20", "guidance_scale": "4"},
        files={"input_reference": ("a.png", _png((160, 96)), "image/png")},
    ).json()
    early = service.http.post(f"/v1/videos/{made['id']}/remix", json={"prompt": "a blue ball"})
    assert (early.status_code, early.json()["error"]["code"]) == (409, "not_ready")
    service.worker.run_all()
    answer = service.http.post(f"/v1/videos/{made['id']}/remix", json={"prompt": "a blue ball"})
    assert answer.status_code == 200, answer.text
    remix = answer.json()
    assert remix["remixed_from_video_id"] == made["id"]
    assert (remix["prompt"], remix["seed"], remix["num_frames"]) == ("a blue ball", 11, 20)
    assert remix["parameters"]["guidance_scale"] == 4
    inputs = service.worker.claim("video").job.params["inputs"]
    assert inputs == {"first_frame": f"{remix['id']}/inputs/first_frame.png"}
    assert service.artifacts.exists(inputs["first_frame"])


def test_extension_of_a_clip_made_here(service: Any) -> None:
    source = service.completed_video(seed=3, num_inference_steps=5)
    answer = service.http.post(
        "/v1/videos/extensions",
        files={"prompt": (None, "it stops"), "seconds": (None, "2"), "video[id]": (None, source["id"])},
    )
    assert answer.status_code == 200, answer.text
    video = answer.json()
    # seconds are those of the stitched file, as OpenAI has it
    assert (video["seconds"], video["num_frames"], video["extended_from_video_id"]) == ("4", 64, source["id"])
    assert video["parameters"]["num_inference_steps"] == 5
    params = service.worker.claim("video").job.params
    assert params["num_frames"] == 32
    assert params["source"] == {"id": source["id"], "num_frames": 32}
    assert params["extend"] == {
        "segments": 1, "segment_frames": [32], "overlap_frames": 5, "anchor": False, "on_drift": "report",
    }  # fmt: skip
    assert service.artifacts.local_path(params["inputs"]["video"]).read_bytes() == service.worker.clip
    fields = {"prompt": "it stops", "seconds": "1e308"}
    for path, data in (("extensions", fields | {"video[id]": source["id"]}), ("", fields)):
        answer = service.http.post(f"/v1/videos/{path}".rstrip("/"), data=data)
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert (body["param"], body["value"]) == ("seconds", 1e308) and body["rule"].startswith("at most 30 s")


def test_a_model_that_takes_one_image_continues_from_the_last_frame(service: Any) -> None:
    source = service.completed_video()
    publish(service.db, VIDEO_CARD.model_copy(update={"conditions": ["text", "first_frame"]}), "scripted@test:1")
    asked = {"prompt": "it stops", "seconds": "2", "video": {"id": source["id"]}}
    answer = service.http.post("/v1/videos/extensions", json=asked)
    assert answer.status_code == 200, answer.text
    assert service.worker.claim("video").job.params["extend"]["overlap_frames"] == 1
    answer = service.http.post("/v1/videos/extensions", json=asked | {"extend": {"overlap_frames": 5}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extend.overlap_frames")
    publish(service.db, VIDEO_CARD.model_copy(update={"conditions": ["text"]}), "scripted@test:1")
    answer = service.http.post("/v1/videos/extensions", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "video")


def test_extension_of_an_upload_and_what_it_refuses(service: Any, clip_bytes: bytes) -> None:
    answer = service.http.post(
        "/v1/videos/extensions",
        data={"prompt": "on", "seconds": "1"},
        files={"video": ("x.mov", clip_bytes, "video/mp4")},
    )
    assert answer.status_code == 200, answer.text
    assert (answer.json()["seconds"], answer.json()["size"]) == ("3", "160x96")
    before = service.contents()
    for content in (b"#EXTM3U\nfile:///etc/passwd\n", clip_bytes[:300], b""):
        refused = service.http.post(
            "/v1/videos/extensions",
            data={"prompt": "on", "seconds": "1"},
            files={"video": ("x.mp4", content, "video/mp4")},
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (415, "video")
    missing = service.http.post("/v1/videos/extensions", json={"prompt": "on", "seconds": 1})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "video")
    nobody = {"prompt": "on", "seconds": 1, "video": "video_" + "0" * 32}
    unknown = service.http.post("/v1/videos/extensions", json=nobody)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "video")
    assert service.contents() == before


@pytest.mark.parametrize(
    ("frames", "size", "fps", "rule"),
    [(8, (100, 96), 16, "size"), (8, (160, 96), 120, "fps"), (4, (160, 96), 16, "at least 5 frames")],
)
def test_an_upload_off_the_models_rule_blames_the_clip(
    service: Any, write_clip: Any, tmp_path: Path, frames: int, size: tuple[int, int], fps: int, rule: str
) -> None:
    content = write_clip(tmp_path / "x.mp4", frames, size, fps)
    answer = service.http.post(
        "/v1/videos/extensions",
        data={"prompt": "on", "seconds": "1"},
        files={"video": ("x.mp4", content, "video/mp4")},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "video"
    assert rule in answer.json()["rule"]


@pytest.mark.parametrize("path", ["edits", "characters"])
def test_what_no_model_offers_is_said(service: Any, path: str) -> None:
    answer = service.http.post(f"/v1/videos/{path}", data={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
    assert service.http.get("/v1/videos/characters/char_1").status_code == 404
