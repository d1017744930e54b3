"""Leases: their owners' names, their beat during long work, and what those that were killed left behind."""

import logging
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from concurrent.futures import wait as wait_for
from typing import TypeVar

import redis
import sqlalchemy as sa

from media_server.jobs.claims import end_leases
from media_server.jobs.database import Database
from media_server.jobs.states import Status
from media_server.jobs.tables import batches, jobs
from media_server.text.messages import ENGINES_KEY, engine_key

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WORKER_ID = re.compile(r"[^@]+@(?P<host>.+):(?P<pid>\d+)")


def worker_id(name: str, pid: int | None = None) -> str:
    """Name a lease owner so that no two processes of a cluster share it: `video-0@host:1234`."""
    return f"{name}@{socket.gethostname()}:{os.getpid() if pid is None else pid}"


def beat_meanwhile(helper: Executor, work: Callable[[], T], beat: Callable[[], None]) -> T:
    """Do something long in the helper's thread and call `beat` ten times a second meanwhile.

    What `beat` raises ends the wait, not the work: whoever closes the helper waits for it.
    """
    future = helper.submit(work)
    while not wait_for([future], timeout=0.1).done:
        beat()
    return future.result()


def end_leases_of_the_dead(db: Database) -> int:
    """End the leases of this machine's processes that live no more; returns how many jobs and batches go on at once.

    For the one supervisor of a data folder, before it starts its children.
    """
    of_jobs = sa.select(jobs.c.lease_owner).where(jobs.c.status == Status.IN_PROGRESS, jobs.c.lease_owner.is_not(None))
    of_batches = sa.select(batches.c.lease_owner).where(batches.c.lease_owner.is_not(None))
    with db.read() as tx:
        owners = {*tx.conn.scalars(of_jobs.distinct()), *tx.conn.scalars(of_batches.distinct())}
    return sum(end_leases(db, owner) for owner in owners if owner and _is_dead_here(owner))


def withdraw_engine(redis_url: str, name: str) -> None:
    """Take back the announcement of an engine of this machine that was seen to die, so that nothing is sent to it.

    Without it the announcement ends by itself, as it does if the broker does not answer now.
    """
    full_name = f"{name}@{socket.gethostname()}"
    client = redis.Redis.from_url(redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
    try:
        client.delete(engine_key(full_name))
        client.srem(ENGINES_KEY, full_name)
    except (redis.RedisError, OSError) as error:
        logger.debug("the announcement of %s is left to its end: %s", full_name, error)
    finally:
        client.close()


def _is_dead_here(owner: str) -> bool:
    found = _WORKER_ID.fullmatch(owner)
    return found is not None and found["host"] == socket.gethostname() and not is_alive(int(found["pid"]))


def is_alive(pid: int) -> bool:
    """Say whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
