"""Attention over paged keys and values, for a packed batch: registered with transformers as `NAME`.

transformers' model code passes `step_batch` through its keyword arguments down to here and holds no cache of its own.
Rows of a packed batch are the new tokens of several sequences, one after the other. New keys and values are stored
first, then `kernels.paged_attention` reads them with all that came before. On a CPU a step is planned once for all
layers (`kernels.paged_attention_plan`): what sequences and pages there are is then known on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.kv_store import kv_store, kv_store_reference
from kernels.paged_attention import paged_attention
from kernels.paged_attention_plan import PagedPlan
from kernels.paged_torch import paged_attention_reference
from llm.errors import UnsupportedModel
from llm.kv_cache import KvCache, LayerSpec

NAME = "media_server_paged"


@dataclass(frozen=True)
class GroupBatch:
    """Where one layer group's tokens of a step are: block_table [B, max blocks] int32, slot_mapping [N] int64."""

    block_table: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True)
class StepBatch:
    """What attention must know of one step.

    context_lens: [B] int32 tokens of each sequence, the new ones included. cu_seqlens_q: [B + 1] int32 where the new
    tokens of each begin; None: one each. is_invariant: what a row gets must not depend on the others. is_reference:
    attend in plain torch, by no kernel.
    """

    kv_cache: KvCache
    groups: Sequence[GroupBatch]
    context_lens: Tensor
    cu_seqlens_q: Tensor | None
    is_invariant: bool = False
    is_reference: bool = False


@dataclass(frozen=True)
class PlannedStep:
    """The same on a CPU: a plan a layer group."""

    kv_cache: KvCache
    plans: Sequence[PagedPlan]


Step = StepBatch | PlannedStep


@dataclass(frozen=True)
class Probe:
    """Takes a StepBatch's place to learn, from one token, what each layer stores."""

    specs: dict[int, LayerSpec] = field(default_factory=dict)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    step_batch: Step | Probe | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then let each sequence attend to its own past.

    Args:
        query: [1, H, N, D]; key: [1, Hkv, N, D]; value: [1, Hkv, N, D'], H a multiple of Hkv.
        attention_mask: unused, the step says who sees what.
        s_aux: [H] logits of attention sinks.

    Returns: [1, N, H, D'].

    Raises:
        UnsupportedModel: the model asks for something that would be computed wrongly here.
    """
    assert step_batch is not None, "packed attention runs inside the engine only"
    layer = layer_index(module)
    if isinstance(step_batch, Probe):
        if position_bias is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise UnsupportedModel(
                f"{type(module).__name__}: attention with a bias or to later tokens is not supported"
            )
        step_batch.specs[layer] = LayerSpec(key.shape[1], key.shape[3], value.shape[3], sliding_window)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    # [1, H, N, D] -> [N, H, D]
    output = attend(
        step_batch,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sinks=None if s_aux is None else s_aux.float(),
        soft_cap=softcap,
    )
    return output.unsqueeze(0), None


def attend(
    step_batch: Step,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Store keys and values of a step and attend from its queries.

    Args:
        query: [N, H, D]; key: [N, Hkv, D]; value: [N, Hkv, D'], or None where the layer stores latents.
        sinks: [H] fp32.

    Returns: [N, H, D'].
    """
    cache = step_batch.kv_cache
    spec = cache.specs[layer]
    keys, values = (cache.layer_by_head if isinstance(step_batch, PlannedStep) else cache.layer)(layer)
    # widths that the kernels take: zeros change no score, and columns that nobody asked for are cut off again
    query, key = _widen(query, keys.shape[-1]), _widen(key, keys.shape[-1])
    value = None if value is None else _widen(value, values.shape[-1])
    stored_values = None if value is None else values
    if isinstance(step_batch, PlannedStep):
        step = step_batch.plans[cache.group_of[layer]]
        step.store(key, value, keys, stored_values)
        output = step.attend(query, keys, values, scale=scale, sinks=sinks, soft_cap=soft_cap)
    elif step_batch.is_reference:
        group = step_batch.groups[cache.group_of[layer]]
        kv_store_reference(key, value, keys, stored_values, group.slot_mapping)
        output = paged_attention_reference(
            query,
            keys,
            values,
            group.block_table,
            step_batch.context_lens,
            cu_seqlens_q=step_batch.cu_seqlens_q,
            sinks=sinks,
            scale=scale,
            window=spec.window,
            soft_cap=soft_cap,
        )
    else:
        group = step_batch.groups[cache.group_of[layer]]
        kv_store(key, value, keys, stored_values, group.slot_mapping)
        output = paged_attention(
            query,
            keys,
            values,
            group.block_table,
            step_batch.context_lens,
            cu_seqlens_q=step_batch.cu_seqlens_q,
            sinks=sinks,
            scale=scale,
            window=spec.window,
            soft_cap=soft_cap,
            invariant=step_batch.is_invariant,
            # tables are the scheduler's own, checked when it is idle; reading them costs more than it is worth a layer
            check_blocks=False,
        )
    return output if spec.value_dim == output.shape[2] else output[..., : spec.value_dim]


def layer_index(module: Any) -> int:
    """Number of the layer that an attention module belongs to."""
    return int(module.layer_idx)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def plan(
    kv_cache: KvCache,
    tables: Sequence[Sequence[Sequence[int]]],
    starts: Sequence[int],
    lengths: Sequence[int],
    num_padding: int = 0,
    *,
    is_by_row: bool = False,
) -> PlannedStep:
    """Plan a step of B sequences for a CPU.

    Args:
        tables: of each sequence its tables, one a layer group.
        starts: tokens of each that came before; lengths: new tokens of each.
        num_padding: rows behind them that are nobody's.
        is_by_row: let no row's bits depend on the rows beside it.
    """
    plans = [
        PagedPlan(
            [table[index] for table in tables],
            starts,
            lengths,
            page=kv_cache.block_size,
            # block 0 is there too
            num_pages=group.pool.num_blocks + 1,
            window=group.window,
            num_padding=num_padding,
            is_by_row=is_by_row,
        )
        for index, group in enumerate(kv_cache.groups)
    ]
    return PlannedStep(kv_cache, plans)


def pack(
    kv_cache: KvCache,
    tables: Sequence[Sequence[Sequence[int]]],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    *,
    num_padding: int = 0,
    is_invariant: bool = False,
    is_reference: bool = False,
) -> StepBatch:
    """Describe a step of B sequences for a device, arguments as `plan` takes them."""
    size = kv_cache.block_size
    groups = []
    for group in range(len(kv_cache.groups)):
        rows = [table[group] for table in tables]
        longest = max(len(row) for row in rows)
        slots = [
            row[position // size] * size + position % size
            for row, start, length in zip(rows, starts, lengths, strict=True)
            for position in range(start, start + length)
        ]
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        if num_padding:
            # a sequence without a text: it stores nothing and gets zeros
            slots += [-1] * num_padding
            padded.append([0] * longest)
        groups.append(
            GroupBatch(
                torch.tensor(padded, dtype=torch.int32, device=device),
                torch.tensor(slots, dtype=torch.int64, device=device),
            )
        )
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = list(lengths)
    if num_padding:
        contexts.append(0)
        counts.append(num_padding)
    begins = None
    # in invariant mode the launch is always the same
    if is_invariant or any(count != 1 for count in counts):
        begins = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    return StepBatch(kv_cache, groups, context_lens, begins, is_invariant, is_reference)


AttentionInterface.register(NAME, packed_attention)
