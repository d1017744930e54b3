"""What tests of batches do: send files, start batches, have the real worker run them, and read what came of them."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from media_server.jobs.tables import jobs
from media_server.keys import create_key
from workers.batch_worker import serve

PENDING = ("validating", "in_progress", "finalizing", "cancelling")
WAIT_S = 60.0


@contextlib.contextmanager
def batch_worker(service: Any, name: str = "batches@test:1") -> Iterator[None]:
    """Run the batch worker in a thread of its own; stopped in order at the end."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        ready.set()
        loop.run_until_complete(serve(service.settings, name, stopping))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()


def wait_until(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def line(custom_id: str, url: str = "/v1/videos", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a red ball", **body}}


def upload(service: Any, *lines: Any, headers: dict[str, str] | None = None) -> str:
    content = b"\n".join(item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines)
    answer = service.http.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def start(service: Any, *lines: Any, headers: dict[str, str] | None = None, **fields: Any) -> str:
    file_id = upload(service, *lines, headers=headers)
    body = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h", **fields}
    answer = service.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    batch_id: str = answer.json()["id"]
    return batch_id


def get(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    batch: dict[str, Any] = service.http.get(f"/v1/batches/{batch_id}", headers=headers).json()
    return batch


def ended(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    def find() -> dict[str, Any] | None:
        batch = get(service, batch_id, headers)
        return None if batch["status"] in PENDING else batch

    batch: dict[str, Any] = wait_until(find)
    return batch


def done(service: Any, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Do every job that comes, until the batch has ended."""

    def find() -> dict[str, Any] | None:
        service.worker.run_all()
        batch = get(service, batch_id, headers)
        return None if batch["status"] in PENDING else batch

    batch: dict[str, Any] = wait_until(find)
    return batch


def records(service: Any, file_id: str | None, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    answer = service.http.get(f"/v1/files/{file_id}/content", headers=headers)
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    return [json.loads(text) for text in answer.text.splitlines()]


def key_of(service: Any, name: str, **options: Any) -> tuple[str, dict[str, str]]:
    key, text = create_key(service.db, name, **options)
    return key.id, {"authorization": f"Bearer {text}"}


def count_jobs(service: Any) -> int:
    with service.db.read() as tx:
        return int(tx.conn.scalar(sa.select(sa.func.count()).select_from(jobs)) or 0)
