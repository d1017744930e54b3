"""Attention over a paged key/value cache: decode, chunks of prefill, verification of draft trees, mixed in one batch.

Split-K after Flash-Decoding: each program attends from a tile of (query token, head of one key head's group) rows to
one span of the sequence, a second kernel joins the spans by their log-sum-exp (`paged_kernels`). Queries are the last
tokens of their sequence: token i of n sees key j when j <= length - n + i, and j > length - n + i - window where there
is a window.
MLA (arXiv 2405.04434, absorbed): D = 576, V the first 512 columns of the same cache: latents are then loaded once.
"""

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention import LOG2_E
from kernels.dispatch import capability, refuse_gradients, require, triton, uses_triton
from kernels.paged_kernels import join_kernel, paged_kernel
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
    paged_kernel[(programs, kv_heads, splits)](
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
        join_kernel[(num_tokens, num_heads)](
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
