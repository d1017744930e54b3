"""Attention of each block of queries to its own list of key blocks, with the log-sum-exp.

The fine branch of VSA (arXiv 2505.13389) and the training-free top-k router, whose lists `block_selection` makes. Sums
accumulate in fp32, weights are rounded to the input type before they meet V.
A list's ids ascend, so that only its last one can be the ragged last block: the kernel masks nothing before it, unless
blocks have lengths of their own (tiles at the edge of a clip, `tile_order.tile_lengths`).
Gradients: `block_sparse_backward`'s kernels where Triton runs, elsewhere the reference's autograd.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention import LOG2_E
from kernels.block_sparse_backward import block_sparse_backward_triton
from kernels.block_sparse_torch import BLOCK_SIZES as BLOCK_SIZES
from kernels.block_sparse_torch import block_sparse_attention_reference as block_sparse_attention_reference
from kernels.block_sparse_torch import block_sparse_attention_torch, check_lists, validate_block_sparse
from kernels.descriptors import can_describe, describe
from kernels.dispatch import can_run_triton, capability, refuse_gradients, require, takes_gradients, tl, triton
from kernels.shipped_configs import card_family, shipped_config


@dataclass(frozen=True)
class BlockSparseConfig:
    """Hold one way to launch: key tokens a step (at most the key block), warps, stages, loads by descriptor (TMA)."""

    block_n: int
    num_warps: int
    num_stages: int
    use_tma: bool
    max_registers: int | None = None


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    block_q: int = 128,
    block_k: int = 128,
    key_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    check_blocks: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each query block to the key blocks of its list.

    q: `[B, H, Nq, D]`, k and v: `[B, H, Nk, D]` fp16, bf16 or fp32, D of HEAD_DIMS.
    block_indices: `[B, H, ceil(Nq / block_q), K]` int32, ascending in the first count entries, the rest ignored.
    block_counts: `[B, H, ceil(Nq / block_q)]` int32 in 0..K.
    block_q, block_k: 64 or 128 tokens. key_lengths: `[ceil(Nk / block_k)]` int32, how many tokens of each key block are
    real, in 0..block_k; the rest is not seen but must be finite. None: all of them.
    check_blocks: read lists and lengths on the host and refuse bad ones; None: on CPU only.
    Returns the output like q and the log-sum-exp `[B, H, Nq]` fp32; an empty list gives zeros and -inf.
    Raises ValueError for shapes, types, devices, or lists (with check_blocks) that do not fit.
    """
    scale = validate_block_sparse(q, k, v, block_indices, block_counts, block_q, block_k, key_lengths, scale)
    if q.device.type == "cpu" if check_blocks is None else check_blocks:
        check_lists(block_indices, block_counts, triton.cdiv(k.shape[2], block_k))
        bad = None if key_lengths is None else key_lengths[(key_lengths < 0) | (key_lengths > block_k)]
        require(bad is None or bad.numel() == 0, "block_sparse_attention", f"key_lengths must be in 0..{block_k}",
                None if bad is None else bad[:4].tolist())
    inputs = (q, k, v, block_indices, block_counts, key_lengths)
    if can_run_triton(q.device):
        return block_sparse_attention_triton_autograd(*inputs, block_q, block_k, scale)
    attend = block_sparse_attention_reference if takes_gradients(q, k, v) else block_sparse_attention_torch
    return attend(*inputs[:5], block_q=block_q, block_k=block_k, scale=scale, key_lengths=key_lengths)


@triton.jit
def _attend_block(
    acc, row_sum, row_max, q_tile, k, v, batch, head, row_k, row_v, stride_kn, stride_vn, offs_d, n, end, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, USE_TMA: tl.constexpr,
):
    offs = n + tl.arange(0, BLOCK_N)
    is_key = (offs[:, None] < end) & (offs_d[None, :] < HEAD_DIM)
    if USE_TMA:
        k_tile = k.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        rows = k + row_k + offs[:, None].to(tl.int64) * stride_kn + offs_d[None, :]
        k_tile = tl.load(rows, mask=is_key, other=0.0) if MASKED or HEAD_DIM != BLOCK_D else tl.load(rows)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if MASKED:
        scores = tl.where((offs < end)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # a block may have no key at all
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    if USE_TMA:
        v_tile = v.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        rows = v + row_v + offs[:, None].to(tl.int64) * stride_vn + offs_d[None, :]
        v_tile = tl.load(rows, mask=is_key, other=0.0) if MASKED or HEAD_DIM != BLOCK_D else tl.load(rows)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit
def _block_sparse_kernel(
    q, k, v, out, lse, block_indices, block_counts, key_lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch,
    num_heads, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LENGTHS: tl.constexpr, USE_TMA: tl.constexpr,
):
    tile = tl.program_id(0)
    batch = tl.program_id(1) // num_heads
    head = tl.program_id(1) % num_heads
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = (offs_m < n_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    row_k = batch64 * stride_kb + head64 * stride_kh
    row_v = batch64 * stride_vb + head64 * stride_vh
    ids = block_indices + batch64 * stride_ib + head64 * stride_ih + tile.to(tl.int64) * stride_iq
    count = tl.load(block_counts + batch64 * stride_cb + head64 * stride_ch + tile)
    if USE_TMA:
        q_tile = q.load([batch, head, tile * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        row_q = batch64 * stride_qb + head64 * stride_qh
        q_tile = tl.load(q + row_q + offs_m[:, None].to(tl.int64) * stride_qn + offs_d[None, :], mask=is_row, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK_K // BLOCK_N
    # whole blocks need no mask: all but the last of a list, or none where each block has its own length
    unmasked = 0 if HAS_LENGTHS else tl.maximum(count - 1, 0) * STEPS
    for i in tl.range(0, unmasked):
        n = tl.load(ids + i // STEPS) * BLOCK_K + i % STEPS * BLOCK_N
        acc, row_sum, row_max = _attend_block(
            acc, row_sum, row_max, q_tile, k, v, batch, head, row_k, row_v, stride_kn, stride_vn, offs_d, n, n_k,
            scale_log2, HEAD_DIM, BLOCK_D, BLOCK_N, False, USE_TMA)
    for i in tl.range(unmasked, count * STEPS):
        block = tl.load(ids + i // STEPS)
        n = block * BLOCK_K + i % STEPS * BLOCK_N
        end = n_k
        if HAS_LENGTHS:
            end = tl.minimum(block * BLOCK_K + tl.load(key_lengths + block), n_k)
        acc, row_sum, row_max = _attend_block(
            acc, row_sum, row_max, q_tile, k, v, batch, head, row_k, row_v, stride_kn, stride_vn, offs_d, n, end,
            scale_log2, HEAD_DIM, BLOCK_D, BLOCK_N, True, USE_TMA)
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    row_lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(safe_sum)) * 0.6931471805599453)
    row_o = batch64 * stride_ob + head64 * stride_oh
    tl.store(out + row_o + offs_m[:, None].to(tl.int64) * stride_on + offs_d[None, :], acc.to(out.dtype.element_ty),
             mask=is_row)
    tl.store(lse + batch64 * stride_lb + head64 * stride_lh + offs_m, row_lse, mask=offs_m < n_q)


def default_config(
    q: torch.Tensor, block_q: int, block_k: int, sm: tuple[int, int] | None = None
) -> BlockSparseConfig:
    """Return the launch of q's type, head dim and blocks on a card of compute capability sm (q's own), as shipped."""
    if q.dtype == torch.float32:
        return BlockSparseConfig(32, 4, 2, False)
    shape = {"d": q.shape[-1], "block_q": block_q, "block_k": block_k}
    # fp16 takes the launches of bf16
    row = shipped_config("block_sparse_attention", card_family(sm or capability(q.device) or (0, 0)), shape, "bf16")
    if row is None:
        return BlockSparseConfig(64, 8 if block_q == 128 else 4, 2, False)
    return BlockSparseConfig(**row.config)


def block_sparse_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    block_q: int,
    block_k: int,
    scale: float,
    key_lengths: torch.Tensor | None = None,
    config: BlockSparseConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated tensors; shapes as in `block_sparse_attention`."""
    refuse_gradients("block_sparse_attention", q, k, v)
    batch, num_heads, n_q, head_dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    config = config or default_config(q, block_q, block_k)
    block_d = triton.next_power_of_2(head_dim)
    use_tma = config.use_tma and k.shape[2] > 0 and all(can_describe(x) for x in (q, k, v))
    loads: tuple[object, ...] = (q, k, v)
    if use_tma:
        rows = (block_q, config.block_n, config.block_n)
        loads = tuple(describe(x, n, block_d) for x, n in zip((q, k, v), rows, strict=True))
    _block_sparse_kernel[(triton.cdiv(n_q, block_q), batch * num_heads)](
        *loads, out, lse, block_indices, block_counts, block_counts if key_lengths is None else key_lengths,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], lse.stride(0), lse.stride(1),
        *block_indices.stride()[:3], *block_counts.stride()[:2], num_heads, n_q, k.shape[2], scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_q, BLOCK_K=block_k, BLOCK_N=config.block_n,
        HAS_LENGTHS=key_lengths is not None, USE_TMA=use_tma, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.max_registers)
    return out, lse


class _BlockSparseAttention(torch.autograd.Function):
    """Both directions by Triton, gradients of the log-sum-exp among them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, block_indices, block_counts, key_lengths, block_q, block_k, scale = inputs
        out, lse = block_sparse_attention_triton(q, k, v, block_indices, block_counts, block_q=block_q, block_k=block_k,
                                                 scale=scale, key_lengths=key_lengths)
        ctx.save_for_backward(q, k, v, out, lse, block_indices, block_counts, key_lengths)
        ctx.sizes = block_q, block_k, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        block_q, block_k, scale = ctx.sizes
        q, k, v, out, lse, block_indices, block_counts, key_lengths = ctx.saved_tensors
        dq, dk, dv = block_sparse_backward_triton(
            q, k, v, out, lse, gradients[0], gradients[1], block_indices, block_counts, block_q=block_q,
            block_k=block_k, scale=scale, key_lengths=key_lengths)
        return dq, dk, dv, *[None] * 6


def block_sparse_attention_triton_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    key_lengths: torch.Tensor | None,
    block_q: int,
    block_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel as a node of the autograd graph, whose backward are the kernels of `block_sparse_backward`."""
    out, lse = _BlockSparseAttention.apply(q, k, v, block_indices, block_counts, key_lengths, block_q, block_k, scale)
    return out, lse
