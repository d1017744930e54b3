"""`paged_attention` without Triton: what it refuses, its reference, and the faster path that CPUs take."""

import itertools

import torch
import torch.nn.functional as F

from kernels.attention_torch import DTYPES
from kernels.dispatch import require, triton

PAGE_SIZES = (16, 32, 64, 128)
KEY_DIMS = (64, 80, 96, 128, 192, 256, 576)
VALUE_DIMS = (64, 80, 96, 128, 256, 512)
OP = "paged_attention"


def paged_attention_reference(
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
) -> torch.Tensor:
    """Compute `paged_attention` in plain torch, a sequence at a time, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k_cache.shape[2]
    out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)
    for rows, length, table in _sequences(q, block_table, context_lens, cu_seqlens_q):
        if length == 0 or rows.start == rows.stop:
            continue
        k, v = (_gather(x, c, table, length, wide) for x, c in ((k_cache, k_scale), (v_cache, v_scale)))
        grouped = q[rows].to(wide).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, n, D]
        scores = grouped @ k.permute(1, 2, 0)[:, None] * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        visible = _visible(rows, length, window, tree_mask, q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, -1)[..., :length].nan_to_num(0.0)  # a row that sees nothing
        out[rows] = (weights @ v.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def paged_attention_torch(
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
) -> torch.Tensor:
    """Let torch's own attention run on each sequence's keys; soft caps and sinks by the reference.

    Pages that follow one another are read where they are, others are gathered.
    """
    if soft_cap is not None or sinks is not None:
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, context_lens, scale=scale, window=window, cu_seqlens_q=cu_seqlens_q,
            tree_mask=tree_mask, sinks=sinks, k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap)
    out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, N, D]
    for rows, length, table in _sequences(q, block_table, context_lens, cu_seqlens_q):
        n = rows.stop - rows.start
        seen = max(length - n, 0)
        if length == 0 or n == 0:
            continue
        # keys in front of the first token's window are left out; a token that sees no draft token is one place earlier
        is_tree = tree_mask is not None
        first = 0 if window is None else max(length - n + 1 - is_tree - window, 0)
        pages = table[first // page : triton.cdiv(length, page)].tolist()
        begin, end = first % page, length - first // page * page
        k, v = (_span(x, c, pages, begin, end, q.dtype) for x, c in ((k_cache, k_scale), (v_cache, v_scale)))
        queries = grouped[:, :, rows]
        if n == 1 and not is_tree:
            # it sees all of them; the heads of a group are rows of one matrix
            attended = F.scaled_dot_product_attention(queries.transpose(1, 2), k[:, None], v[:, None], scale=scale)
            out[rows] = attended.flatten(0, 2)
            continue
        group = queries.shape[1]
        k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
        is_causal = n == length and window is None and not is_tree
        mask = None if is_causal else _visible(rows, length, window, tree_mask, q.device)[:, first:]
        attended = F.scaled_dot_product_attention(queries, k, v, mask, is_causal=is_causal, scale=scale)
        attended = attended.permute(2, 0, 1, 3).flatten(1, 2)
        out[rows] = attended if mask is None or seen else attended.masked_fill(~mask.any(-1)[:, None, None], 0.0)
    return out


def _span(
    cache: torch.Tensor, scale: torch.Tensor | None, pages: list[int], begin: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return tokens begin to end of these pages, `[Hkv, T, D]`, without a copy where the pages are neighbours."""
    if scale is not None:
        table = torch.tensor(pages, device=cache.device)
        return _gather(cache, scale, table, end, dtype)[begin:].transpose(0, 1)
    by_head = cache.permute(2, 0, 1, 3)
    if pages == list(range(pages[0], pages[0] + len(pages))):
        span = by_head[:, pages[0] : pages[0] + len(pages)]
    else:
        span = by_head[:, torch.tensor(pages, device=cache.device)]
    tokens: torch.Tensor = span.flatten(1, 2)[:, begin:end].to(dtype)
    return tokens


def _sequences(
    q: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> list[tuple[slice, int, torch.Tensor]]:
    starts = list(range(q.shape[0] + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    return [(slice(starts[b], starts[b + 1]), length, block_table[b])
            for b, length in enumerate(context_lens.tolist())]


def _gather(
    cache: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor, length: int, dtype: torch.dtype
) -> torch.Tensor:
    pages = table[: triton.cdiv(length, cache.shape[1])].long()
    if scale is None:
        return cache[pages].flatten(0, 1)[:length].to(dtype)
    codes = cache.view(torch.uint8)[pages].flatten(0, 1)[:length].view(cache.dtype)  # CPU indexes no float8
    wide = torch.promote_types(dtype, torch.float32)
    values: torch.Tensor = codes.to(wide) * scale.to(wide).reshape(-1, 1)
    return values.to(dtype)


def _visible(
    rows: slice, length: int, window: int | None, tree_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    n = rows.stop - rows.start
    keys = torch.arange(length, device=device)
    places = length - n + torch.arange(n, device=device)
    visible: torch.Tensor = keys <= places[:, None]
    if tree_mask is not None:
        tree = tree_mask[rows, :n]
        visible = torch.cat([torch.ones(n, max(length - n, 0), dtype=torch.bool, device=device),
                             tree[:, max(n - length, 0):]], 1)
        places = length - n + tree.sum(1) - 1
    if window is not None:
        visible = visible & (keys > places[:, None] - window)
    return visible


def validate_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    check_blocks: bool | None,
    has_two_launches: bool,
) -> float:
    """Raise ValueError unless everything fits `paged_attention`; return the scale."""
    require(q.ndim == 3 and q.shape[-1] in KEY_DIMS, OP, f"q must be [N, H, D] with D of {KEY_DIMS}", list(q.shape))
    require(q.dtype in DTYPES, OP, "q must be fp16, bf16 or fp32", q.dtype)
    require(block_table.ndim == 2 and block_table.dtype == torch.int32, OP, "block_table must be [B, max pages] int32",
            (list(block_table.shape), block_table.dtype))
    batch, d = block_table.shape[0], q.shape[2]
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    for name, x, width in (("k_cache", k_cache, d), ("v_cache", v_cache, None)):
        require(x.ndim == 4 and (x.shape[3] == width if width else x.shape[3] in VALUE_DIMS), OP,
                f"{name} must be [P, page, Hkv, {width or f'Dv of {VALUE_DIMS}'}]", list(x.shape))
        require(x.dtype == (torch.float8_e4m3fn if is_fp8 else q.dtype), OP,
                f"{name} must be {q.dtype} like q, or both caches float8_e4m3fn", x.dtype)
        require(x.shape[1] in PAGE_SIZES, OP, f"{name}'s page must be one of {PAGE_SIZES}", x.shape[1])
    require(k_cache.shape[:3] == v_cache.shape[:3], OP, "k_cache and v_cache must have the same pages and heads",
            (list(k_cache.shape), list(v_cache.shape)))
    kv_heads = k_cache.shape[2]
    require(kv_heads > 0 and q.shape[1] % kv_heads == 0, OP, "heads must be a multiple of the cache's",
            (q.shape[1], kv_heads))
    for name, one in (("k_scale", k_scale), ("v_scale", v_scale)):
        require((one is not None) == is_fp8, OP, f"{name} must be given exactly where the cache is float8_e4m3fn",
                (k_cache.dtype, None if one is None else list(one.shape)))
        require(one is None or (one.dtype == torch.float32 and one.shape in ((), (kv_heads,))), OP,
                f"{name} must be [] or [{kv_heads}] fp32", None if one is None else (list(one.shape), one.dtype))
    require(context_lens.shape == (batch,) and context_lens.dtype == torch.int32 and context_lens.is_contiguous(), OP,
            f"context_lens must be contiguous [{batch}] int32", (list(context_lens.shape), context_lens.dtype))
    if cu_seqlens_q is None:
        require(q.shape[0] == batch, OP, f"q must have {batch} tokens, one a sequence, without cu_seqlens_q",
                q.shape[0])
    else:
        require(cu_seqlens_q.shape == (batch + 1,) and cu_seqlens_q.dtype == torch.int32
                and cu_seqlens_q.is_contiguous(), OP, f"cu_seqlens_q must be contiguous [{batch + 1}] int32",
                (list(cu_seqlens_q.shape), cu_seqlens_q.dtype))
    require(tree_mask is None or cu_seqlens_q is not None, OP, "tree_mask needs cu_seqlens_q", cu_seqlens_q)
    require(tree_mask is None or (tree_mask.ndim == 2 and tree_mask.shape[0] == q.shape[0]
                                  and tree_mask.dtype == torch.bool), OP, f"tree_mask must be [{q.shape[0]}, W] bool",
            None if tree_mask is None else (list(tree_mask.shape), tree_mask.dtype))
    require(sinks is None or (sinks.shape == q.shape[1:2] and sinks.dtype == torch.float32 and sinks.is_contiguous()),
            OP, f"sinks must be contiguous [{q.shape[1]}] fp32",
            None if sinks is None else (list(sinks.shape), sinks.dtype))
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table),
                         ("tree_mask", tree_mask)):
        require(tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1, OP,
                f"{name}'s last stride must be 1", None if tensor is None else tensor.stride())
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table),
                         ("context_lens", context_lens), ("cu_seqlens_q", cu_seqlens_q), ("tree_mask", tree_mask),
                         ("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale)):
        require(tensor is None or tensor.device == q.device, OP, f"{name} must be on {q.device} like q",
                None if tensor is None else tensor.device)
    require(window is None or window >= 1, OP, "window must be at least 1 or None", window)
    require(window is None or tree_mask is None or window >= tree_mask.shape[1], OP,
            "window must be at least the tree mask's width", window)
    require(soft_cap is None or soft_cap > 0, OP, "soft_cap must be above 0 or None", soft_cap)
    require(scale is None or scale > 0, OP, "scale must be above 0", scale)
    require(not has_two_launches, OP, "config must be None with invariant", "both")
    if q.device.type == "cpu" if check_blocks is None else check_blocks:
        _check_contents(q, k_cache, block_table, context_lens, cu_seqlens_q, tree_mask)
    return float(d**-0.5) if scale is None else scale


def _check_contents(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
) -> None:
    num_pages, page = k_cache.shape[:2]
    lengths = context_lens.tolist()
    room = block_table.shape[1] * page
    for b, length in enumerate(lengths):
        require(0 <= length <= room, OP, f"context_lens must be in 0..{room}, the table's room", f"{length} at {b}")
    used = torch.arange(block_table.shape[1], device=q.device) * page < context_lens[:, None]
    bad = used & ((block_table < 0) | (block_table >= num_pages))
    if bool(bad.any()):
        b, column = bad.nonzero()[0].tolist()
        require(False, OP, f"block ids must be in 0..{num_pages - 1}",
                f"{int(block_table[b, column])} at [{b}, {column}]")
    if cu_seqlens_q is None:
        return
    starts = cu_seqlens_q.tolist()
    counts = [b - a for a, b in itertools.pairwise(starts)]
    require(starts[0] == 0 and starts[-1] == q.shape[0] and all(n >= 0 for n in counts), OP,
            f"cu_seqlens_q must ascend from 0 to {q.shape[0]}", starts)
    for b, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        require(n <= length or length == 0, OP, "a sequence's new tokens must be among its context_lens",
                f"{n} of {length} at {b}")
        require(tree_mask is None or n <= tree_mask.shape[1], OP, "tree_mask must be as wide as the longest sequence",
                f"{n} of {0 if tree_mask is None else tree_mask.shape[1]} at {b}")
