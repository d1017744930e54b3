"""Attention over a paged key/value cache: decode, chunks of prefill, verification of draft trees, mixed in one batch.

Split-K after Flash-Decoding: each program attends from a tile of (query token, head of one key head's group) rows to
one span of the sequence, a second kernel joins the spans by their log-sum-exp. Scores, sums and spans are fp32,
weights are rounded to q's type before they meet V. Queries are the last tokens of their sequence: token i of n sees
key j when j <= length - n + i, and j > length - n + i - window where there is a window.
MLA (arXiv 2405.04434, absorbed): D = 576, V the first 512 columns of the same cache: latents are then loaded once.
"""

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention import LOG2_E
from kernels.dispatch import capability, refuse_gradients, require, tl, triton, uses_triton
from kernels.paged_torch import paged_attention_reference as paged_attention_reference
from kernels.paged_torch import paged_attention_torch, validate_paged

MAX_SPLITS = 64
JOIN_SPANS = 16


@dataclass(frozen=True)
class PagedConfig:
    """Hold one way to launch.

    block_n: key tokens a step. num_splits: spans a sequence, None for enough to fill the card.
    block_m: rows a tile, None for what the batch needs. span: fixed tokens a span, a multiple of block_n, instead of
    num_splits: with a fixed block_m too, what one sequence gets does not depend on any other. With a tree block_n is
    at most 64.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    num_splits: int | None = None
    block_m: int | None = None
    span: int | None = None


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    invariant: bool = False,
    check_blocks: bool | None = None,
    config: PagedConfig | None = None,
) -> torch.Tensor:
    """Attend from the last tokens of each sequence to its cached keys, their own among them.

    q: `[N, H, D]` fp16, bf16 or fp32, tokens of all sequences one after the other.
    k_cache: `[P, page, Hkv, D]`, v_cache: `[P, page, Hkv, Dv]` (any strides but the last), page of PAGE_SIZES, D of
    KEY_DIMS, Dv of VALUE_DIMS, H a multiple of Hkv; q's type, or float8_e4m3fn with k_scale and v_scale `[]` or
    `[Hkv]` fp32 (value = code · scale).
    block_table: `[B, max pages]` int32 page ids, read up to the length. context_lens: `[B]` int32 tokens in the cache;
    0 gives zeros. cu_seqlens_q: `[B + 1]` int32 from 0 to N; None: one token a sequence, N = B.
    tree_mask: `[N, W]` bool, W at least the longest sequence's n tokens: token i sees draft token j (of its n) where
    it is set, and everything before them; columns from n on are not read. Without it later tokens are not seen.
    sinks: `[H]` fp32 logits that join each row's softmax without a value.
    scale: above 0, D ** -0.5 by default. window: how many last tokens are seen, at least 1 (with a tree: at least W,
    and a token's place is the number of draft tokens that it sees). soft_cap: cap · tanh(score / cap), above 0.
    invariant: a fixed launch and fixed spans, so that no sequence's result depends on the rest of the batch; takes
    N · H · ceil(max pages · page / span) · Dv · 4 bytes. check_blocks: read tables and lengths on the host first; None:
    on CPU only. config: a tuned launch, not with invariant.
    Returns `[N, H, Dv]` in q's type. Raises ValueError for what does not fit.
    """
    scale = validate_paged(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, tree_mask, sinks, k_scale,
                           v_scale, scale, window, soft_cap, check_blocks, invariant and config is not None)
    if uses_triton(q, k_cache, v_cache, sinks) and _reads(k_cache):
        return paged_attention_triton(
            q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q=cu_seqlens_q, tree_mask=tree_mask, sinks=sinks,
            k_scale=k_scale, v_scale=v_scale, scale=scale, window=window, soft_cap=soft_cap,
            config=invariant_config(q) if invariant else config)
    return paged_attention_torch(
        q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q=cu_seqlens_q, tree_mask=tree_mask, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, scale=scale, window=window, soft_cap=soft_cap)


def _reads(cache: torch.Tensor) -> bool:
    sm = capability(cache.device)
    return cache.dtype != torch.float8_e4m3fn or (sm is not None and sm >= (8, 9))


@triton.jit
def _paged_kernel(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, tree_mask, tree_words, sinks, k_scale, v_scale,
    spans, spans_lse,
    stride_qn, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tb, stride_mn,
    stride_kc, stride_vc, stride_sn, stride_sh, stride_ss, stride_ln, stride_lh,
    num_words, num_sequences, num_splits, span, tiles, group_size, window, scale_log2, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, FIXED_SPAN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    SHARED: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if PACKED:
        # sequence s owns the tiles from cu[s] * group // BLOCK_M + s on: enough for its rows, none in common
        ids = tl.arange(0, BLOCK_B)
        starts = tl.load(cu_seqlens_q + ids, mask=ids < num_sequences, other=0)
        is_before = (starts * group_size // BLOCK_M + ids <= tile) & (ids < num_sequences)
        sequence = tl.sum(is_before.to(tl.int32), 0) - 1
        first_token = tl.load(cu_seqlens_q + sequence)
        n_q = tl.load(cu_seqlens_q + sequence + 1) - first_token
        tile = tile - (first_token * group_size // BLOCK_M + sequence)
    else:
        sequence = tile // tiles
        tile = tile % tiles
        first_token = sequence
        n_q = 1
    if tile * BLOCK_M >= n_q * group_size:
        return
    length = tl.load(context_lens + sequence)
    prefix = length - n_q
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < n_q * group_size
    token = offs_m // group_size
    position = prefix + token
    rows = first_token.to(tl.int64) + token
    heads = kv_head * group_size + offs_m % group_size
    last = length
    first = 0
    if HAS_TREE:
        if HAS_WINDOW:
            offs_w = tl.arange(0, BLOCK_W)
            tree_rows = tl.load(tree_mask + rows[:, None] * stride_mn + offs_w[None, :],
                                mask=is_row[:, None] & (offs_w < n_q)[None, :], other=0)
            position = prefix + tl.sum(tree_rows.to(tl.int32), 1) - 1
            first = tl.maximum(prefix - window, 0)
    else:
        last = tl.minimum(prefix + (tile * BLOCK_M + BLOCK_M - 1) // group_size + 1, length)
        if HAS_WINDOW:
            first = tl.maximum(prefix + tile * BLOCK_M // group_size + 1 - window, 0)
    # spans are whole steps, so that a step never crosses into the next span
    start = first // BLOCK_N * BLOCK_N
    end = last
    if SPLIT:
        if FIXED_SPAN:
            start = tl.maximum(start, split * span)
            end = tl.minimum(last, split * span + span)
        else:
            share = tl.cdiv(tl.cdiv(last - start, num_splits), BLOCK_N) * BLOCK_N
            start = start + split * share
            end = tl.minimum(start + share, last)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    q_rows = q + rows[:, None] * stride_qn + heads[:, None] * stride_qh
    q_tile = tl.load(q_rows + offs_d[None, :], mask=is_row[:, None] & (offs_d < D)[None, :], other=0.0)
    if REST > 0:
        offs_r = BLOCK_D + tl.arange(0, REST)
        q_rest = tl.load(q_rows + offs_r[None, :], mask=is_row[:, None], other=0.0)
    if HAS_SCALES:
        scale_log2 = scale_log2 * tl.load(k_scale + kv_head * stride_kc)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if HAS_SINKS:
        # the first span takes the sink in, as a key without a value
        is_first = tl.zeros([BLOCK_M], dtype=tl.int32) + split == 0
        sink = tl.load(sinks + heads, mask=is_row & is_first, other=float("-inf"))
        row_max = sink * 1.4426950408889634
        row_sum += tl.where(sink == float("-inf"), 0.0, 1.0)
    table = block_table + sequence.to(tl.int64) * stride_tb
    for n in tl.range(start, end, BLOCK_N):
        tokens = n + offs_n
        seen = tokens < end
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + n // PAGE).to(tl.int64)
            rows_k = page * stride_kp + (tokens % PAGE).to(tl.int64) * stride_kt
            rows_v = page * stride_vp + (tokens % PAGE).to(tl.int64) * stride_vt
        else:
            pages = tl.load(table + tokens // PAGE, mask=seen, other=0).to(tl.int64)
            rows_k = pages * stride_kp + (tokens % PAGE) * stride_kt
            rows_v = pages * stride_vp + (tokens % PAGE) * stride_vt
        k_rows = k_cache + rows_k[:, None] + kv_head * stride_kh
        k_tile = tl.load(k_rows + offs_d[None, :], mask=seen[:, None] & (offs_d < D)[None, :], other=0.0)
        if HAS_SCALES:
            k_tile = k_tile.to(tl.float16).to(q_tile.dtype)  # every E4M3 value is exact in fp16 and bf16
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(k_rows + offs_r[None, :], mask=seen[:, None], other=0.0)
            if HAS_SCALES:
                k_rest = k_rest.to(tl.float16).to(q_tile.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale_log2
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities
            scores = cap_log2 * (1.0 - 2.0 / (tl.math.exp2(scores / cap_log2 * 2.8853900817779268) + 1.0))
        if HAS_TREE:
            # each row's 64 bits from this step's first token on, out of the two words that hold them
            draft = n - prefix
            word = tl.zeros([BLOCK_M], dtype=tl.int32) + (draft >> 6)
            shift_right = (draft & 63).to(tl.uint64)
            row_words = tree_words + rows * num_words + word
            low = tl.load(row_words, mask=is_row & (word >= 0) & (word < num_words), other=0)
            high = tl.load(row_words + 1, mask=is_row & (word >= -1) & (word + 1 < num_words), other=0)
            low = low.to(tl.uint64, bitcast=True)
            high = high.to(tl.uint64, bitcast=True)
            bits = (low >> shift_right) | ((high << 1) << (63 - shift_right))
            is_prefix = seen & (tokens < prefix)
            in_tree = ((bits[:, None] >> offs_n.to(tl.uint64)[None, :]) & 1) != 0
            visible = is_prefix[None, :] | (in_tree & (seen & (tokens >= prefix))[None, :])
        elif PACKED:
            visible = seen[None, :] & (tokens[None, :] <= position[:, None])
        else:
            visible = seen[None, :]
        if HAS_WINDOW:
            visible = visible & (tokens[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key keeps -inf, which must not meet itself in a subtraction
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - shift[:, None])
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if SHARED:
            v_tile = k_tile
        else:
            v_tile = tl.load(v_cache + rows_v[:, None] + kv_head * stride_vh + offs_v[None, :],
                             mask=seen[:, None] & (offs_v < DV)[None, :], other=0.0)
            if HAS_SCALES:
                v_tile = v_tile.to(tl.float16).to(q_tile.dtype)
        acc = tl.dot(weights.to(q_tile.dtype), v_tile, acc, input_precision="ieee")
        row_max = new_max
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    if HAS_SCALES:
        acc = acc * tl.load(v_scale + kv_head * stride_vc)
    out = spans + rows[:, None] * stride_sn + heads[:, None] * stride_sh + split * stride_ss + offs_v[None, :]
    tl.store(out, acc.to(spans.dtype.element_ty), mask=is_row[:, None] & (offs_v < DV)[None, :])
    if SPLIT:
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.math.log2(safe_sum))
        tl.store(spans_lse + rows * stride_ln + heads * stride_lh + split, lse, mask=is_row)


@triton.jit
def _join_kernel(
    spans, spans_lse, out, stride_sn, stride_sh, stride_ss, stride_ln, stride_lh, stride_on, stride_oh, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_DV)
    joined = tl.zeros([BLOCK_DV], dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    # spans without keys weigh nothing: with a fixed BLOCK_S their number changes no bit
    for s in tl.range(0, num_splits, BLOCK_S):
        offs_s = s + tl.arange(0, BLOCK_S)
        is_split = offs_s < num_splits
        lse = tl.load(spans_lse + row * stride_ln + head * stride_lh + offs_s, mask=is_split, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.math.exp2(lse - shift)
        rescale = tl.math.exp2(largest - shift)
        part = tl.load(spans + row * stride_sn + head * stride_sh + offs_s[:, None] * stride_ss + offs_d[None, :],
                       mask=is_split[:, None] & (offs_d < DV)[None, :], other=0.0)
        joined = joined * rescale + tl.sum(part * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * stride_on + head * stride_oh + offs_d, joined.to(out.dtype.element_ty), mask=offs_d < DV)


def default_paged_config(q: torch.Tensor, rows: int = 1) -> PagedConfig:
    """Return the launch that q's type and width and a sequence's rows (tokens times group) take; untuned."""
    d = q.shape[-1]
    if q.dtype == torch.float32:
        return PagedConfig(32 if d <= 128 else 16, 4, 2, block_m=16)
    if d > 128:
        return PagedConfig(32, 8 if d > 256 else 4, 2, block_m=16)
    return PagedConfig(64, 8, 2, block_m=64) if rows >= 64 else PagedConfig(block_m=32 if rows > 16 else 16)


def invariant_config(q: torch.Tensor) -> PagedConfig:
    """Return the one launch of invariant mode for q's type and width."""
    return replace(default_paged_config(q), span=1024)


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cu_seqlens_q: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    config: PagedConfig | None = None,
) -> torch.Tensor:
    """Launch both kernels on validated tensors; shapes as in `paged_attention`."""
    refuse_gradients("paged_attention", q, k_cache, v_cache, sinks)
    num_tokens, num_heads, d = q.shape
    page, kv_heads, dv = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    batch = block_table.shape[0]
    out = torch.empty(num_tokens, num_heads, dv, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group_size = num_heads // kv_heads
    rows = max(1, num_tokens // batch) * group_size
    config = config or default_paged_config(q, rows)
    require(tree_mask is None or config.block_n <= 64, "paged_attention", "block_n must be at most 64 with a tree",
            config.block_n)
    require(config.span is None or config.span % config.block_n == 0, "paged_attention",
            f"span must be a multiple of block_n {config.block_n}", config.span)
    block_m = config.block_m or default_paged_config(q, rows).block_m or 16
    tiles = triton.cdiv(group_size, block_m)
    programs = batch * tiles if cu_seqlens_q is None else num_tokens * group_size // block_m + batch
    longest = block_table.shape[1] * page
    if config.span is not None:
        splits = max(1, triton.cdiv(longest, config.span))
    else:
        longest = longest if window is None else min(longest, window + triton.cdiv(block_m, group_size))
        splits = config.num_splits or _splits(programs * kv_heads, longest, config.block_n, q.device)
    spans, lse = out[:, :, None], out
    if splits > 1:
        spans = torch.empty(num_tokens, num_heads, splits, dv, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_tokens, num_heads, splits, dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(d)
    rest = 0
    if d > 128 and block_d != d:
        block_d //= 2
        rest = d - block_d
    is_shared = (k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride() and dv == block_d
                 and k_cache.shape[0] > 0)
    tree, words = (q, q) if tree_mask is None else (tree_mask.view(torch.uint8), _pack_bits(tree_mask))
    _paged_kernel[(programs, kv_heads, splits)](
        q, k_cache, v_cache, block_table, context_lens, context_lens if cu_seqlens_q is None else cu_seqlens_q, tree,
        words, q if sinks is None else sinks, q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        spans, lse,
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0), tree.stride(0),
        _channel_stride(k_scale), _channel_stride(v_scale), *spans.stride()[:3], *lse.stride()[:2],
        words.shape[1], batch, splits, config.span or 0, tiles, group_size, window or 0, scale * LOG2_E,
        (soft_cap or 0.0) * LOG2_E,
        D=d, BLOCK_D=block_d, REST=rest, DV=dv, BLOCK_DV=triton.next_power_of_2(dv), BLOCK_M=block_m,
        BLOCK_N=config.block_n, BLOCK_B=max(64, triton.next_power_of_2(batch)),
        BLOCK_W=16 if tree_mask is None else max(16, triton.next_power_of_2(tree_mask.shape[1])), PAGE=page,
        PACKED=cu_seqlens_q is not None, SPLIT=splits > 1, FIXED_SPAN=config.span is not None,
        HAS_WINDOW=window is not None, HAS_TREE=tree_mask is not None, HAS_SINKS=sinks is not None,
        HAS_CAP=soft_cap is not None, HAS_SCALES=k_scale is not None, SHARED=is_shared,
        num_warps=config.num_warps, num_stages=config.num_stages)
    if splits > 1:
        _join_kernel[(num_tokens, num_heads)](
            spans, lse, out, *spans.stride()[:3], *lse.stride()[:2], *out.stride()[:2], splits, DV=dv,
            BLOCK_DV=triton.next_power_of_2(dv),
            BLOCK_S=triton.next_power_of_2(splits) if config.span is None and splits <= MAX_SPLITS else JOIN_SPANS,
            num_warps=4)
    return out


def _pack_bits(mask: torch.Tensor) -> torch.Tensor:
    padded = F.pad(mask, (0, -mask.shape[1] % 64)).unflatten(1, (-1, 64)).long()
    words: torch.Tensor = (padded << torch.arange(64, device=mask.device)).sum(-1)  # each bit once: no sum carries
    return words


def _channel_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.ndim == 0 else scale.stride(0)


def _splits(programs: int, longest: int, block_n: int, device: torch.device) -> int:
    wanted: int = triton.cdiv(4 * _multiprocessors(device), programs)
    return max(1, min(wanted, longest // (2 * block_n), MAX_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
