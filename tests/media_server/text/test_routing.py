"""Which replica a prompt goes to, in a simulation: against an oracle with one cache for all, and bounds on load."""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest

from media_server.text.messages import Announcement
from media_server.text.routing import BLOCK_TOKENS, Router

PREFIX_TOKENS = 512
KV_TOKENS = 16_384


@dataclass
class Replica:
    """An engine as far as routing sees it: a cache of prefixes, least recently used first, and requests under way."""

    name: str
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ends: list[float] = field(default_factory=list)

    def announce(self, now: float) -> Announcement:
        self.ends = [end for end in self.ends if end > now]
        used = min(KV_TOKENS, 600 * len(self.ends))
        return Announcement(
            name=self.name, instance=f"{self.name}-1", model="m", running=len(self.ends), kv_tokens=KV_TOKENS,
            kv_used_tokens=used,
        )  # fmt: skip

    def take(self, prefix: int, end: float) -> bool:
        """Begin a request; whether its prefix was there."""
        is_hit = prefix in self.cache
        self.cache[prefix] = None
        self.cache.move_to_end(prefix)
        while len(self.cache) * PREFIX_TOKENS > KV_TOKENS:
            self.cache.popitem(last=False)
        self.ends.append(end)
        return is_hit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_skewed", [False, True])
def test_four_replicas_hit_nearly_as_one_and_share_the_work(seed: int, is_skewed: bool) -> None:
    """50 prefixes, of which each replica holds 32; announcements are two seconds old at most."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(PREFIX_TOKENS)] for _ in range(50)]
    weights = [1 / (rank + 1) if is_skewed else 1.0 for rank in range(50)]
    clock = [0.0]
    router = Router(now=lambda: clock[0])
    replicas = {name: Replica(name) for name in ("a", "b", "c", "d")}
    announced: list[Announcement] = []
    announced_at = -10.0
    num_hits = num_known = 0
    seen: set[int] = set()
    worst: list[float] = []
    for _ in range(6000):
        clock[0] += rng.expovariate(12.0)
        if clock[0] - announced_at > 2.0:
            announced_at = clock[0]
            announced = [replica.announce(clock[0]) for replica in replicas.values()]
        which = rng.choices(range(50), weights)[0]
        own = [rng.randrange(1000) for _ in range(rng.randrange(5, 60))]
        chosen = router.choose(announced, [*prefixes[which], *own], "")
        num_hits += replicas[chosen.name].take(which, clock[0] + rng.expovariate(1 / 2.0))
        num_known += which in seen
        seen.add(which)
        loads = [sum(end > clock[0] for end in replica.ends) for replica in replicas.values()]
        if sum(loads) >= 8:
            worst.append(max(loads) / (sum(loads) / 4))
    assert num_hits >= 0.9 * num_known
    assert sum(worst) / len(worst) < 1.5


def announce(name: str, **fields: int) -> Announcement:
    return Announcement.model_validate({"name": name, "instance": f"{name}-1", "model": "m", **fields})


def test_a_replica_without_room_takes_no_prompt_while_another_can() -> None:
    router = Router()
    tokens = list(range(BLOCK_TOKENS * 20))
    roomy, full = announce("b", kv_tokens=4096, kv_used_tokens=0), announce("a", kv_tokens=4096, kv_used_tokens=0)
    assert router.choose([full, roomy], tokens, "").name == "a"
    full = full.model_copy(update={"kv_used_tokens": 4000})
    # it has the beginning, and no room for it
    assert router.choose([full, roomy], tokens, "").name == "b"
    assert router.choose([full], tokens, "").name == "a"


def test_beginnings_are_their_owners_and_die_with_the_replica() -> None:
    tokens = list(range(BLOCK_TOKENS * 50))
    replicas = [announce("a"), announce("b")]

    def goes_after(salt: str, *, is_kept: bool = True, restarts: bool = False) -> str:
        clock = [0.0]
        router = Router(now=lambda: clock[0])
        assert router.choose(replicas, tokens, "me", is_kept=is_kept).name == "a"
        # what runs on a is known by now
        clock[0] += 10.0
        busy = announce("a", running=1)
        again = busy.model_copy(update={"instance": "a-2"}) if restarts else busy
        return router.choose([again, replicas[1]], tokens, salt).name

    assert goes_after("me") == "a"
    assert goes_after("you") == "b"
    assert goes_after("me", is_kept=False) == "b"
    assert goes_after("me", restarts=True) == "b"


def test_an_idle_house_takes_turns() -> None:
    router = Router()
    replicas = [announce(name) for name in "abcd"]
    assert sorted(router.choose(replicas, [number], "").name for number in range(4)) == ["a", "b", "c", "d"]
