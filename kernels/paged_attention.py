"""Decode attention over a paged key/value cache: one query token a sequence, keys found by block table.

Split-K after Flash-Decoding: each program attends to one span of a sequence for all query heads of one key head, a
second kernel joins the spans by their log-sum-exp. Everything accumulates in fp32; spans are kept in fp32.
The query is the sequence's last token, so it sees every key, or the last `window` ones.
"""

import functools
from dataclasses import dataclass

import torch

from kernels.attention import DTYPES, HEAD_DIMS, LOG2_E
from kernels.dispatch import require, tl, triton, uses_triton

PAGE_SIZES = (16, 32, 64, 128)
MAX_SPLITS = 64


@dataclass(frozen=True)
class PagedConfig:
    """Hold one way to launch: key tokens a step, warps, stages, spans a sequence (None: enough to fill the card)."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    num_splits: int | None = None


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from the last token of each sequence to its cached keys.

    q: `[B, H, D]` fp16, bf16 or fp32. k_cache, v_cache: `[P, page, Hkv, D]` (any strides but the last), page of
    PAGE_SIZES, H a multiple of Hkv. block_table: `[B, max pages]` int32 page ids, read up to the length.
    context_lens: `[B]` int32 tokens, the query's own among them; 0 gives zeros.
    scale: above 0, D ** -0.5 by default. window: how many last tokens are seen, at least 1, None for all.
    Returns `[B, H, D]` in q's type. Raises ValueError for shapes, types or devices that do not fit.
    """
    scale = _validate(q, k_cache, v_cache, block_table, context_lens, scale, window)
    if uses_triton(q):
        return paged_attention_triton(q, k_cache, v_cache, block_table, context_lens, scale=scale, window=window)
    return paged_attention_reference(q, k_cache, v_cache, block_table, context_lens, scale=scale, window=window)


@triton.jit
def _paged_kernel(
    q, k_cache, v_cache, block_table, context_lens, spans, spans_lse,
    stride_qb, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tb,
    stride_sb, stride_sh, stride_ss, stride_lb, stride_lh, group_size, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context_lens + sequence)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    # spans are whole steps, so that a step never crosses into the next span
    aligned = first // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(length - aligned, NUM_SPLITS), BLOCK_N) * BLOCK_N
    start = aligned + split * span
    end = tl.minimum(start + span, length)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    heads = kv_head * group_size + offs_g
    is_head = (offs_g < group_size)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + sequence * stride_qb + heads[:, None] * stride_qh + offs_d[None, :], mask=is_head, other=0.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    table = block_table + sequence * stride_tb
    for n in tl.range(start, end, BLOCK_N):
        tokens = n + offs_n
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + n // PAGE).to(tl.int64)
            rows_k = page * stride_kp + (tokens % PAGE).to(tl.int64) * stride_kt
            rows_v = page * stride_vp + (tokens % PAGE).to(tl.int64) * stride_vt
        else:
            pages = tl.load(table + tokens // PAGE, mask=tokens < end, other=0).to(tl.int64)
            rows_k = pages * stride_kp + (tokens % PAGE) * stride_kt
            rows_v = pages * stride_vp + (tokens % PAGE) * stride_vt
        seen = tokens < end
        if HAS_WINDOW:
            seen = seen & (tokens >= first)
        is_key = seen[:, None] & (offs_d < HEAD_DIM)[None, :]
        k_tile = tl.load(k_cache + rows_k[:, None] + kv_head * stride_kh + offs_d[None, :], mask=is_key, other=0.0)
        v_tile = tl.load(v_cache + rows_v[:, None] + kv_head * stride_vh + offs_d[None, :], mask=is_key, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = spans + sequence * stride_sb + heads[:, None] * stride_sh + split * stride_ss + offs_d[None, :]
    tl.store(out, (acc / safe_sum[:, None]).to(spans.dtype.element_ty), mask=is_head)
    if NUM_SPLITS > 1:
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.math.log2(safe_sum))
        tl.store(spans_lse + sequence * stride_lb + heads * stride_lh + split, lse, mask=offs_g < group_size)


@triton.jit
def _join_kernel(
    spans, spans_lse, out, stride_sb, stride_sh, stride_ss, stride_lb, stride_lh, stride_ob, stride_oh, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    is_split = offs_s < num_splits
    lse = tl.load(spans_lse + sequence * stride_lb + head * stride_lh + offs_s, mask=is_split, other=float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.math.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    rows = spans + sequence * stride_sb + head * stride_sh + offs_s[:, None] * stride_ss + offs_d[None, :]
    tile = tl.load(rows, mask=is_split[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    joined = tl.sum(tile * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + sequence * stride_ob + head * stride_oh + offs_d, joined.to(out.dtype.element_ty),
             mask=offs_d < HEAD_DIM)


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    config: PagedConfig | None = None,
) -> torch.Tensor:
    """Launch both kernels on validated tensors; shapes as in `paged_attention`."""
    batch, num_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    config = config or PagedConfig()
    longest = block_table.shape[1] * page
    longest = longest if window is None else min(longest, window)
    splits = config.num_splits or _splits(batch * kv_heads, longest, config.block_n, q.device)
    group_size = num_heads // kv_heads
    block_d = triton.next_power_of_2(head_dim)
    spans, lse = out[:, :, None], out
    if splits > 1:
        spans = torch.empty(batch, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, num_heads, splits, dtype=torch.float32, device=q.device)
    _paged_kernel[(batch, kv_heads, splits)](
        q, k_cache, v_cache, block_table, context_lens, spans, lse,
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0), *spans.stride()[:3],
        *lse.stride()[:2], group_size, window or 0, scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_G=max(16, triton.next_power_of_2(group_size)), PAGE=page,
        BLOCK_N=config.block_n, NUM_SPLITS=splits, HAS_WINDOW=window is not None,
        num_warps=config.num_warps, num_stages=config.num_stages)
    if splits > 1:
        _join_kernel[(batch, num_heads)](
            spans, lse, out, *spans.stride()[:3], *lse.stride()[:2], *out.stride()[:2], splits,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_S=triton.next_power_of_2(splits), num_warps=4)
    return out


def _splits(programs: int, longest: int, block_n: int, device: torch.device) -> int:
    wanted: int = triton.cdiv(4 * _multiprocessors(device), programs)
    return max(1, min(wanted, longest // (2 * block_n), MAX_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute `paged_attention` in plain torch, a sequence at a time, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    page, kv_heads = k_cache.shape[1:3]
    out = torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        first = 0 if window is None else max(length - window, 0)
        if length == 0:
            continue
        pages = block_table[b, : triton.cdiv(length, page)].long()
        k, v = (x[pages].flatten(0, 1)[first:length].to(wide) for x in (k_cache, v_cache))
        grouped = q[b].view(kv_heads, -1, q.shape[-1]).to(wide)
        weights = torch.softmax(grouped @ k.permute(1, 2, 0) * scale, -1)
        out[b] = (weights @ v.transpose(0, 1)).reshape(q.shape[1:]).to(q.dtype)
    return out


def _validate(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> float:
    op = "paged_attention"
    require(q.ndim == 3 and q.shape[-1] in HEAD_DIMS, op, f"q must be [B, H, D] with D of {HEAD_DIMS}", list(q.shape))
    require(q.dtype in DTYPES, op, "q must be fp16, bf16 or fp32", q.dtype)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(x.ndim == 4 and x.shape[3] == q.shape[2], op, f"{name} must be [P, page, Hkv, {q.shape[2]}]",
                list(x.shape))
        require(x.dtype == q.dtype, op, f"{name} must be {q.dtype} like q", x.dtype)
        require(x.shape[1] in PAGE_SIZES, op, f"{name}'s page must be one of {PAGE_SIZES}", x.shape[1])
    require(k_cache.shape == v_cache.shape, op, "k_cache and v_cache must have one shape",
            (list(k_cache.shape), list(v_cache.shape)))
    require(k_cache.shape[2] > 0 and q.shape[1] % k_cache.shape[2] == 0, op, "heads must be a multiple of the cache's",
            (q.shape[1], k_cache.shape[2]))
    require(block_table.ndim == 2 and block_table.shape[0] == q.shape[0] and block_table.dtype == torch.int32, op,
            f"block_table must be [{q.shape[0]}, max pages] int32", (list(block_table.shape), block_table.dtype))
    require(context_lens.shape == q.shape[:1] and context_lens.dtype == torch.int32, op,
            f"context_lens must be [{q.shape[0]}] int32", (list(context_lens.shape), context_lens.dtype))
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        require(x.stride(-1) == 1 or x.shape[-1] == 1, op, f"{name}'s last stride must be 1", x.stride())
        require(x.device == context_lens.device, op, f"{name} must be on {context_lens.device}", x.device)
    require(window is None or window >= 1, op, "window must be at least 1 or None", window)
    require(scale is None or scale > 0, op, "scale must be above 0", scale)
    return q.shape[-1] ** -0.5 if scale is None else scale
