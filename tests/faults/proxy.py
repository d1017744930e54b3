"""A small TCP proxy that passes, refuses, cuts or swallows: the network between two processes, at its worst."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Literal

# swallow: half-open, it takes the connection and everything sent, and answers nothing; cut: it breaks off answers
Mode = Literal["pass", "refuse", "swallow", "cut"]
_CHUNK_BYTES = 4096


class Proxy:
    """Listens on a loopback port of its own, in a thread of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.mode: Mode = "pass"
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="proxy")
        self._thread.start()
        server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]

    def set(self, mode: Mode) -> None:
        """Treat what comes from now on so; connections that are open are broken off, unless all passes again."""
        self.mode = mode
        if mode != "pass":
            self._do(self._drop_all())

    def close(self) -> None:
        """Break everything off and end."""
        self.mode = "refuse"
        self._do(self._drop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _drop_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuse":
            _reset(writer)
            return
        self._writers.add(writer)
        try:
            if self.mode == "swallow":
                while await reader.read(_CHUNK_BYTES):
                    pass
                return
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer, is_answer=True))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if is_answer and self.mode == "cut":
                raise ConnectionAbortedError
            writer.write(chunk)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a port that nobody listens on answers."""
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
