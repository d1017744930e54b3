"""The real processes with JSON logs, spans to a collector and zero data retention: what is seen, and what is not.

A canary goes through chat, clip, storyboard and film; when they have ended, no byte of the data folder, of the runtime
and temporary folders, of logs, spans and Valkey has it.
"""

import base64
import io
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Hook, Service, start, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CANARY = "Quokkazephyr"
LIMIT_S = 600.0
ANSWER_S = 4.0
MODELS = "models"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.server: ThreadingHTTPServer | None = None

    def spans(self) -> list[Span]:
        found: list[Span] = []
        for body in list(self.bodies):
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def of(self, traceparent: str) -> dict[str, list[Span]]:
        """Give the spans of a trace by name."""
        by_name: dict[str, list[Span]] = {}
        for span in self.spans():
            if span.trace_id.hex() == traceparent.split("-")[1]:
                by_name.setdefault(span.name, []).append(span)
        return by_name


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["x-tenant"] == "tests"
            taken.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    taken.server = server
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield taken
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def observed(
    config: Path, running: list[Service], collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service of its own, whose temporary files lie in a folder of its own."""
    # short: unix sockets lie in it
    temporary = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    data_dir = tmp_path_factory.mktemp("observed")
    # the language model can be converted again; here it is only time
    shutil.copytree(running[-1].data_dir / MODELS, data_dir / MODELS)
    settings = data_dir.parent / "observed.toml"
    assert collector.server is not None
    lines = ["log_json = true", "zero_retention = true", f"answer_s = {ANSWER_S}", 'log_level = "DEBUG"']
    lines += [f'otlp_url = "http://127.0.0.1:{collector.server.server_port}"', 'otlp_headers = {x-tenant = "tests"}']
    first, _, rest = config.read_text().partition("\n")
    settings.write_text("\n".join([first, *lines, rest]))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(temporary)
    try:
        service = start(data_dir, settings)
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
    yield service
    children = service.descendants()
    if service.process.poll() is None:
        service.stop()
    _, left = psutil.wait_procs(children, timeout=60)
    assert left == []
    shutil.rmtree(data_dir / MODELS, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def temporary_dir(service: Service) -> Path:
    return Path(psutil.Process(service.process.pid).environ()["TMPDIR"])


def valkey(service: Service) -> redis.Redis:
    (socket,) = temporary_dir(service).glob("media-server-*/valkey.sock")
    return redis.Redis(unix_socket_path=str(socket))


def spellings(words: list[str]) -> list[bytes]:
    """Give words as they may be spelled: by case, in JSON and in base64."""
    plain = {form for word in words for form in (word, word.lower(), word.upper(), word.capitalize())}
    escaped = {json.dumps(word)[1:-1] for word in plain}
    return [word.encode() for word in plain | escaped]


def places(service: Service, words: list[str]) -> list[str]:
    """Name every file and key that holds one of the words."""
    wanted = spellings(words)
    found = []
    for folder in (service.data_dir, temporary_dir(service)):
        # a folder that goes meanwhile is passed over
        for path in sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
            # the weights were there before
            if not path.is_file() or MODELS in path.parts[len(folder.parts) :][:1]:
                continue
            try:
                # read, not mapped: a log that is emptied meanwhile would end this process
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            found += [f"{path.name}: {word!r}" for word in wanted if word in content]
    client = valkey(service)
    # a dump would hold its words compressed
    client.config_set("rdbcompression", "no")
    for key in client.scan_iter():
        kept = key + (client.dump(key) or b"")
        found += [f"{key!r}: {word!r}" for word in wanted if word in kept]
    client.close()
    return found


def completed(service: Service, job_id: str) -> dict[str, Any]:
    job = wait_for(lambda: service.ended(job_id), LIMIT_S, f"{job_id} ends")
    assert job["status"] == "completed", job["error"]
    return job


def traceparent(byte: str) -> str:
    return f"00-{byte * 16}-{byte * 8}-01"


def test_a_canary_leaves_no_trace_but_what_was_asked_for(observed: Service, collector: Collector, hook: Hook) -> None:
    service = observed
    words = [CANARY]
    with service.http as http:
        # chat, whole and as a stream; a stop string is a caller's word too
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Tell me of {CANARY} and of seven red umbrellas."}],
            "max_tokens": 24, "min_tokens": 24, "stop": [f"{CANARY}!"],
        }  # fmt: skip
        chat = http.post("/v1/chat/completions", json=body, headers={"traceparent": traceparent("a1")})
        assert chat.status_code == 200, chat.text
        words.append(chat.json()["choices"][0]["message"]["content"].strip()[:60])
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.status_code == 200 and "[DONE]" in streamed.text
        refused = http.post("/v1/chat/completions", json={**body, "resume_s": 10})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "zero_retention")

        # a clip, watched while it is made, sent twice under one key
        clip_body = {
            "prompt": f"a red ball and {CANARY}", "negative_prompt": f"no {CANARY}", "num_frames": 9,
            "num_inference_steps": 12, "webhook_url": hook.url, "metadata": {"scene": "7"},
        }  # fmt: skip
        headers = {"idempotency-key": "clip-1", "traceparent": traceparent("b2")}
        clip = http.post("/v1/videos", json=clip_body, headers=headers).json()
        assert CANARY in clip["prompt"]
        # the search finds what is there
        assert places(service, words)
        previews, types = _watch(service, clip["id"])
        assert completed(service, clip["id"])["metadata"] == {"scene": "7"}
        again = http.post("/v1/videos", json=clip_body, headers=headers)
        assert (again.json()["id"], again.json()["prompt"]) == (clip["id"], None)

        # a storyboard: its text is had for a while, then it is gone
        board_body = {"idea": f"{CANARY} finds a blue friend", "seconds": 4, "shots": 2, "style": f"{CANARY} style"}
        board = http.post("/v1/storyboards", json=board_body, headers={"prefer": "wait=60"}).json()
        completed(service, board["id"])
        board = service.get(f"/v1/storyboards/{board['id']}")
        if board["storyboard"] is not None:
            words += [shot["prompt"] for shot in board["storyboard"]["shots"]]
            words.append(board["storyboard"]["title"])

        # a film, whose storyboard is seen while it is made
        film_body = {"idea": f"{CANARY} crosses the sea", "seconds": 2, "shots": 2, "num_inference_steps": 4}
        film = http.post("/v1/films", json=film_body).json()
        written = wait_for(
            lambda: service.get(f"/v1/films/{film['id']}")["storyboard"] or service.ended(film["id"]), LIMIT_S, "words"
        )
        words += [shot["prompt"] for shot in written.get("shots", [])]
        completed(service, film["id"])

    # shot prompts of a few common letters could stand anywhere
    words = [word for word in words if len(word) >= 12]
    try:
        wait_for(lambda: not places(service, words), LIMIT_S, "nothing is left")
    except AssertionError:
        pytest.fail(f"left: {places(service, words)}")
    assert not any(CANARY.encode() in body for body in collector.bodies)
    assert not any(CANARY.encode() in body for _, body in hook.got)

    # what was asked for is there
    film = service.get(f"/v1/films/{film['id']}")
    assert film["content_url"] and film["storyboard"] is None and film["idea"] is None
    with service.http as http:
        assert http.get(film["content_url"]).status_code == 200
        timeline = http.get(f"{film['content_url']}?variant=timeline")
        assert timeline.status_code == 200 and "shot 1" in timeline.text
        assert http.get(f"{film['content_url']}?variant=storyboard").status_code == 404
        assert http.get(f"/v1/videos/{clip['id']}/content").status_code == 200
    assert service.get(f"/v1/storyboards/{board['id']}")["storyboard"] is None

    _check_progress(previews, types)
    _check_spans(collector, clip["id"])
    _check_figures(service)
    _check_lines(service, clip["id"])


def _watch(service: Service, job_id: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Follow a job to its end; gives its previews and the types of all events."""
    previews, types = [], []
    with httpx.stream("GET", f"{service.url}/v1/jobs/{job_id}/events", timeout=LIMIT_S, trust_env=False) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                types.append(event["type"])
                if event["type"] == "job.preview":
                    previews.append(event["data"])
    return previews, types


def _check_progress(previews: list[dict[str, Any]], types: list[str]) -> None:
    assert types[0] == "job.queued" and types[-1] == "video.completed" and "job.progress" in types
    assert previews
    for preview in previews:
        head, _, picture = preview["image"].partition(",")
        assert head == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(picture))).format == "JPEG"
    steps = [preview["step"] for preview in previews]
    assert steps == sorted(steps) and steps[0] > 0 and steps[-1] < previews[0]["total_steps"] == 12


def _check_spans(collector: Collector, clip_id: str) -> None:
    """The trace of the clip from its request to its webhook, that of the chat to its engine."""
    wait_for(lambda: "webhook delivery" in collector.of(traceparent("b2")), LIMIT_S, "the delivery's span")
    names = ("job video", "stage finish", "POST /v1/videos")
    wait_for(lambda: set(names) <= set(collector.of(traceparent("b2"))), LIMIT_S, "the clip's spans")
    spans = collector.of(traceparent("b2"))
    request = min(spans["POST /v1/videos"], key=lambda span: span.start_time_unix_nano)
    (job,) = spans["job video"]
    assert request.parent_span_id.hex() == "b2" * 8
    assert job.parent_span_id == request.span_id == spans["webhook delivery"][0].parent_span_id
    attributes = {item.key: item.value for item in job.attributes}
    assert attributes["job_id"].string_value == clip_id and attributes["outcome"].string_value == "completed"
    for stage in ("encode_prompt", "denoise", "decode", "encode_video", "finish"):
        (span,) = spans[f"stage {stage}"]
        assert span.parent_span_id == job.span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    wait_for(lambda: "text generate" in collector.of(traceparent("a1")), LIMIT_S, "the engine's span")
    chat = collector.of(traceparent("a1"))
    assert chat["text generate"][0].parent_span_id == chat["POST /v1/chat/completions"][0].span_id


def _check_figures(service: Service) -> None:
    def read() -> dict[str, float]:
        with service.http as http:
            text = http.get("/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name.removeprefix('media_server_')}{{{labels}}}"] = sample.value
        return found

    found = read()
    assert found["jobs_ended_total{kind=video,status=completed}"] == 3
    assert found["jobs_ended_total{kind=film,status=completed}"] == 1
    assert found["jobs_ended_total{kind=storyboard,status=completed}"] == 2
    # the clip's 12 steps give 11 spans between them or more, the shots' 4 each
    assert found["step_seconds_count{model=tiny-wan}"] == 12 + 2 * 4
    for kind, stage in (("video", "denoise"), ("video", "finish"), ("join", "check"), ("storyboard", "storyboard")):
        assert found[f"stage_seconds_count{{kind={kind},stage={stage}}}"] >= 1
    assert found["webhook_tries_total{outcome=delivered}"] == 1
    assert found["text_tokens_total{kind=completion}"] > 48
    assert found["broker_up{}"] == 1
    assert any(name.startswith("worker_memory_bytes{") and value > 1e6 for name, value in found.items())
    assert any(name.startswith("engine_kv_tokens{") and value > 0 for name, value in found.items())
    assert found["queue_jobs{pool=video}"] == 0
    assert not any(CANARY.lower() in name.lower() for name in found)


def _check_lines(service: Service, clip_id: str) -> None:
    """Each line of each process is one JSON object, and says what it is about where that is known."""
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    for line in lines:
        assert {"time", "level", "process", "logger", "message"} <= set(line), line
    assert {"supervisor", "api", "video-0", "engine-0", "storyboards", "media", "deliveries"} <= {
        line["process"] for line in lines
    }
    about = {line["process"] for line in lines if line.get("job_id") == clip_id}
    assert {"api", "video-0", "deliveries"} <= about
    assert any("request_id" in line for line in lines if line["process"] == "api")
