"""Keys and values of all sequences: one pool of token places for each layer, in which a sequence owns an interval.

An interval is reserved whole on admission (prompt and longest answer), so a running sequence never lacks room and
attention reads its keys as one view, without a copy. Invariant: intervals are disjoint, inside the pool, and owned.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llm.errors import IntegrityError


class Interval(NamedTuple):
    """Places [start, end) of the pool."""

    start: int
    end: int


class KvCache:
    """The pool: `num_tokens` places, and who owns which."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._owned: dict[str, Interval] = {}

    @property
    def num_used_tokens(self) -> int:
        """Places that are owned."""
        return sum(interval.end - interval.start for interval in self._owned.values())

    @property
    def size_bytes(self) -> int:
        """Memory of the pool, as far as layers have been seen."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def reserve(self, owner: str, num_tokens: int) -> Interval | None:
        """Give `owner` the first gap of `num_tokens` places, or None if there is none at present."""
        assert owner not in self._owned, f"{owner} already owns an interval"
        start = 0
        for taken in sorted(self._owned.values()):
            if taken.start - start >= num_tokens:
                break
            start = taken.end
        if self.num_tokens - start < num_tokens:
            return None
        self._owned[owner] = Interval(start, start + num_tokens)
        return self._owned[owner]

    def free(self, owner: str) -> None:
        """Take back the interval of `owner`."""
        del self._owned[owner]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Give the pools of one layer, [H, num_tokens, D] each, made on first sight in the shape of key and value.

        Args:
            index: number of the layer.
            key: [H, N, D], any N.
            value: [H, N, D'], any N.
        """
        if index not in self._layers:
            self._layers[index] = (
                key.new_empty(key.shape[0], self.num_tokens, key.shape[2]),
                value.new_empty(value.shape[0], self.num_tokens, value.shape[2]),
            )
        return self._layers[index]

    @torch.inference_mode()
    def copy(self, source: Interval, target: Interval, num_tokens: int) -> None:
        """Copy the first `num_tokens` places of one interval to another, in every layer."""
        for layer in self._layers.values():
            for pool in layer:
                pool[:, target.start : target.start + num_tokens] = pool[:, source.start : source.start + num_tokens]

    def check(self, owners: set[str]) -> None:
        """Raise IntegrityError unless exactly `owners` own intervals, all disjoint and inside the pool."""
        if owners != set(self._owned):
            raise IntegrityError(f"kv_cache: owned by {sorted(self._owned)}, expected {sorted(owners)}")
        end = 0
        for interval in sorted(self._owned.values()):
            if not end <= interval.start < interval.end <= self.num_tokens:
                raise IntegrityError(f"kv_cache: {interval} overlaps its neighbour or leaves the pool")
            end = interval.end


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values for one token in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
