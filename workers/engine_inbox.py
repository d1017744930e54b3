"""An engine's inbox: messages from its stream in Valkey, for its loop to take.

One that cannot be read, of another version perhaps, is answered too, if it says who waits for the answer.
"""

import json
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

import redis
from pydantic import TypeAdapter, ValidationError

from media_server.text.messages import Abort, Generate, Message, RequestMeta, inbox_key
from workers.engine_grammars import Compiled

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 1000
_RECONNECT_S = 0.2
_MESSAGE: TypeAdapter[Generate | Abort] = TypeAdapter(Message)


@dataclass(frozen=True)
class Unreadable:
    """A request that cannot be read: whom to answer, and what is needed for it."""

    id: str
    meta: RequestMeta


class Inbox(queue.Queue[Generate | Abort | Compiled | Unreadable]):
    """What waits for the loop; `read` fills it, in a thread of its own."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        super().__init__()
        self._redis = client
        self._name = name

    def clear(self) -> None:
        """Drop messages to the instance before: their senders see that it has gone."""
        try:
            self._redis.delete(inbox_key(self._name))
        except redis.RedisError as error:
            logger.warning("Valkey does not answer yet: %s", error)

    def read(self, has_ended: threading.Event) -> None:
        """Move messages from the stream until `has_ended`."""
        key, last = inbox_key(self._name), "0-0"
        while not has_ended.is_set():
            try:
                # redis-py types a reply by all protocols at once
                reply: Any = self._redis.xread({key: last}, block=READ_BLOCK_MS, count=100)
                for _, entries in reply or []:
                    for entry_id, fields in entries:
                        last = entry_id
                        self._receive(fields[b"m"])
                    self._redis.xdel(key, *(entry_id for entry_id, _ in entries))
            except (redis.RedisError, OSError) as error:
                logger.debug("the inbox cannot be read: %s", error)
                has_ended.wait(_RECONNECT_S)

    def _receive(self, text: bytes) -> None:
        try:
            self.put(_MESSAGE.validate_json(text))
        except ValidationError as error:
            logger.error("a message to %s is malformed: %s", self._name, error.errors(include_input=False)[0])
            if (unreadable := _find_sender(text)) is not None:
                self.put(unreadable)


def _find_sender(text: bytes) -> Unreadable | None:
    """Find who waits for an answer to a message; None if it does not say."""
    try:
        message = json.loads(text)
        if message["type"] == "generate" and isinstance(message["id"], str):
            return Unreadable(message["id"], RequestMeta.model_validate(message["meta"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        # pydantic's errors are ValueErrors
        return None
    return None
