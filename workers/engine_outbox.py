"""What an engine has written and not yet forgotten: one stream in Valkey for each request, sent once a step.

Invariants: event k of a request has the entry id k-0, for ever; sending it twice leaves it once. A reader that finds an
id missing reads again: it will be written again. A stream and what its request was expire together, `ttl_s` after the
last event at the earliest: while the request lives they are renewed, news or not.
"""

import logging
import time
from dataclasses import dataclass, field

import redis

from media_server.text.messages import FORGET_S, LINGER_S, RequestMeta, TextEvent, meta_key, outbox_key

logger = logging.getLogger(__name__)

# a request's stream outlives its last event by `resume_s`; here its events are kept for a Valkey that restarts
KEEP_S = 60.0
# how often an engine without news looks whether Valkey still knows what it was sent
CHECK_S = 2.0
# how often the keys of a living request are renewed; the shortest of them last for LINGER_S
RENEW_S = 10.0
_BOOT_KEY = "ms:boot:"
_DUPLICATE = "equal or smaller"


@dataclass
class _Stream:
    """The events of one request; the first `num_sent` have been taken by Valkey."""

    meta: str
    ttl_s: int
    num_answers: int
    # nothing of it outlives its end by more than FORGET_S
    is_forgotten: bool = False
    events: list[str] = field(default_factory=list)
    num_sent: int = 0
    renewed_at: float = 0.0
    ended_at: float | None = None


class Outbox:
    """The streams of one engine."""

    def __init__(self, client: redis.Redis, instance: str) -> None:
        self.redis = client
        # a mark that a Valkey which restarted empty does not have
        self.boot_key = f"{_BOOT_KEY}{instance}"
        self._streams: dict[str, _Stream] = {}
        self._checked_at = 0.0
        # whether Valkey has lost what it was sent, and has not been sent it again
        self._is_lost = False

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    @property
    def has_unsent(self) -> bool:
        """Whether an event waits for Valkey."""
        return any(stream.num_sent < len(stream.events) for stream in self._streams.values())

    def num_answers(self, request_id: str) -> int:
        """How many answers a request asked for."""
        return self._streams[request_id].num_answers

    def open(self, request_id: str, meta: RequestMeta, *, num_answers: int = 1, resume_s: float | None = None) -> None:
        """Begin the stream of a request."""
        ttl_s = max(LINGER_S, resume_s or 0)
        self._streams[request_id] = _Stream(
            meta.model_dump_json(), int(ttl_s), num_answers, is_forgotten=meta.is_forgotten
        )

    def add(self, request_id: str, event: TextEvent) -> None:
        """Append an event; it leaves with the next flush."""
        stream = self._streams[request_id]
        assert stream.ended_at is None, f"{request_id} has ended"
        stream.events.append(event.model_dump_json(exclude_defaults=True))
        if event.is_last:
            stream.ended_at = time.monotonic()
            if stream.is_forgotten:
                stream.ttl_s = int(FORGET_S)

    def flush(self) -> bool:
        """Send what is unsent in one pipeline; False if Valkey did not take it, which is tried again."""
        self._drop_old()
        is_due = bool(self._streams) and time.monotonic() - self._checked_at >= CHECK_S
        if not (self.has_unsent or is_due):
            return True
        try:
            if not self._is_lost and not self._send(is_again=False):
                self._is_lost = True
                logger.warning("Valkey has lost its streams; %d are written again", len(self._streams))
            if self._is_lost:
                self._send(is_again=True)
                self._is_lost = False
        except (redis.RedisError, OSError) as error:
            logger.debug("Valkey does not take events: %s", error)
            return False
        self._checked_at = time.monotonic()
        return True

    def _send(self, *, is_again: bool) -> bool:
        """Send what is unsent, or everything again; returns False if the server has lost what it was sent before."""
        # one transaction, so that no reader sees a stream that is half written again
        pipeline = self.redis.pipeline(transaction=is_again)
        pipeline.set(self.boot_key, "1", get=True)
        had_sent = any(stream.num_sent for stream in self._streams.values())
        sent: dict[str, int] = {}
        renewed: dict[str, int] = {}
        now = time.monotonic()
        for request_id, stream in self._streams.items():
            first = 0 if is_again else stream.num_sent
            if first == len(stream.events):
                if stream.num_sent and stream.ended_at is None and now - stream.renewed_at >= RENEW_S:
                    # expire answers whether the key was there: its place among the results
                    renewed[request_id] = len(pipeline)
                    pipeline.expire(outbox_key(request_id), stream.ttl_s)
                    pipeline.expire(meta_key(request_id), stream.ttl_s)
                continue
            sent[request_id] = len(stream.events)
            if is_again:
                pipeline.delete(outbox_key(request_id))
            if first == 0:
                pipeline.set(meta_key(request_id), stream.meta, ex=stream.ttl_s)
            for number in range(first, len(stream.events)):
                pipeline.xadd(outbox_key(request_id), {"d": stream.events[number]}, id=f"{number + 1}-0")
            pipeline.expire(outbox_key(request_id), stream.ttl_s)
            pipeline.expire(meta_key(request_id), stream.ttl_s)
        results = pipeline.execute(raise_on_error=False)
        for result in results:
            # sent before a connection broke, and taken
            if isinstance(result, Exception) and _DUPLICATE not in str(result):
                raise result
        if not is_again and results[0] is None and had_sent:
            return False
        if any(not (results[place] and results[place + 1]) for place in renewed.values()):
            # an engine that stood still for longer than they last
            return False
        for request_id, count in sent.items():
            self._streams[request_id].num_sent = count
        for request_id in (*sent, *renewed):
            self._streams[request_id].renewed_at = now
        return True

    def _drop_old(self) -> None:
        now = time.monotonic()
        for request_id, stream in list(self._streams.items()):
            keep_s = 0.0 if stream.is_forgotten else KEEP_S
            if stream.ended_at is not None and now - stream.ended_at > keep_s and stream.num_sent == len(stream.events):
                del self._streams[request_id]
