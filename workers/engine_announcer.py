"""What an engine says of itself every few seconds, for as long as its loop turns; and its end if it does not.

A loop that hangs says nothing, not even to itself: this thread is what is left to end the process, so that whoever
supervises it starts another.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

import redis

from media_server.text.messages import ANNOUNCE_TTL_S, ENGINES_KEY, Announcement, engine_key

logger = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
SEEN_S = 5.0
# a loop that has not turned for so long is hung: it no longer announces itself, and its requests are told so
HUNG_S = 30.0
# and for so long, it will not turn again: the longest step, a chunk of a large model's prompt on a slow CPU, takes less
ABANDONED_S = 300.0
EXIT_HUNG = 70


class Announcer:
    """Announces one replica; `describe` says what it does, `refresh` tells the database that its card is alive."""

    def __init__(self, client: redis.Redis, describe: Callable[[], Announcement], refresh: Callable[[], None]) -> None:
        self._redis = client
        self._describe = describe
        self._refresh = refresh

    def run(self, stopping: threading.Event, has_ended: threading.Event, turned_at: Callable[[], float]) -> None:
        """Announce until `has_ended`, then withdraw; ends the process if `turned_at` is ABANDONED_S ago."""
        name = self._describe().name
        seen_at = time.monotonic()
        is_hung = False
        while not has_ended.is_set():
            still_s = time.monotonic() - turned_at()
            # seen twice: a process that was stopped as a whole and goes on has turned by then
            was_hung, is_hung = is_hung, still_s > ABANDONED_S
            if was_hung and is_hung:
                logger.critical("%s has hung for %.0f s and is ended", name, still_s)
                os._exit(EXIT_HUNG)
            if still_s < HUNG_S:
                try:
                    self._redis.sadd(ENGINES_KEY, name)
                    self._redis.set(engine_key(name), self._describe().model_dump_json(), ex=ANNOUNCE_TTL_S)
                except (redis.RedisError, OSError) as error:
                    logger.debug("Valkey does not answer: %s", error)
                if time.monotonic() - seen_at >= SEEN_S:
                    seen_at = time.monotonic()
                    try:
                        self._refresh()
                    except Exception as error:
                        logger.warning("the model's card cannot be refreshed: %s", error)
            # a drain is announced at once
            was_stopping = stopping.is_set()
            (has_ended if was_stopping else stopping).wait(ANNOUNCE_S)
        try:
            self._redis.delete(engine_key(name))
            self._redis.srem(ENGINES_KEY, name)
        except (redis.RedisError, OSError):
            # it expires by itself
            return
