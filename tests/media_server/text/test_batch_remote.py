"""A batch whose text an OpenAI-compatible server by URL writes."""

import asyncio
import json
import threading
import time
from pathlib import Path

from fastapi.testclient import TestClient

from media_server.app import create_app
from media_server.settings import Settings
from tests.fresh_database import open_migrated
from tests.media_server.text.test_remote import Server
from workers.batch_worker import serve

WAIT_S = 60.0


def test_lines_are_passed_on_and_its_refusals_are_theirs(tmp_path: Path) -> None:
    server = Server()
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    settings = Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0", engine_url=url)
    db = open_migrated(settings.database)
    db.close()
    questions = {name: [{"role": "user", "content": name}] for name in ("count", "fail")}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "big", "messages": messages},
        }
        for name, messages in questions.items()
    ]
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    worker = threading.Thread(target=lambda: loop.run_until_complete(serve(settings, "batches@test:1", stopping)))
    worker.start()
    try:
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as http:
            content = "\n".join(map(json.dumps, lines)).encode()
            file = http.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}).json()
            body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
            batch = http.post("/v1/batches", json=body).json()
            deadline = time.monotonic() + WAIT_S
            while batch["status"] != "completed":
                assert time.monotonic() < deadline, batch
                time.sleep(0.05)
                batch = http.get(f"/v1/batches/{batch['id']}").json()
            made, failed = (
                json.loads(http.get(f"/v1/files/{batch[name]}/content").text)
                for name in ("output_file_id", "error_file_id")
            )
    finally:
        loop.call_soon_threadsafe(stopping.set)
        worker.join()
        loop.close()
        server.shutdown()
        serving.join()
        server.server_close()
    assert made["custom_id"] == "count" and made["response"]["body"]["id"] == "remote-1"
    assert batch["usage"]["total_tokens"] == 6
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("fail", 400)
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert sorted(map(json.dumps, server.bodies)) == sorted(json.dumps(line["body"]) for line in lines)
