"""Who computes what in the next step: first who writes, one token each, then prompts in chunks.

Blocks are taken as they are needed. When they run out, the running sequence of the lowest priority, and of these the
youngest, is preempted: it waits again and computes its tokens anew, most of them from the prefix cache as a rule; with
an `OffloadStore` its blocks are copied out and back instead, unless the prefix cache still has all but the last.
Order is by priority, then arrival. Who was overtaken MAX_OVERTAKEN times goes before all others, so none starves, and
the first in order always gets on, since each sequence alone fits the pool.
"""

from dataclasses import dataclass
from itertools import takewhile

from llm.kv_cache import KvCache, PrefixHit
from llm.offload import Offloaded, OffloadStore
from llm.sequence import Sequence

# a sequence waits for a running one that is about to compute at least this much more of the same beginning
WORTH_WAITING = 32
# how often a sequence is passed over before its priority is the highest
MAX_OVERTAKEN = 64


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds: sequences at once, tokens a step (prompts wait beyond it), and steps on their way at once.

    With `steps_ahead` 2 a step is scheduled and launched before the one in front of it is known.
    """

    max_sequences: int = 32
    max_step_tokens: int = 256
    steps_ahead: int = 1


@dataclass(frozen=True)
class Scheduled:
    """`num_tokens` of a sequence, from `num_computed` on."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """The waiting and the running."""

    def __init__(self, kv_cache: KvCache, limits: SchedulerLimits, offload: OffloadStore | None = None) -> None:
        self.kv_cache = kv_cache
        self.limits = limits
        self.offload = offload
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Take a sequence out, wherever it is, and free its blocks; what is not sound is not kept for others."""
        if sequence.blocks is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            if self.offload is not None:
                self.offload.drop(sequence.name)
            return
        self.running.remove(sequence)
        self._free(sequence, is_sound=is_sound)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens; empty if there is nothing to do."""
        self._admit()
        budget = self.limits.max_step_tokens
        chosen: dict[Sequence, int] = {}
        for sequence in sorted(self.running, key=lambda item: (not item.is_writing, rank(item))):
            num_tokens = min(sequence.num_to_compute, budget)
            if num_tokens <= 0 or sequence.blocks is None:
                continue
            is_served, preempted = self._make_room(sequence, num_tokens)
            for victim in preempted:
                budget += chosen.pop(victim, 0)
            if is_served:
                chosen[sequence] = num_tokens
                budget -= num_tokens
        return [Scheduled(sequence, num_tokens) for sequence, num_tokens in chosen.items()]

    def store(self, sequence: Sequence) -> None:
        """Make the blocks known to the prefix cache that are full of tokens known here."""
        if sequence.blocks is not None and sequence.is_shared:
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            self.kv_cache.store(sequence.blocks, sequence.chain.extend(sequence.token_ids), num_known)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> tuple[bool, list[Sequence]]:
        """Give a running sequence its blocks; returns whether it has them, and who was preempted for it."""
        preempted: list[Sequence] = []
        while True:
            assert sequence.blocks is not None
            if self.kv_cache.grow(sequence.blocks, sequence.num_computed, sequence.num_computed + num_tokens):
                return True, preempted
            victim = max(self.running, key=rank)
            assert len(self.running) > 1, f"{sequence.name} does not fit the pool alone"
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False, preempted

    def _admit(self) -> None:
        self.waiting.sort(key=rank)
        while self.waiting:
            head = self.waiting[0]
            if head.num_pending:
                # its last token is not known yet
                return
            chain = head.chain.extend(head.token_ids)
            nothing = PrefixHit(0, [[] for _ in self.kv_cache.groups])
            hit = nothing if head.is_second_try else self.kv_cache.match(chain, len(head.token_ids))
            copy = self._copy_of(head, hit)
            if copy is not None:
                # its own blocks, all of them
                hit = nothing
            elif not head.is_second_try and self._is_awaited(head, hit):
                return
            if not self._fits(head, hit):
                victim = self._victim_for(head)
                if victim is None:
                    return
                self._preempt(victim)
                self.waiting.sort(key=rank)
                continue
            self._begin(self.waiting.pop(0), hit, copy)

    def _copy_of(self, head: Sequence, hit: PrefixHit) -> Offloaded | None:
        """Find the copy that `head` goes on from, unless the prefix cache has all of it but the end of a block."""
        copy = None if self.offload is None else self.offload.get(head.name)
        is_shared = (
            hit.num_tokens > 0 and copy is not None and copy.num_tokens < hit.num_tokens + self.kv_cache.block_size
        )
        return None if is_shared else copy

    def _begin(self, sequence: Sequence, hit: PrefixHit, copy: Offloaded | None) -> None:
        if copy is not None:
            assert self.offload is not None
            sequence.blocks = self.kv_cache.begin_with(sequence.name, copy.num_passed, copy.num_tokens)
            sequence.num_computed = copy.num_tokens
            self.offload.restore(sequence.name, sequence.blocks)
        else:
            if self.offload is not None:
                self.offload.drop(sequence.name)
            sequence.blocks = self.kv_cache.begin(sequence.name, hit)
            sequence.num_computed = hit.num_tokens
        if sequence.num_cached is None:
            sequence.num_cached = min(hit.num_tokens, sequence.num_prompt_tokens)
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += sequence.num_cached
        self.running.append(sequence)
        for other in self.waiting:
            other.num_overtaken += other.number < sequence.number

    def _fits(self, head: Sequence, hit: PrefixHit) -> bool:
        if len(self.running) >= self.limits.max_sequences:
            return False
        # who runs is about to need a block more
        spare = len(self.running)
        return self.kv_cache.can_begin(hit, len(head.token_ids), self.limits.max_step_tokens, spare)

    def _is_awaited(self, head: Sequence, hit: PrefixHit) -> bool:
        """Whether a running sequence is about to compute much more of the same beginning."""
        start = hit.num_tokens // self.kv_cache.block_size
        wanted = head.chain.blocks[start : (len(head.token_ids) - 1) // self.kv_cache.block_size]
        for other in self.running:
            if not other.is_writing and other.is_shared:
                pairs = zip(wanted, other.chain.blocks[start:], strict=False)
                num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if num_common * self.kv_cache.block_size >= WORTH_WAITING:
                    return True
        return False

    def _victim_for(self, head: Sequence) -> Sequence | None:
        """Find whom `head` may push out: the last in order of those of a lower priority, if there is one."""
        victim = max(self.running, key=rank, default=None)
        return victim if victim is not None and rank(victim)[:2] > rank(head)[:2] else None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.offload is not None:
            assert sequence.blocks is not None
            self.offload.save(sequence.name, sequence.blocks, sequence.num_computed)
        self._free(sequence)
        sequence.num_overtaken += 1
        self.num_preempted += 1
        self.waiting.append(sequence)

    def _free(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        self.kv_cache.free(sequence.name, is_sound=is_sound)
        sequence.blocks = None
        sequence.num_computed = 0


def rank(sequence: Sequence) -> tuple[bool, int, int]:
    """Place in the order: who was overtaken too often, then by priority, then by arrival."""
    has_waited = sequence.num_overtaken >= MAX_OVERTAKEN
    return (not has_waited, 0 if has_waited else sequence.request.priority, sequence.number)
