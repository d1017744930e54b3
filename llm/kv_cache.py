"""Keys and values of all sequences in paged blocks: one pool for each group of layers that forget alike.

Layers without a window keep the whole text; layers with one need its end alone, and give back blocks that no later
token sees. Each group has its blocks, each sequence a table of them a group; a beginning that the cache knows is
shared. Invariant: every block of a pool is blank, kept for its content, or in the tables of as many sequences as refer
to it (`check`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.paged_torch import KEY_DIMS, VALUE_DIMS
from llm.block_pool import NULL_BLOCK, BlockPool
from llm.errors import IntegrityError, UnsupportedModel
from llm.prefix_cache import CachedBlock

# tokens a block: small ones share more of a beginning
BLOCK_SIZE = 16


class Traffic(NamedTuple):
    """What runs at once at most: sequences, and tokens of one step."""

    max_sequences: int
    max_step_tokens: int


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores for a token: `num_kv_heads` keys and values; no values of their own where one latent is
    both (MLA), of which `value_dim` columns are the value. `window`: how many last tokens it sees, None for all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        """Raise UnsupportedModel for widths that attention over blocks does not take."""
        if self.key_dim > max(KEY_DIMS) or self.value_dim > max(VALUE_DIMS):
            raise UnsupportedModel(
                f"keys of {self.key_dim} and values of {self.value_dim} columns are wider than the "
                f"{max(KEY_DIMS)} and {max(VALUE_DIMS)} that paged attention takes"
            )

    @property
    def stored_key_dim(self) -> int:
        """Columns of a stored key: a width that the kernels take, the rest zeros."""
        least = max(self.key_dim, self.stored_value_dim if self.is_latent else 0)
        return min(width for width in KEY_DIMS if width >= least)

    @property
    def stored_value_dim(self) -> int:
        """Columns of a stored value."""
        return min(width for width in VALUE_DIMS if width >= self.value_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory of one token in this layer."""
        columns = self.stored_key_dim + (0 if self.is_latent else self.stored_value_dim)
        return self.num_kv_heads * columns * dtype.itemsize


def group_blocks(window: int | None, num_blocks: int, block_size: int, traffic: Traffic | None) -> int:
    """Say how many blocks layers with this window get where those that see everything get `num_blocks`.

    A sequence holds its window, cut by blocks at both ends; the tokens of one step come on top, in blocks begun by each
    sequence. As much again is left for beginnings that are kept.
    """
    if window is None or traffic is None:
        return num_blocks
    held = traffic.max_sequences * (-(-window // block_size) + 2) + -(-traffic.max_step_tokens // block_size)
    return min(num_blocks, 2 * held)


def cache_bytes(
    layers: Sequence[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, traffic: Traffic | None
) -> int:
    """Say what a cache takes, the block that is never handed out included."""
    return sum(
        (group_blocks(spec.window, num_blocks, block_size, traffic) + 1) * block_size * spec.bytes_per_token(dtype)
        for spec in layers
    )


@dataclass
class LayerGroup:
    """The layers that have one window, and their blocks."""

    window: int | None
    layers: tuple[int, ...]
    pool: BlockPool


@dataclass
class SequenceBlocks:
    """The tables of one sequence, one a group: NULL_BLOCK where a block has been given back."""

    tables: list[list[int]]
    # blocks at the beginning of each table that were given back
    num_passed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixHit:
    """The cached beginning of a sequence: `num_tokens`, and the blocks of each group that hold what is seen of it."""

    num_tokens: int
    tables: list[list[int]]


class KvCache:
    """The blocks of all layer groups, and who owns which."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_size: int = BLOCK_SIZE,
        traffic: Traffic | None = None,
    ) -> None:
        """Make the pools.

        Args:
            layers: one spec a layer.
            num_tokens: token places of a group without a window, rounded down to whole blocks, at least one block.
            traffic: what a group with a window is sized for, at most `num_tokens` places; None: as many.
        """
        device = torch.device(device)
        self.block_size = block_size
        self.specs = tuple(layers)
        num_blocks = max(1, num_tokens // block_size)
        windows = sorted({spec.window for spec in layers}, key=lambda window: (window is not None, window or 0))
        self.groups = [
            LayerGroup(
                window,
                tuple(layer for layer, spec in enumerate(layers) if spec.window == window),
                # a CPU reads blocks that follow one another without a copy
                BlockPool(group_blocks(window, num_blocks, block_size, traffic), prefers_runs=device.type == "cpu"),
            )
            for window in windows
        ]
        self.group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self._layers = [
            self._make_layer(spec, self.groups[self.group_of[layer]].pool.num_blocks, dtype, device)
            for layer, spec in enumerate(layers)
        ]
        # [P, page, Hkv, D] -> [Hkv, P * page, D]
        self._by_head = [
            (keys.permute(2, 0, 1, 3).flatten(1, 2), values.permute(2, 0, 1, 3).flatten(1, 2))
            for keys, values in self._layers
        ]
        self._owned: dict[str, SequenceBlocks] = {}

    @property
    def num_tokens(self) -> int:
        """Token places of the largest group."""
        return max(group.pool.num_blocks for group in self.groups) * self.block_size

    @property
    def num_used_tokens(self) -> int:
        """Token places of the fullest group that belong to a sequence."""
        return max(group.pool.num_used for group in self.groups) * self.block_size

    @property
    def size_bytes(self) -> int:
        """Memory of all layers."""
        storages = (tensor.untyped_storage() for layer in self._layers for tensor in layer)
        # values of latents are columns of the keys
        return sum({int(storage.data_ptr()): int(storage.nbytes()) for storage in storages}.values())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Give keys [P, page, Hkv, D] and values [P, page, Hkv, D'] of a layer; of latents the values are columns."""
        return self._layers[index]

    def layer_by_head(self, index: int) -> tuple[Tensor, Tensor]:
        """Give the same keys and values as [Hkv, P * page, D] and [Hkv, P * page, D']."""
        return self._by_head[index]

    def can_hold_one(self, num_tokens: int, step_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits if it is alone, computed in steps of at most `step_tokens`."""
        return all(self._num_held(group, num_tokens, step_tokens) <= group.pool.num_blocks for group in self.groups)

    def match(self, chain: Sequence[CachedBlock], num_tokens: int) -> PrefixHit:
        """Find the longest cached beginning of a sequence of `num_tokens` tokens, its last one left out."""
        longest = min(len(chain), (num_tokens - 1) // self.block_size)
        found: list[list[int]] = []
        is_usable = [True] * (longest + 1)
        for group in self.groups:
            blocks: list[int] = []
            run = 0
            for length in range(1, longest + 1):
                block = group.pool.find(chain[length - 1])
                if block is None and group.window is None:
                    # nothing behind it is of use
                    is_usable[length:] = [False] * (longest + 1 - length)
                    break
                blocks.append(NULL_BLOCK if block is None else block)
                run = 0 if block is None else run + 1
                is_usable[length] = is_usable[length] and run >= length - self._first_seen(group, length)
            found.append(blocks)
        best = max(length for length in range(longest + 1) if is_usable[length])
        tables = [
            [NULL_BLOCK] * self._first_seen(group, best) + blocks[self._first_seen(group, best) : best]
            for group, blocks in zip(self.groups, found, strict=True)
        ]
        return PrefixHit(best * self.block_size, tables)

    def can_begin(self, hit: PrefixHit, num_tokens: int, step_tokens: int, spare_blocks: int) -> bool:
        """Whether a sequence of `num_tokens` known tokens finds room now, `spare_blocks` left over in each group."""
        for group, table in zip(self.groups, hit.tables, strict=True):
            shared = [block for block in table if block != NULL_BLOCK]
            # a kept block that is shared is no longer free
            num_kept = sum(not group.pool.is_referenced(block) for block in shared)
            needed = self._num_held(group, num_tokens, step_tokens) - len(shared)
            if max(needed, 0) + num_kept + spare_blocks > group.pool.num_free:
                return False
        return True

    def begin(self, owner: str, hit: PrefixHit) -> SequenceBlocks:
        """Give `owner` the shared blocks of a hit."""
        assert owner not in self._owned, f"{owner} already owns blocks"
        for group, table in zip(self.groups, hit.tables, strict=True):
            group.pool.share(block for block in table if block != NULL_BLOCK)
        tables = [list(table) for table in hit.tables]
        passed = [sum(block == NULL_BLOCK for block in table) for table in tables]
        self._owned[owner] = SequenceBlocks(tables, passed)
        return self._owned[owner]

    def begin_with(self, owner: str, num_passed: Sequence[int], num_tokens: int) -> SequenceBlocks:
        """Give `owner` blocks of its own for `num_tokens` tokens but those passed; there must be room (`can_begin`)."""
        assert owner not in self._owned, f"{owner} already owns blocks"
        wanted = -(-num_tokens // self.block_size)
        tables = [
            [*[NULL_BLOCK] * passed, *group.pool.allocate(wanted - passed)]
            for group, passed in zip(self.groups, num_passed, strict=True)
        ]
        self._owned[owner] = SequenceBlocks(tables, list(num_passed))
        return self._owned[owner]

    def grow(self, blocks: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Give back what tokens from `num_computed` on do not see, and make room up to `num_tokens`; False: no room.

        On False nothing was taken.
        """
        wanted = -(-num_tokens // self.block_size)
        for index, group in enumerate(self.groups):
            if group.window is not None:
                self._pass(group, blocks, index, num_computed)
        missing = [max(0, wanted - len(table)) for table in blocks.tables]
        if any(count > group.pool.num_free for count, group in zip(missing, self.groups, strict=True)):
            return False
        for count, group, table in zip(missing, self.groups, blocks.tables, strict=True):
            if count:
                table.extend(group.pool.allocate(count, table[-1] if table and table[-1] != NULL_BLOCK else None))
        return True

    def store(self, blocks: SequenceBlocks, chain: Sequence[CachedBlock], num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens known to the cache."""
        for group, table, passed in zip(self.groups, blocks.tables, blocks.num_passed, strict=True):
            for index in range(passed, min(len(chain), num_computed // self.block_size)):
                group.pool.store(table[index], chain[index])

    def free(self, owner: str, *, is_sound: bool = True) -> None:
        """Take back the blocks of `owner`; those that are not sound are not kept for others."""
        blocks = self._owned.pop(owner)
        for group, table in zip(self.groups, blocks.tables, strict=True):
            if not is_sound:
                group.pool.forget(table)
            group.pool.release(table)

    def check(self, owners: set[str]) -> None:
        """Raise IntegrityError unless exactly `owners` own blocks and every block of every group is accounted for."""
        if owners != set(self._owned):
            raise IntegrityError(f"kv_cache: owned by {sorted(self._owned)}, expected {sorted(owners)}")
        for index, group in enumerate(self.groups):
            tables = [blocks.tables[index] for blocks in self._owned.values()]
            group.pool.check(Counter(block for table in tables for block in table if block != NULL_BLOCK))

    def _first_seen(self, group: LayerGroup, num_blocks: int) -> int:
        """The first block that the token behind `num_blocks` blocks sees, or would have to compute."""
        if group.window is None:
            return 0
        return min(num_blocks, max(0, num_blocks * self.block_size + 1 - group.window) // self.block_size)

    def _num_held(self, group: LayerGroup, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence holds at most at once."""
        whole = -(-num_tokens // self.block_size)
        if group.window is None:
            return whole
        return min(whole, -(-(group.window + step_tokens) // self.block_size) + 1)

    def _pass(self, group: LayerGroup, blocks: SequenceBlocks, index: int, num_computed: int) -> None:
        assert group.window is not None
        table, passed = blocks.tables[index], blocks.num_passed[index]
        until = min(len(table), max(0, num_computed + 1 - group.window) // self.block_size)
        if until > passed:
            group.pool.release(table[passed:until])
            table[passed:until] = [NULL_BLOCK] * (until - passed)
            blocks.num_passed[index] = until

    def _make_layer(
        self, spec: LayerSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Allocate a layer: one head's blocks lie one behind the other, so that a run of blocks is a plain matrix."""

        def make(columns: int) -> Tensor:
            shape = (spec.num_kv_heads, num_blocks + 1, self.block_size, columns)
            return torch.zeros(shape, dtype=dtype, device=device).permute(1, 2, 0, 3)

        keys = make(spec.stored_key_dim)
        return keys, keys[..., : spec.stored_value_dim] if spec.is_latent else make(spec.stored_value_dim)
