"""Attention over the pool of keys and values, for a packed batch: registered with transformers as `NAME`.

transformers' model code passes `step_batch` through its keyword arguments down to here and holds no cache of its own.
Rows of a packed batch are the new tokens of several sequences, one after the other. Accumulation is SDPA's, fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from llm.errors import UnsupportedModel
from llm.kv_cache import KvCache

NAME = "media_server_packed"
_UNSUPPORTED = {"softcap": "soft-capped attention", "s_aux": "attention sinks"}


@dataclass(frozen=True)
class Segment:
    """The new tokens of one sequence: `length` rows from `start`; `past` tokens are in the pool from `offset` on."""

    start: int
    length: int
    offset: int
    past: int


@dataclass(frozen=True)
class StepBatch:
    """What attention must know of one step; masks are shared between layers."""

    segments: Sequence[Segment]
    kv_cache: KvCache
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    step_batch: StepBatch | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then let each sequence attend to its own past.

    Args:
        query: [1, H, N, D]; key, value: [1, Hkv, N, D], H a multiple of Hkv.
        attention_mask: unused, the segments say who sees what.

    Returns: [1, N, H, D].

    Raises:
        UnsupportedModel: the model asks for something that would be computed wrongly here.
    """
    assert step_batch is not None, "packed attention runs inside the engine only"
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__}: {what} ({name}) is not supported by this engine")
    keys, values = step_batch.kv_cache.layer(int(module.layer_idx), key[0], value[0])  # type: ignore[arg-type]
    num_kv_heads = key.shape[1]
    grouped = query[0].reshape(num_kv_heads, -1, query.shape[2], query.shape[3])
    outputs = []
    for segment in step_batch.segments:
        rows = slice(segment.start, segment.start + segment.length)
        length = segment.past + segment.length
        new = slice(segment.offset + segment.past, segment.offset + length)
        keys[:, new], values[:, new] = key[0, :, rows], value[0, :, rows]
        # a single new token needs no mask: with a window it sees a shorter slice
        first = 0 if sliding_window is None or segment.length > 1 else max(0, length - sliding_window)
        seen = slice(segment.offset + first, segment.offset + length)
        mask = None if segment.length == 1 else _mask(step_batch, segment, sliding_window, query)
        outputs.append(_attend(grouped[:, :, rows], keys[:, seen], values[:, seen], mask, scaling))
    # [Hkv, G, N, D] -> [1, N, H, D]
    return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1).unsqueeze(0), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attend, query [Hkv, G, n, D] to key and value [Hkv, T, D]; heads of a group share keys without a copy."""
    groups, length = query.shape[1:3]
    if length == 1:
        # the heads of a group are rows of one matrix: [Hkv, 1, G, D] to [Hkv, 1, T, D]
        return scaled_dot_product_attention(
            query.transpose(1, 2), key.unsqueeze(1), value.unsqueeze(1), scale=scaling
        ).transpose(1, 2)
    key = key.unsqueeze(1).expand(-1, groups, -1, -1)
    value = value.unsqueeze(1).expand(-1, groups, -1, -1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _mask(step_batch: StepBatch, segment: Segment, sliding_window: int | None, query: Tensor) -> Tensor:
    """Make the causal mask [length, past + length] of one segment, 0 or -inf, in the dtype of the query."""
    name = (segment.past, segment.length, sliding_window)
    if name not in step_batch.masks:
        columns = torch.arange(segment.past + segment.length, device=query.device)
        rows = columns[segment.past :, None]
        is_seen = columns <= rows
        if sliding_window is not None:
            is_seen &= columns > rows - sliding_window
        mask = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill_(~is_seen, float("-inf"))
        step_batch.masks[name] = mask
    return step_batch.masks[name]


AttentionInterface.register(NAME, packed_attention)
