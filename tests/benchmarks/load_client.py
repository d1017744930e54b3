"""HTTP/1.1 over raw asyncio streams: a client that costs far less than the server it measures.

Invariant: one connection carries one request at a time and stays open; any status but 2xx is an error.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timings:
    """What a burst of requests took: seconds of each, in no order, and of the whole."""

    each_s: list[float]
    total_s: float

    def quantile_ms(self, share: float) -> float:
        """Give the latency below which this share of the requests lies."""
        ordered = sorted(self.each_s)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def figures(self) -> dict[str, float]:
        """Give requests a second, and p50 and p99 in milliseconds."""
        return {
            "a_second": round(len(self.each_s) / self.total_s, 1),
            "p50_ms": round(self.quantile_ms(0.5), 2),
            "p99_ms": round(self.quantile_ms(0.99), 2),
        }


class Connection:
    """One open connection to a server on loopback."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def send(self, method: str, path: str, body: object | None = None) -> None:
        """Send a request; the body as JSON."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await self.writer.drain()

    async def head(self) -> dict[str, str]:
        """Read the status line and the headers of an answer; names are in lower case."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if not status.split(" ")[1].startswith("2"):
            text = await self.reader.readexactly(int(headers.get("content-length", 0)))
            raise RuntimeError(f"{status}: {text.decode(errors='replace')}")
        return headers

    async def ask(self, method: str, path: str, body: object | None = None) -> Any:
        """Send a request and read its JSON."""
        await self.send(method, path, body)
        headers = await self.head()
        return json.loads(await self.reader.readexactly(int(headers["content-length"])))

    async def count_events(self, path: str, total: int) -> int:
        """Read server-sent events until `total` have come or the stream ends; returns how many came."""
        await self.send("GET", path)
        await self.head()
        seen = 0
        while seen < total and (line := await self.reader.readline()):
            seen += line.startswith(b"event:")
        return seen

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


async def burst(
    port: int, count: int, connections: int, ask: Callable[[Connection, int], Any], warm_up: int = 50
) -> Timings:
    """Send `count` requests over some connections, each at once after its last answer; `warm_up` more come before."""
    opened = [await Connection.open(port) for _ in range(connections)]
    for index in range(warm_up):
        await ask(opened[index % connections], -1 - index)
    numbers = iter(range(count))
    each: list[float] = []

    async def work(connection: Connection) -> None:
        for number in numbers:
            started = time.perf_counter()
            await ask(connection, number)
            each.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*map(work, opened))
    total = time.perf_counter() - started
    for connection in opened:
        connection.close()
    return Timings(each, total)


async def paced(
    port: int, per_second: float, seconds: float, connections: int, ask: Callable[[Connection, int], Any]
) -> Timings:
    """Send requests at a steady pace, whatever the answers take.

    A request's time begins when it is due, so that one that waits for a free connection counts as late as it is.
    """
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await Connection.open(port))
    started = time.perf_counter()

    async def one(number: int) -> float:
        due = started + number / per_second
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        connection = await free.get()
        await ask(connection, number)
        free.put_nowait(connection)
        return time.perf_counter() - due

    each = await asyncio.gather(*(one(number) for number in range(round(per_second * seconds))))
    total = time.perf_counter() - started
    while not free.empty():
        free.get_nowait().close()
    return Timings(list(each), total)
