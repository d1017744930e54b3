"""What the job API is measured against: FastAPI routes that do nothing but write, read or send what they must.

One row a POST, as durable as ours (SQLite, WAL, synchronous FULL, one commit a request), one row a GET, and a stream of
events from memory. `python -m tests.benchmarks.bare_api PORT DATABASE`.
"""

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

_BODY = '{"v":1,"step":%d,"progress":50.0}'


def create_app(database: str) -> FastAPI:
    """Build the application over a database file."""
    app = FastAPI()
    local = threading.local()
    writing = threading.Lock()
    listeners: set[asyncio.Queue[int]] = set()

    def connect() -> sqlite3.Connection:
        if not hasattr(local, "db"):
            local.db = sqlite3.connect(database, isolation_level=None)
            local.db.execute("PRAGMA synchronous = FULL")
        found: sqlite3.Connection = local.db
        return found

    setup = sqlite3.connect(database)
    setup.execute("PRAGMA journal_mode = WAL")
    setup.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, prompt TEXT, seconds TEXT)")
    setup.commit()
    setup.close()

    @app.post("/rows")
    def write(body: dict[str, Any]) -> dict[str, Any]:
        db = connect()
        with writing:
            row = db.execute(
                "INSERT INTO rows (prompt, seconds) VALUES (?, ?) RETURNING id", (body["prompt"], body["seconds"])
            ).fetchone()
        return {"id": row[0], "prompt": body["prompt"], "seconds": body["seconds"]}

    @app.get("/rows/{id}")
    def read(id: int) -> dict[str, Any]:
        row = connect().execute("SELECT id, prompt, seconds FROM rows WHERE id = ?", (id,)).fetchone()
        return {"id": row[0], "prompt": row[1], "seconds": row[2]}

    @app.post("/events/{count}")
    async def tell(count: int) -> dict[str, int]:
        for step in range(count):
            for queue in listeners:
                queue.put_nowait(step)
            await asyncio.sleep(0)
        return {"listeners": len(listeners)}

    @app.get("/events")
    async def listen() -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            queue: asyncio.Queue[int] = asyncio.Queue()
            listeners.add(queue)
            try:
                yield "retry: 2000\n\n"
                while True:
                    step = await queue.get()
                    yield f"id: {step}\nevent: job.progress\ndata: {_BODY % step}\n\n"
            finally:
                listeners.discard(queue)

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def main() -> None:
    """Serve on loopback."""
    port, database = sys.argv[1:]
    uvicorn.run(create_app(database), port=int(port), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
