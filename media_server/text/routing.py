"""Which replica a prompt goes to: one that has computed its beginning before, if others are not left idle for it.

After Dynamo's rule (the lowest of what is left to compute and of what is under way already), with a bound on the load.
An API process remembers the beginnings that it has sent itself, as chained hashes of blocks, salted by the owner of the
key like the engine's own cache. It is a guess: an engine that has evicted a beginning computes it again, no more.

Invariants: a replica that drains or has no room to take the prompt in gets none while another could; what is remembered
of a replica is bounded by its cache, and forgotten when it restarts.
"""

import hashlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from media_server.text.messages import Announcement

# of the engine's cache
BLOCK_TOKENS = 16
# a request under way counts as much as so many blocks that have to be computed
LOAD_BLOCKS = 4.0
# a replica with more than so many times the mean load gets none, whatever it remembers; a few requests are no load
MOST_LOAD = 1.5
FEW = 4
# a replica says how it is every 2 s: what was sent meanwhile is counted here
_STALE_S = 2.0
# remembered of a replica that does not say how much it holds
_DEFAULT_BLOCKS = 4096


class Router:
    """Chooses replicas for one process; safe in threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}

    def choose(
        self, able: Sequence[Announcement], token_ids: Sequence[int], salt: str, *, is_kept: bool = True
    ) -> Announcement:
        """Choose among replicas that serve the model, at least one, and remember what is sent.

        `is_kept`: whether the engine may keep what it computes for others.
        """
        hashes = _hashes(token_ids, salt)
        with self._lock:
            self._forget_others(able)
            known = [self._replicas.setdefault(item.instance, _Replica()) for item in able]
            now = self._now()
            loads = [item.load + one.num_sent_since(now - _STALE_S) for item, one in zip(able, known, strict=True)]
            best = min(
                _candidates(able, loads, len(token_ids)),
                key=lambda index: (
                    len(hashes) - known[index].num_matching(hashes) + LOAD_BLOCKS * loads[index],
                    loads[index],
                    able[index].name,
                ),
            )
            known[best].remember(hashes if is_kept else [], now, able[best].kv_tokens)
        return able[best]

    def _forget_others(self, able: Sequence[Announcement]) -> None:
        # those of other models are known by other calls: only what has long been silent goes
        if len(self._replicas) > 4 * len(able) + 64:
            names = {item.instance for item in able}
            self._replicas = {name: one for name, one in self._replicas.items() if name in names}


class _Replica:
    """What one replica was sent, as far as its cache may hold it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._sent: list[float] = []

    def num_matching(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the beginning it has computed before."""
        count = 0
        for digest in hashes:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def num_sent_since(self, since: float) -> int:
        self._sent = [sent_at for sent_at in self._sent if sent_at > since]
        return len(self._sent)

    def remember(self, hashes: Sequence[bytes], now: float, kv_tokens: int | None) -> None:
        self._sent.append(now)
        # the last first: of a chain the end is forgotten before its beginning, as the engine's cache has it
        for digest in reversed(hashes):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        most = _DEFAULT_BLOCKS if kv_tokens is None else max(1, kv_tokens // BLOCK_TOKENS)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)


def _candidates(able: Sequence[Announcement], loads: Sequence[int], num_tokens: int) -> list[int]:
    """Leave out who has no room to take the prompt in, then who has too much to do; never everybody."""
    every = list(range(len(able)))
    with_room = [index for index in every if _has_room(able[index], num_tokens)] or every
    most = max(FEW, MOST_LOAD * (sum(loads) + 1) / len(loads))
    return [index for index in with_room if loads[index] + 1 <= most] or [min(with_room, key=lambda i: loads[i])]


def _has_room(replica: Announcement, num_tokens: int) -> bool:
    if replica.kv_tokens is None or replica.kv_used_tokens is None:
        return True
    return replica.kv_tokens - replica.kv_used_tokens >= num_tokens


def _hashes(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """Name the full blocks of a prompt, each with all before it."""
    parent, names = hashlib.blake2b(salt.encode(), digest_size=16).digest(), []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        tokens = array("q", token_ids[end - BLOCK_TOKENS : end]).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=16).digest()
        names.append(parent)
    return names
