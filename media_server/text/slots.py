"""How many text requests a key has under way: a place each in Valkey, held for as long as somebody renews it.

    ms:streams:<key id>   sorted set of request ids, by the time until which each place is held

Places are for all API processes together. One that dies leaves its places to run out; a Valkey that comes back empty
gives every place back, which its streams take again when they renew.
"""

from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from media_server.errors import RateLimited
from media_server.text.reading import EngineUnavailable

# a stream renews its place each RENEW_S
HOLD_S = 30.0
RENEW_S = 10.0
_RETRY_S = 2.0
# returns how many places are held by others, and takes one if that is below the limit
_TAKE = """
local now = redis.call('TIME')
now = tonumber(now[1]) + tonumber(now[2]) / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREM', KEYS[1], ARGV[2])
local held = redis.call('ZCARD', KEYS[1])
if held < tonumber(ARGV[1]) then
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
  redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[3])) + 1)
end
return held
"""
_COUNT = """
local now = redis.call('TIME')
return redis.call('ZCOUNT', KEYS[1], tonumber(now[1]) + tonumber(now[2]) / 1000000, '+inf')
"""


class Slot:
    """One place of a key's; the methods may be called after it was given back."""

    def __init__(self, client: redis.asyncio.Redis, owner_key_id: str, request_id: str, hold_s: float) -> None:
        self._redis = client
        self._key = _key(owner_key_id)
        self._request_id = request_id
        self._hold_s = hold_s

    async def renew(self) -> None:
        """Hold the place for longer, whatever the limit is by now."""
        await self.take(limit=1 << 30)

    async def take(self, limit: int) -> int:
        """Take the place if fewer than `limit` are held by others; returns how many those are."""
        arguments: Any = (str(limit), self._request_id, str(self._hold_s))
        try:
            return int(await self._redis.eval(_TAKE, 1, self._key, *arguments))
        except (RedisError, OSError) as error:
            raise EngineUnavailable("The broker does not answer; try again.", code="broker_unavailable") from error

    async def give_back(self) -> None:
        """Free the place; one that cannot be freed now runs out."""
        try:
            await self._redis.zrem(self._key, self._request_id)
        except (RedisError, OSError):
            return


async def take_slot(
    client: redis.asyncio.Redis, owner_key_id: str, request_id: str, limit: int, *, hold_s: float = HOLD_S
) -> Slot:
    """Take a place for a text request.

    Raises RateLimited if the key has `limit` under way, EngineUnavailable if Valkey does not answer.
    """
    slot = Slot(client, owner_key_id, request_id, hold_s)
    held = await slot.take(limit)
    if held >= limit:
        raise RateLimited(
            f"This key may have {limit} text requests at a time, and has {held}.",
            code="stream_quota",
            rule=f"at most {limit} text requests at a time",
            value=held,
            retry_after_s=_RETRY_S,
        )
    return slot


async def count_slots(client: redis.asyncio.Redis, owner_key_id: str) -> int | None:
    """Count the text requests that a key has under way; None if Valkey does not answer."""
    try:
        return int(await client.eval(_COUNT, 1, _key(owner_key_id)))
    except (RedisError, OSError):
        return None


def _key(owner_key_id: str) -> str:
    return f"ms:streams:{owner_key_id}"
