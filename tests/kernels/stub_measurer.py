"""A measuring process for tests of `gpu_check`: it imports neither torch nor Triton, so that it starts at once."""

import os
import time
from multiprocessing.connection import Connection
from typing import Any


def row(config: int = 0, **changes: Any) -> dict[str, Any]:
    """Return what was measured of a sound launch."""
    return {"config": config, "error": 1e-3, "bitwise": True, "us": 8.0, **changes}


def serve(pipe: Connection, arch: int) -> None:
    """Stand in for the measuring process: what becomes of it is in the check's name."""
    while True:
        try:
            name, first, with_peers, _deadline = pipe.recv()
        except EOFError:
            return
        now: dict[str, Any] = {"peers": {}, "rows": [], "stage": "inputs"}
        pipe.send((now, "at work"))
        if with_peers:
            pipe.send(({**now, "stage": "peer sdpa"}, "at work"))
            if name == "peer dies":
                os._exit(3)
            now["peers"]["sdpa"] = {"error": 1e-3, "us": 4.0}
        for config in range(first, 4):
            pipe.send(({**now, "stage": "launch"}, "at work"))
            if config == 1 and name == "launch dies":
                os.abort()
            if config == 1 and name == "launch hangs":
                time.sleep(600)
            if config == 1 and name == "context is lost":
                now["rows"].append({"config": 1, "failed": "an illegal memory access"})
                pipe.send(({**now, "stage": "launch"}, "unusable"))
                return
            now["rows"].append(row(config))
        pipe.send(({**now, "stage": "done"}, "done"))
