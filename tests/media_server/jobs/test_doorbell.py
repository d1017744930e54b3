"""Doorbells: what they say, and that no broker, dead or hung, holds a caller."""

import json
import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from media_server.jobs.doorbell import KEY_PREFIX, make_celery, ring
from media_server.settings import Settings, load_settings
from workers.valkey import valkey_command, wait_until_answering


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """Settings of an embedded broker that does not run."""
    settings = load_settings(data_dir=tmp_path)
    yield settings
    for left in settings.runtime_dir.iterdir():
        left.unlink()
    settings.runtime_dir.rmdir()


@pytest.fixture
def broker(settings: Settings) -> Iterator[redis.Redis]:
    """The embedded Valkey, on its socket."""
    server = subprocess.Popen(valkey_command(settings), stdout=subprocess.DEVNULL)
    client = redis.Redis.from_url(settings.redis_url)
    try:
        assert wait_until_answering(settings.redis_url, 120)
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait()


def test_a_doorbell_says_the_pool_and_nothing_else(settings: Settings, broker: "redis.Redis") -> None:
    celery = make_celery(settings)
    ring(celery, "video")
    ring(celery, "video")
    ring(celery, "text")
    assert broker.llen(f"{KEY_PREFIX}pool.video") == 2
    assert broker.llen(f"{KEY_PREFIX}pool.text") == 1
    raw = broker.lindex(f"{KEY_PREFIX}pool.video", 0)
    assert isinstance(raw, bytes)
    message = json.loads(raw)
    assert message["content-type"] == "application/json"
    assert message["headers"]["task"] == "pool.wake"
    assert message["headers"]["argsrepr"] == "['video']"
    assert message["headers"]["expires"] is not None


def test_a_broker_that_is_back_is_used_again(settings: Settings, request: pytest.FixtureRequest) -> None:
    celery = make_celery(settings)
    ring(celery, "video")
    client = request.getfixturevalue("broker")
    ring(celery, "video")
    assert client.llen(f"{KEY_PREFIX}pool.video") == 1


def test_a_dead_broker_costs_a_log_line(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    # a port that is taken and on which nobody listens
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        with caplog.at_level(logging.WARNING):
            ring(make_celery(settings.model_copy(update={"broker_url": url})), "video")
    assert "pool video" in caplog.text


def test_a_hung_broker_holds_nobody_for_long(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        celery = make_celery(settings.model_copy(update={"broker_url": url}))
        started = time.monotonic()
        ring(celery, "video")
        assert time.monotonic() - started > 2
        # what is not done again costs one timeout
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_message_is_done_when_it_is_taken(settings: Settings) -> None:
    """The settings that were tried for long jobs: with late acks four workers start one job."""
    conf = make_celery(settings).conf
    assert conf.task_acks_late is False
    assert conf.worker_disable_prefetch is True
    assert conf.worker_prefetch_multiplier == 1
    assert conf.accept_content == ["json"]
    assert conf.task_ignore_result is True
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False
    assert conf.broker_transport_options["socket_timeout"] == 10
