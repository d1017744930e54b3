"""Who computes what in the next step: first the running, one token each, then prompts in chunks.

Admission is in order of priority, then arrival, and reserves every place that a sequence may need, so nothing that
runs is ever preempted. The head of the queue is not overtaken, so it cannot starve. A beginning that a running sequence
has computed (the prompt of n answers, a system prompt that many share) is copied, not computed again.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass
from itertools import takewhile

from llm.kv_cache import KvCache
from llm.sequence import Sequence

# a sequence waits for a running one that is about to compute at least this much more of the same beginning
WORTH_WAITING = 32


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step: sequences at once, and tokens a step beyond which prompts wait (chunked prefill)."""

    max_sequences: int = 32
    max_step_tokens: int = 256


@dataclass(frozen=True)
class Scheduled:
    """`num_tokens` of a sequence, from `num_computed` on."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """The waiting and the running."""

    def __init__(self, kv_cache: KvCache, limits: SchedulerLimits) -> None:
        self.kv_cache = kv_cache
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda item: (item.request.priority, item.number))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its places."""
        if sequence.interval is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.kv_cache.free(sequence.name)
        sequence.interval = None

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens; empty if there is nothing to do."""
        self._admit()
        budget = self.limits.max_step_tokens
        scheduled: list[Scheduled] = []
        # a sequence with few tokens to go (one, or what a grammar has forced) goes before the prompts
        for sequence in sorted(self.running, key=lambda item: len(item.token_ids) - item.num_computed):
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
            if num_tokens > 0:
                scheduled.append(Scheduled(sequence, num_tokens))
                budget -= num_tokens
        return scheduled

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_sequences:
            head = self.waiting[0]
            source, length, awaited = find_prefix(head, self.running)
            if awaited - length >= WORTH_WAITING:
                return
            head.interval = self.kv_cache.reserve(head.name, head.num_places)
            if head.interval is None:
                return
            self.running.append(self.waiting.pop(0))
            if source is not None:
                assert source.interval is not None
                self.kv_cache.copy(source.interval, head.interval, length)
                head.num_computed = length


def find_prefix(sequence: Sequence, running: Row[Sequence]) -> tuple[Sequence | None, int, int]:
    """Find the running sequence that has computed the longest beginning of this one, token ids compared.

    Returns: that sequence or None, how many tokens it has, and how many some sequence has or is about to compute.
    """
    # the last token is always computed, since its logits are wanted
    wanted = sequence.token_ids[:-1]
    source, best, awaited = None, 0, 0
    for other in running:
        if other.finish_reason is not None:
            continue
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, other.token_ids, strict=False)))
        awaited = max(awaited, common)
        if (computed := min(common, other.num_computed)) > best:
            source, best = other, computed
    return source, best, awaited
