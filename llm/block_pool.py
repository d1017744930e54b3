"""Blocks of a pool of keys and values: who refers to which, and which still hold a beginning worth keeping.

A block is in one of three states: referenced (by one sequence or by several that share a beginning), blank, or kept
(nobody refers to it, its content is cached, the one used longest ago is evicted first). Block 0 is never handed out:
tables name it where a block has been given back, and it holds zeros.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from llm.errors import IntegrityError
from llm.prefix_cache import CachedBlock

NULL_BLOCK = 0
# where runs are wanted this many are evicted at once: the end of an old text is a gap in which a new one can go on
EVICTED_AT_ONCE = 8
_BLANK_RUN = re.compile(b"\x01+")


class BlockPool:
    """`num_blocks` blocks of one layer group."""

    def __init__(self, num_blocks: int, *, prefers_runs: bool = False) -> None:
        """Make a pool; `prefers_runs` spreads sequences so that their blocks follow one another, for a CPU's sake."""
        self.num_blocks = num_blocks
        self._prefers_runs = prefers_runs
        self._references = [0] * (num_blocks + 1)
        # one byte a block: found and counted at the speed of memory
        self._is_blank = bytearray(b"\x00" + b"\x01" * num_blocks)
        self._num_blank = num_blocks
        self._next = 1
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, CachedBlock] = {}
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
        return self._num_blank + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found, referenced or not."""
        return len(self._by_hash)

    def is_referenced(self, block: int) -> bool:
        """Whether anybody refers to a block."""
        return self._references[block] > 0

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Hand out `count` blocks, which must be free, with one reference each; the first follows `after` if it can."""
        assert count <= self.num_free, f"{count} blocks of {self.num_free} that are free"
        if (short := count - self._num_blank) > 0:
            self._evict(max(short, EVICTED_AT_ONCE) if self._prefers_runs else short)
        blocks = []
        for left in range(count, 0, -1):
            block = self._follow(after, left)
            self._is_blank[block] = 0
            self._num_blank -= 1
            self._references[block] = 1
            blocks.append(block)
            after = block
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Refer once more to blocks that hold a cached beginning."""
        for block in blocks:
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, given in the order of the text: its end is evicted before its beginning."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert self._references[block] > 0, f"block {block} is not referenced"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._content:
                    self._kept[block] = None
                else:
                    self._blank(block)

    def store(self, block: int, content: CachedBlock) -> None:
        """Note what a full block holds; of several blocks with the same content the first is found."""
        if block not in self._content and content.hash not in self._by_hash:
            self._content[block] = content
            self._by_hash[content.hash] = block

    def find(self, content: CachedBlock) -> int | None:
        """Find a block by its hash, its token ids and its parent compared."""
        block = self._by_hash.get(content.hash)
        return block if block is not None and self._content[block] == content else None

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unknown to the cache, since what they hold is not to be used again."""
        for block in blocks:
            if (content := self._content.pop(block, None)) is not None:
                del self._by_hash[content.hash]
                if block in self._kept:
                    del self._kept[block]
                    self._blank(block)

    def check(self, references: Mapping[int, int]) -> None:
        """Raise IntegrityError unless blocks have these references and every other one is blank or kept."""
        counted = {block: count for block, count in enumerate(self._references) if count}
        if counted != dict(references):
            wrong = sorted(set(counted.items()) ^ set(references.items()))[:4]
            raise IntegrityError(f"block_pool: references differ from the sequences' tables: {wrong}")
        blank = {block for block, is_blank in enumerate(self._is_blank) if is_blank}
        states = Counter([*counted, *blank, *self._kept])
        if sorted(states) != list(range(1, self.num_blocks + 1)) or states.total() != self.num_blocks:
            raise IntegrityError("block_pool: a block is in no state, or in two")
        if len(blank) != self._num_blank or not set(self._kept) <= set(self._content):
            raise IntegrityError("block_pool: blank or kept blocks are counted wrongly")
        if {content.hash: block for block, content in self._content.items()} != self._by_hash:
            raise IntegrityError("block_pool: the cache finds other blocks than it holds")

    def _blank(self, block: int) -> None:
        self._is_blank[block] = 1
        self._num_blank += 1

    def _evict(self, count: int) -> None:
        """Make up to `count` kept blocks blank, those used longest ago."""
        for _ in range(min(count, len(self._kept))):
            block, _ = self._kept.popitem(last=False)
            del self._by_hash[self._content.pop(block).hash]
            self._blank(block)

    def _follow(self, after: int | None, count: int) -> int:
        """Choose a blank block: the one behind `after`, or else where `count` of them fit."""
        if after is not None and after < self.num_blocks and self._is_blank[after + 1]:
            return after + 1
        if self._prefers_runs:
            return self._start_run(count)
        block = self._is_blank.find(1, self._next)
        block = self._is_blank.find(1) if block < 0 else block
        self._next = block + 1
        return block

    def _start_run(self, count: int) -> int:
        """Choose the middle of the widest gap, so that whoever ends in front of it can go on too."""
        start, end = self._widest_gap()
        for _ in range(count):
            if end - start >= count or not self._kept:
                break
            self._evict(1)
            start, end = self._widest_gap()
        is_behind_another = start > 1
        middle = start + (end - start) // 2 if is_behind_another else start
        return max(start, min(middle, end - count))

    def _widest_gap(self) -> tuple[int, int]:
        return max((match.span() for match in _BLANK_RUN.finditer(self._is_blank)), key=lambda gap: gap[1] - gap[0])
