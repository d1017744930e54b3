"""Scaled dot-product attention, forward: O = softmax(scale · Q Kᵀ) V with its log-sum-exp.

Online softmax after FlashAttention-2 (arXiv 2307.08691); scores, weights' sums and O accumulate in fp32, weights are
rounded to the input type before they meet V. Causal masks are aligned to the last key: query i sees the keys
j <= i + Nk - Nq. A query that sees no key gives zeros and a log-sum-exp of -inf.
Gradients: with inputs that require them torch's attention runs and its autograd is the backward; where the
log-sum-exp is asked for too, the reference's, since torch's attention has no gradient of it.
"""

import math
from dataclasses import dataclass

import torch

from kernels.attention_torch import HEAD_DIMS as HEAD_DIMS
from kernels.attention_torch import attention_reference as attention_reference
from kernels.attention_torch import (
    attention_sdpa,
    expand_kv,
    validate_attention,
    validate_bias,
    validate_packed,
)
from kernels.descriptors import can_describe, describe
from kernels.dispatch import capability, refuse_gradients, takes_gradients, tl, triton, uses_triton
from kernels.shipped_configs import card_family, shipped_config

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionConfig:
    """Hold one way to launch: query and key tokens a tile, warps, stages, loads by descriptor (TMA), register limit."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    use_tma: bool
    max_registers: int | None = None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each query to all keys, or to those up to it.

    q: `[B, H, Nq, D]`, k and v: `[B, Hkv, Nk, D]` fp16, bf16 or fp32, H a multiple of Hkv, D of HEAD_DIMS.
    scale: above 0, D ** -0.5 by default. bias: added to the scaled scores, `[1 or B, 1 or H, 1 or Nq, 1 or Nk]`
    floating point, -inf for keys that are not seen; by the reference, with the whole score matrix, on every device.
    Returns `[B, H, Nq, D]` in q's type. Raises ValueError for shapes, types, devices or a scale that do not fit.
    """
    scale = validate_attention(q, k, v, scale)
    if bias is not None:
        validate_bias(q, k, bias)
        return attention_reference(q, k, v, causal=causal, scale=scale, bias=bias)[0]
    if uses_triton(q, k, v):
        return attention_triton(q, k, v, causal=causal, scale=scale)[0]
    return attention_sdpa(q, k, v, causal, scale)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `attention` does and return the log-sum-exp `[B, H, Nq]` fp32 of the scaled scores too."""
    scale = validate_attention(q, k, v, scale, "attention_with_lse")
    if uses_triton(q, k, v):
        return attention_triton(q, k, v, causal=causal, scale=scale)
    # torch's own would lose the gradient of the log-sum-exp, and ends the process where there is no query
    is_plain = k.shape[2] > 0 and q.numel() > 0 and (not causal or q.shape[2] == k.shape[2])
    if is_plain and q.device.type == "cpu" and not takes_gradients(q, k, v):
        k, v = expand_kv(q, k), expand_kv(q, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse.float()
    return attention_reference(q, k, v, causal=causal, scale=scale)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch.

    q: `[Nq, H, D]`, k and v: `[Nk, Hkv, D]`; cu_seqlens: `[B + 1]` int32, from 0 to the token count, not decreasing.
    max_seqlen_q: the longest query sequence in tokens.
    Returns `[Nq, H, D]`. Raises ValueError as `attention` does, on CPU for cu_seqlens' contents too.
    """
    validate_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    scale = validate_attention(q4, k4, v4, scale, "attention_varlen")
    if uses_triton(q, k, v):
        return attention_triton(q4, k4, v4, causal=causal, scale=scale,
                                varlen=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q))[0][0].transpose(0, 1)
    out = torch.zeros_like(q4)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if b > a and d > c:
            out[:, :, a:b] = attention_sdpa(q4[:, :, a:b], k4[:, :, c:d], v4[:, :, c:d], causal, scale)
    return out[0].transpose(0, 1)


@triton.jit
def _attend_tiles(
    acc, row_sum, row_max, q_tile, k, v, batch, head, row_k, row_v, stride_kn, stride_vn, offs_m, offs_d, start, end,
    n_k, causal_shift, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    for n in tl.range(start, end, BLOCK_N):
        if USE_TMA:
            k_tile = k.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            offs = n + offs_n
            rows = k + row_k + offs[:, None].to(tl.int64) * stride_kn + offs_d[None, :]
            if MASKED or HEAD_DIM != BLOCK_D:
                k_tile = tl.load(rows, mask=(offs[:, None] < n_k) & (offs_d[None, :] < HEAD_DIM), other=0.0)
            else:
                k_tile = tl.load(rows)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            visible = (n + offs_n)[None, :] < n_k
            if CAUSAL:
                visible = visible & ((n + offs_n)[None, :] <= offs_m[:, None] + causal_shift)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # a row that has seen no key keeps -inf, which must not meet itself in a subtraction
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if USE_TMA:
            v_tile = v.load([batch, head, n, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            offs = n + offs_n
            rows = v + row_v + offs[:, None].to(tl.int64) * stride_vn + offs_d[None, :]
            if MASKED or HEAD_DIM != BLOCK_D:
                v_tile = tl.load(rows, mask=(offs[:, None] < n_k) & (offs_d[None, :] < HEAD_DIM), other=0.0)
            else:
                v_tile = tl.load(rows)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _attention_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh,
    num_heads, group_size, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, VARLEN: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest rows first, so that the last wave is short
    batch_head = tl.program_id(1)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    kv_head = head // group_size
    if VARLEN:
        first_q = tl.load(cu_seqlens_q + batch)
        first_k = tl.load(cu_seqlens_k + batch)
        n_q = tl.load(cu_seqlens_q + batch + 1) - first_q
        n_k = tl.load(cu_seqlens_k + batch + 1) - first_k
        if tile * BLOCK_M >= n_q:
            return
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = (offs_m < n_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv64 = kv_head.to(tl.int64)
    if VARLEN:
        row_q = first_q.to(tl.int64) * stride_qn + head64 * stride_qh
        row_k = first_k.to(tl.int64) * stride_kn + kv64 * stride_kh
        row_v = first_k.to(tl.int64) * stride_vn + kv64 * stride_vh
        row_o = first_q.to(tl.int64) * stride_on + head64 * stride_oh
        row_l = head64 * stride_lh + first_q
    else:
        row_q = batch64 * stride_qb + head64 * stride_qh
        row_k = batch64 * stride_kb + kv64 * stride_kh
        row_v = batch64 * stride_vb + kv64 * stride_vh
        row_o = batch64 * stride_ob + head64 * stride_oh
        row_l = batch64 * stride_lb + head64 * stride_lh
    if USE_TMA:
        q_tile = q.load([batch, head, tile * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        q_tile = tl.load(q + row_q + offs_m[:, None].to(tl.int64) * stride_qn + offs_d[None, :], mask=is_row, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    causal_shift = n_k - n_q
    if CAUSAL:
        # whole tiles below the diagonal of the tile's first row need no mask
        unmasked_end = tl.maximum(tl.minimum(tile * BLOCK_M + causal_shift + 1, n_k), 0) // BLOCK_N * BLOCK_N
        end = tl.maximum(tl.minimum((tile + 1) * BLOCK_M + causal_shift, n_k), 0)
    else:
        unmasked_end = n_k // BLOCK_N * BLOCK_N
        end = n_k
    acc, row_sum, row_max = _attend_tiles(
        acc, row_sum, row_max, q_tile, k, v, batch, kv_head, row_k, row_v, stride_kn, stride_vn, offs_m, offs_d,
        0, unmasked_end, n_k, causal_shift, scale_log2, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, False, USE_TMA, PRECISION)
    acc, row_sum, row_max = _attend_tiles(
        acc, row_sum, row_max, q_tile, k, v, batch, kv_head, row_k, row_v, stride_kn, stride_vn, offs_m, offs_d,
        unmasked_end, end, n_k, causal_shift, scale_log2, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, True, USE_TMA, PRECISION)
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    row_lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(safe_sum)) * 0.6931471805599453)
    tl.store(out + row_o + offs_m[:, None].to(tl.int64) * stride_on + offs_d[None, :], acc.to(out.dtype.element_ty),
             mask=is_row)
    tl.store(lse + row_l + offs_m, row_lse, mask=offs_m < n_q)


def default_config(
    q: torch.Tensor, sm: tuple[int, int] | None = None, *, is_packed: bool = False
) -> AttentionConfig:
    """Return the launch that q's type and head dim take on a card of compute capability sm (q's own), as shipped."""
    if q.dtype == torch.float32:
        return AttentionConfig(64, 32, 4, 2, False)
    shape = {"d": q.shape[-1], "packed": int(is_packed)}
    # fp16 takes the launches of bf16
    row = shipped_config("attention", card_family(sm or capability(q.device) or (0, 0)), shape, "bf16")
    return AttentionConfig(128, 64, 8, 2, False) if row is None else AttentionConfig(**row.config)


def attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    varlen: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    config: AttentionConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated tensors: output like q and log-sum-exp `[B, H, Nq]` fp32.

    varlen: cu_seqlens_q, cu_seqlens_k and the longest query sequence of a packed batch with B = 1.
    """
    refuse_gradients("attention", q, k, v)
    num_heads, n_q, head_dim = q.shape[1:]
    batch = q.shape[0] if varlen is None else varlen[0].shape[0] - 1
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    longest = n_q if varlen is None else varlen[2]
    if batch == 0 or longest == 0:
        return out, lse
    config = config or default_config(q, is_packed=varlen is not None)
    block_d = triton.next_power_of_2(head_dim)
    use_tma = config.use_tma and varlen is None and k.shape[2] > 0 and all(can_describe(x) for x in (q, k, v))
    loads: tuple[object, ...] = (q, k, v)
    if use_tma:
        rows = (config.block_m, config.block_n, config.block_n)
        loads = tuple(describe(x, n, block_d) for x, n in zip((q, k, v), rows, strict=True))
    cu_seqlens_q, cu_seqlens_k = (lse, lse) if varlen is None else varlen[:2]
    _attention_kernel[(triton.cdiv(longest, config.block_m), batch * num_heads)](
        *loads, out, lse, cu_seqlens_q, cu_seqlens_k,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], lse.stride(0), lse.stride(1),
        num_heads, num_heads // k.shape[1], n_q, k.shape[2], scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAUSAL=causal,
        VARLEN=varlen is not None, USE_TMA=use_tma, PRECISION="ieee",
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers)
    return out, lse
