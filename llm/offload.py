"""Keys and values of preempted sequences in CPU memory, where fetching them back costs less than computing them.

That is so where blocks lie on a GPU; on a CPU a preempted sequence is computed anew. Copies are queued behind the work
of the device and waited for by nobody: what writes to the blocks next, or reads the copy, is queued behind them.
Invariant: only waiting sequences have a copy; when idle there is none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llm.errors import IntegrityError
from llm.kv_cache import KvCache, SequenceBlocks


@dataclass(frozen=True)
class Offloaded:
    """The first `num_tokens` tokens of a sequence: each layer's blocks, [n, page, Hkv, D], but those passed."""

    num_tokens: int
    num_passed: list[int]
    layers: list[tuple[Tensor, ...]]

    @property
    def size_bytes(self) -> int:
        """Memory of the copy."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


class OffloadStore:
    """Copies of at most `max_bytes` in all."""

    def __init__(self, kv_cache: KvCache, max_bytes: int) -> None:
        self.kv_cache = kv_cache
        self.max_bytes = max_bytes
        self.num_saved = 0
        self.num_restored = 0
        self._copies: dict[str, Offloaded] = {}

    @property
    def used_bytes(self) -> int:
        """Memory of all copies."""
        return sum(copy.size_bytes for copy in self._copies.values())

    def get(self, owner: str) -> Offloaded | None:
        """Find a sequence's copy."""
        return self._copies.get(owner)

    def save(self, owner: str, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Copy what a sequence's first `num_tokens` tokens have in its blocks; False if there is no room for it."""
        assert owner not in self._copies, f"{owner} has a copy already"
        end = -(-num_tokens // self.kv_cache.block_size)
        held = [table[passed:end] for table, passed in zip(blocks.tables, blocks.num_passed, strict=True)]
        if not num_tokens or self.used_bytes + self._size(held) > self.max_bytes:
            return False
        copies = []
        indices = self._indices(held)
        for layer, group in sorted(self.kv_cache.group_of.items()):
            copies.append(tuple(_to_host(tensor[indices[group]]) for tensor in self._tensors(layer)))
        self._copies[owner] = Offloaded(num_tokens, list(blocks.num_passed), copies)
        self.num_saved += 1
        return True

    def restore(self, owner: str, blocks: SequenceBlocks) -> None:
        """Copy a sequence's tokens into its new blocks, and forget the copy."""
        copy = self._copies.pop(owner)
        end = -(-copy.num_tokens // self.kv_cache.block_size)
        held = [table[passed:end] for table, passed in zip(blocks.tables, copy.num_passed, strict=True)]
        indices = self._indices(held)
        for layer, group in self.kv_cache.group_of.items():
            for tensor, saved in zip(self._tensors(layer), copy.layers[layer], strict=True):
                tensor[indices[group]] = saved.to(tensor.device, non_blocking=True)
        self.num_restored += 1

    def drop(self, owner: str) -> None:
        """Forget a sequence's copy, if it has one."""
        self._copies.pop(owner, None)

    def check(self, owners: set[str]) -> None:
        """Raise IntegrityError unless all copies belong to these sequences."""
        if strangers := self._copies.keys() - owners:
            raise IntegrityError(f"offload: copies of {sorted(strangers)}, which do not wait")

    def _tensors(self, layer: int) -> tuple[Tensor, ...]:
        keys, values = self.kv_cache.layer(layer)
        # values of latents are columns of the keys
        return (keys,) if self.kv_cache.specs[layer].is_latent else (keys, values)

    def _indices(self, held: list[list[int]]) -> list[Tensor]:
        device = self.kv_cache.layer(0)[0].device
        return [torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in held]

    def _size(self, held: list[list[int]]) -> int:
        cache = self.kv_cache
        return sum(
            len(held[group]) * cache.block_size * cache.specs[layer].bytes_per_token(cache.layer(layer)[0].dtype)
            for layer, group in cache.group_of.items()
        )


def _to_host(x: Tensor) -> Tensor:
    """Copy to the host without waiting for it."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
