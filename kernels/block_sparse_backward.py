"""Gradients of block-sparse attention: two kernels without atomics, so that repeats are equal bit for bit.

After FlashAttention-2 (arXiv 2307.08691): with P = exp(S - lse) and delta = rowsum(dO ∘ O) - dlse,
dS = P ∘ (dO Vᵀ - delta), dQ = scale · dS K, dK = scale · dSᵀ Q, dV = Pᵀ dO. One kernel owns a tile of queries and
walks its list, one owns a tile of keys and walks the query blocks that list it. Sums accumulate in fp32; P and dS are
rounded to the input type before they meet a product.
"""

from dataclasses import dataclass

import torch

from kernels.attention import LOG2_E
from kernels.dispatch import capability, tl, triton


@dataclass(frozen=True)
class BackwardConfig:
    """Hold one way to launch either kernel: query and key tokens a tile (divisors of the blocks), warps, stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _query_gradient_kernel(
    q, k, v, grad_out, lse_log2, delta, grad_q, block_indices, block_counts, key_lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, num_heads, n_q, n_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):
    tile = tl.program_id(0)
    row_block = (tile // (BLOCK_Q // BLOCK_M)).to(tl.int64)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = offs_m < n_q
    is_channel = (offs_d < HEAD_DIM)[None, :]
    mask_q = is_row[:, None] & is_channel
    rows = batch_head * n_q + offs_m
    q_tile = tl.load(q + batch * stride_qb + head * stride_qh + offs_m[:, None].to(tl.int64) * stride_qn
                     + offs_d[None, :], mask=mask_q, other=0.0)
    do_tile = tl.load(grad_out + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=mask_q, other=0.0)
    row_lse = tl.load(lse_log2 + rows, mask=is_row, other=float("inf"))
    row_delta = tl.load(delta + rows, mask=is_row, other=0.0)
    k_head = k + batch * stride_kb + head * stride_kh
    v_head = v + batch * stride_vb + head * stride_vh
    ids = block_indices + batch * stride_ib + head * stride_ih + row_block * stride_iq
    count = tl.load(block_counts + batch * stride_cb + head * stride_ch + row_block)
    scale_log2 = scale * 1.4426950408889634
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK_K // BLOCK_N  # of a key block
    for i in tl.range(0, count * STEPS):
        block = tl.load(ids + i // STEPS)
        offs_n = block * BLOCK_K + i % STEPS * BLOCK_N + tl.arange(0, BLOCK_N)
        end = n_k
        if HAS_LENGTHS:
            end = tl.minimum(block * BLOCK_K + tl.load(key_lengths + block), n_k)
        is_key = offs_n < end
        mask_k = is_key[:, None] & is_channel
        offs_k = offs_n[:, None].to(tl.int64)
        k_tile = tl.load(k_head + offs_k * stride_kn + offs_d[None, :], mask=mask_k, other=0.0)
        v_tile = tl.load(v_head + offs_k * stride_vn + offs_d[None, :], mask=mask_k, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        weights = tl.where(is_key[None, :], tl.math.exp2(scores - row_lse[:, None]), 0.0)
        grad_weights = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[:, None])
        acc = tl.dot(grad_scores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    tl.store(grad_q + rows[:, None] * HEAD_DIM + offs_d[None, :], (acc * scale).to(grad_q.dtype.element_ty),
             mask=mask_q)


@triton.jit
def _key_gradient_kernel(
    q, k, v, grad_out, lse_log2, delta, grad_k, grad_v, query_blocks, query_counts, key_lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    num_heads, n_q, n_k, num_query_blocks, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):
    tile = tl.program_id(0)
    key_block = tile // (BLOCK_K // BLOCK_N)
    num_key_blocks = tl.cdiv(n_k, BLOCK_K)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    end = n_k
    if HAS_LENGTHS:
        end = tl.minimum(key_block * BLOCK_K + tl.load(key_lengths + key_block), n_k)
    is_key = offs_n < end
    is_channel = (offs_d < HEAD_DIM)[None, :]
    mask_k = is_key[:, None] & is_channel
    offs_k = offs_n[:, None].to(tl.int64)
    k_tile = tl.load(k + batch * stride_kb + head * stride_kh + offs_k * stride_kn + offs_d[None, :], mask=mask_k,
                     other=0.0)
    v_tile = tl.load(v + batch * stride_vb + head * stride_vh + offs_k * stride_vn + offs_d[None, :], mask=mask_k,
                     other=0.0)
    q_head = q + batch * stride_qb + head * stride_qh
    listed = batch_head * num_key_blocks + key_block
    ids = query_blocks + listed * num_query_blocks
    count = tl.load(query_counts + listed)
    scale_log2 = scale * 1.4426950408889634
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK_Q // BLOCK_M  # of a query block
    for i in tl.range(0, count * STEPS):
        offs_m = tl.load(ids + i // STEPS) * BLOCK_Q + i % STEPS * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = offs_m < n_q
        mask_q = is_row[:, None] & is_channel
        rows = batch_head * n_q + offs_m
        q_tile = tl.load(q_head + offs_m[:, None].to(tl.int64) * stride_qn + offs_d[None, :], mask=mask_q, other=0.0)
        do_tile = tl.load(grad_out + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=mask_q, other=0.0)
        row_lse = tl.load(lse_log2 + rows, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=is_row, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        weights = tl.where(is_key[:, None], tl.math.exp2(scores - row_lse[None, :]), 0.0)
        acc_v = tl.dot(weights.to(do_tile.dtype), do_tile, acc_v, input_precision="ieee")
        grad_weights = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[None, :])
        acc_k = tl.dot(grad_scores.to(q_tile.dtype), q_tile, acc_k, input_precision="ieee")
    out = (batch_head * n_k + offs_n)[:, None] * HEAD_DIM + offs_d[None, :]
    mask_out = (offs_n < n_k)[:, None] & is_channel
    tl.store(grad_k + out, (acc_k * scale).to(grad_k.dtype.element_ty), mask=mask_out)
    tl.store(grad_v + out, acc_v.to(grad_v.dtype.element_ty), mask=mask_out)


def default_backward_config(q: torch.Tensor, sm: tuple[int, int] | None = None) -> BackwardConfig:
    """Return the launch of both kernels for q's type and head dim on a card of compute capability sm; untuned."""
    sm = sm or capability(q.device) or (0, 0)
    if q.dtype == torch.float32:
        return BackwardConfig(32, 32, 4, 1)
    if q.shape[-1] > 128:
        return BackwardConfig(64, 64, 8, 1) if sm < (12, 0) else BackwardConfig(32, 32, 4, 1)
    # two sums of 64 x 128 fill the registers of four warps
    if sm >= (12, 0):
        return BackwardConfig(64, 64, 8, 2) if q.shape[-1] <= 64 else BackwardConfig(32, 32, 4, 2)
    return BackwardConfig(64, 64, 4 if q.shape[-1] <= 64 else 8, 2)


def block_sparse_backward_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    block_q: int,
    block_k: int,
    scale: float,
    key_lengths: torch.Tensor | None = None,
    config: BackwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch both kernels: the gradients of q, k and v in their type.

    Validated inputs as `block_sparse_attention` takes them, its out and lse, and the gradients of these. Takes
    B · H · key blocks · query blocks · 4 bytes for the transposed lists.
    """
    batch, num_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    # what is written is contiguous, whatever the inputs' strides
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    config = config or default_backward_config(q)
    grad_out = grad_out.contiguous()
    delta = ((grad_out.float() * out.float()).sum(-1) - grad_lse).contiguous()
    # a row that saw no key weighs none: exp2(score - inf) = 0
    lse_log2 = torch.where(lse == float("-inf"), float("inf"), lse * LOG2_E).contiguous()
    query_blocks, query_counts = transpose_lists(block_indices, block_counts, triton.cdiv(n_k, block_k))
    lengths = block_counts if key_lengths is None else key_lengths
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_Q": block_q, "BLOCK_K": block_k,
             "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HAS_LENGTHS": key_lengths is not None,
             "num_warps": config.num_warps, "num_stages": config.num_stages}
    inputs = (q, k, v, grad_out, lse_log2, delta)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    _query_gradient_kernel[(triton.cdiv(n_q, config.block_m), batch * num_heads)](
        *inputs, grad_q, block_indices, block_counts, lengths, *strides,
        *block_indices.stride()[:3], *block_counts.stride()[:2], num_heads, n_q, n_k, scale, **sizes)
    _key_gradient_kernel[(triton.cdiv(n_k, config.block_n), batch * num_heads)](
        *inputs, grad_k, grad_v, query_blocks, query_counts, lengths, *strides, num_heads, n_q, n_k,
        query_blocks.shape[-1], scale, **sizes)
    return grad_q, grad_k, grad_v


def transpose_lists(
    block_indices: torch.Tensor, block_counts: torch.Tensor, k_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn lists of key blocks into lists of query blocks.

    block_indices: `[B, H, Qb, K]`, block_counts: `[B, H, Qb]`. Returns `[B, H, k_blocks, Qb]` int32, ascending in the
    first count entries, and counts `[B, H, k_blocks]` int32. Nothing is read on the host.
    """
    listed = torch.arange(block_indices.shape[-1], device=block_indices.device) < block_counts[..., None]
    chosen = torch.zeros(*block_indices.shape[:3], k_blocks + 1, dtype=torch.bool, device=block_indices.device)
    chosen.scatter_(-1, torch.where(listed, block_indices, k_blocks).long(), True)
    lists = chosen[..., :k_blocks].transpose(2, 3)
    order = (~lists).to(torch.uint8).sort(dim=-1, stable=True).indices.to(torch.int32)
    return order.contiguous(), lists.sum(-1, dtype=torch.int32)
