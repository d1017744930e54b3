"""Health and models: what is missing is said."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fastapi.testclient import TestClient

from media_server.app import create_app
from media_server.jobs.tables import models
from media_server.settings import Settings
from media_server.text.engine import AsyncEngineClient


def test_ready_says_what_is_missing(service: Any) -> None:
    assert service.http.get("/health/live").json() == {"status": "ok", "parts": []}
    answer = service.http.get("/health/ready")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["error"]["code"] == "not_ready"
    parts = {part["name"]: part["is_ready"] for part in answer.json()["parts"]}
    assert parts == {
        "broker": False, "migrations": True, "worker tiny-wan": True, "engine smollm2-135m-instruct": True,
    }  # fmt: skip
    assert "broker" in answer.json()["detail"] and "tiny-wan" not in answer.json()["detail"]


def test_ready_once_all_is_there(service: Any, monkeypatch: Any) -> None:
    async def pong() -> bool:
        return True

    served: set[str] = set()

    async def served_models(_: AsyncEngineClient) -> set[str]:
        return served

    monkeypatch.setattr(service.http.app.state.redis, "ping", pong)
    monkeypatch.setattr(AsyncEngineClient, "served_models", served_models)
    answer = service.http.get("/health/ready")
    # a broker that came back empty: a chat would be refused
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "Not ready: requests to smollm2-135m-instruct: no engine has told the broker lately that it takes requests.",
    )
    served.add("smollm2-135m-instruct")
    answer = service.http.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    with service.db.write() as tx:
        tx.conn.execute(sa.update(models).where(models.c.name == "tiny-wan").values(seen_at=tx.now() - 60))
    answer = service.http.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "Not ready: worker tiny-wan: no worker of pool video was seen lately."
    with service.db.write() as tx:
        tx.conn.execute(sa.delete(models).where(models.c.kind == "text"))
    assert (
        "engine smollm2-135m-instruct: no engine of pool text has loaded it yet"
        in (service.http.get("/health/ready").json()["detail"])
    )


def test_an_engine_by_url_is_asked_itself(settings: Settings) -> None:
    elsewhere = settings.model_copy(update={"engine_url": "http://127.0.0.1:1"})
    with TestClient(create_app(elsewhere), base_url="http://127.0.0.1:8000") as http:
        parts = {part["name"]: part for part in http.get("/health/ready").json()["parts"]}
    assert parts["engine"]["detail"] == "the server at engine_url does not answer"
    assert not any("smollm2" in name for name in parts)


def test_a_database_without_migrations_is_said_and_nothing_is_guessed(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", broker_url="redis://127.0.0.1:1/0")
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as http:
        parts = {part["name"]: part for part in http.get("/health/ready").json()["parts"]}
        assert parts["migrations"]["is_ready"] is False
        assert http.get("/v1/videos").status_code == 500


def test_models_are_openais_with_their_cards(service: Any) -> None:
    answer = service.http.get("/v1/models").json()
    assert (answer["object"], answer["has_more"]) == ("list", False)
    assert [model["id"] for model in answer["data"]] == ["tiny-wan", "smollm2-135m-instruct"]
    model = service.http.get("/v1/models/tiny-wan").json()
    assert (model["object"], model["owned_by"], model["kind"], model["is_ready"]) == (
        "model", "media-server", "video", True,
    )  # fmt: skip
    assert isinstance(model["created"], int)
    assert model["card"]["frames"]["rule"] == "4k+1"


def test_no_model_yet_is_503(service: Any) -> None:
    with service.db.write() as tx:
        tx.conn.execute(sa.delete(models))
    answer = service.http.post("/v1/videos", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
