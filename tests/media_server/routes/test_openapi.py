"""The OpenAPI document: valid, complete, and true of what the service answers."""

import json
import subprocess
import sys
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openapi_spec_validator import validate

from media_server.http_errors import PROBLEM_TYPE


@pytest.fixture
def document(service: Any) -> dict[str, Any]:
    answer: dict[str, Any] = service.http.get("/openapi.json").json()
    return answer


def test_it_validates_and_names_every_error(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"].startswith("3.1")
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and operation["description"], (method, path)
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    schema = response["content"][PROBLEM_TYPE]["schema"]
                    assert schema == {"$ref": "#/components/schemas/Problem"}, (method, path, status)
            assert {"400", "500"} <= set(operation["responses"]), (method, path)
            if "{" in path and "characters" not in path:
                assert "404" in operation["responses"], (method, path)
    assert "HTTPValidationError" not in json.dumps(document)


def test_examples_hold_to_their_schemas(document: dict[str, Any]) -> None:
    count = 0
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", []):
            _check(document, name, example)
            count += 1
    assert count >= 8


def test_answers_hold_to_the_document(service: Any, document: dict[str, Any]) -> None:
    video = service.completed_video()
    film = service.http.post("/v1/films", json={"idea": "a", "seconds": 2, "shots": 1}).json()
    service.worker.run_all()
    hook = {"name": "n", "url": "https://example.com/hook", "event_types": ["*"]}
    made = service.http.post("/v1/webhook_endpoints", json=hook).json()
    _check(document, "WebhookEndpointWithSecret", made)
    service.http.post("/v1/videos", json={"prompt": "a", "webhook_url": "https://example.com/hook"})
    service.worker.run_all()
    delivery = service.http.get("/v1/webhook_deliveries").json()["data"][0]["id"]
    for path, name in (
        ("/v1/webhook_event_types", "EventTypeList"),
        ("/v1/webhook_endpoints", "ListPage_WebhookEndpoint_"),
        (f"/v1/webhook_endpoints/{made['id']}", "WebhookEndpoint"),
        ("/v1/webhook_deliveries", "ListPage_WebhookDelivery_"),
        (f"/v1/webhook_deliveries/{delivery}", "WebhookDelivery"),
        ("/v1/videos?metadata[a]=b&metadata[a]=c", "Problem"),
        (f"/v1/videos/{video['id']}", "Video"),
        ("/v1/videos", "ListPage_Video_"),
        (f"/v1/films/{film['id']}", "Film"),
        ("/v1/films", "ListPage_Film_"),
        (f"/v1/jobs/{film['id']}", "Job"),
        ("/v1/jobs", "ListPage_Job_"),
        ("/v1/models", "ListPage_Model_"),
        ("/v1/videos/none", "Problem"),
        ("/v1/videos?limit=0", "Problem"),
        ("/health/ready", "Problem"),
        ("/health/live", "Health"),
    ):
        _check(document, name, service.http.get(path).json())
    with service.http.stream("GET", f"/v1/jobs/{film['id']}/events") as answer:
        data = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert data
    for event in data:
        _check(document, "JobEvent", event)


def test_requests_of_the_document_are_taken(service: Any, document: dict[str, Any]) -> None:
    """Each example of a body, without the URL that nobody answers, makes a job."""
    for path, name in (("/v1/videos", "VideoRequest"), ("/v1/films", "FilmBody")):
        for example in document["components"]["schemas"][name]["examples"]:
            body = {key: value for key, value in example.items() if key != "input_reference"}
            assert service.http.post(path, json=body).status_code == 200
    for example in document["components"]["schemas"]["EndpointBody"]["examples"]:
        assert service.http.post("/v1/webhook_endpoints", json=example).status_code == 200


def test_what_creates_takes_a_key_and_a_preference(document: dict[str, Any]) -> None:
    """Every POST that creates declares both headers and their refusals; lists of jobs declare their filters."""
    creating = ("videos", "videos/extensions", "videos/{video_id}/remix", "films", "storyboards", "webhook_endpoints")
    for path in creating:
        operation = document["paths"][f"/v1/{path}"]["post"]
        assert {"idempotency-key", "prefer"} <= {item["name"] for item in operation["parameters"]}, path
        assert {"409", "422"} <= set(operation["responses"]), path
    filters = {"status", "model", "created_from", "created_before", "metadata", "after", "before", "limit", "order"}
    for path in ("videos", "films", "storyboards", "jobs"):
        assert filters <= {item["name"] for item in document["paths"][f"/v1/{path}"]["get"]["parameters"]}


def test_the_front_imports_no_torch() -> None:
    """In a fresh process: the whole application, its document included, without torch or transformers."""
    code = """
import sys, tempfile
from media_server.app import create_app
from media_server.settings import Settings
create_app(Settings(data_dir=tempfile.mkdtemp())).openapi()
heavy = {"torch", "transformers", "diffusers", "triton", "workers", "llm", "video", "kernels"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr


def _check(document: dict[str, Any], name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.validate(value, schema)
