"""Writes new keys and values into paged blocks by slot: slot = page id · page size + offset, negative slots skipped.

A cache of float8_e4m3fn holds value / scale, saturated at 448 and rounded to nearest even (OCP 8-bit floating point
specification, 2023), one scale for all heads or one a head.
"""

import torch

from kernels.dispatch import require, require_scales, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E4M3_MAX = 448.0
MAX_HEAD_DIM = 1024


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check_slots: bool | None = None,
) -> None:
    """Write each token's keys and values to its slot, in place.

    k: `[N, Hkv, D]`, v: `[N, Hkv, Dv]` fp16, bf16 or fp32. k_cache: `[P, page, Hkv, D]`, v_cache:
    `[P, page, Hkv, Dv]`, of k's type or float8_e4m3fn. Any strides but the last. v and v_cache are None where one
    latent is both (MLA). slot_mapping: `[N]` int32 or int64, below P · page, each slot at most once; tokens
    of negative ones are not stored.
    k_scale, v_scale: `[]` or `[Hkv]` fp32 above 0, for float8 caches, which need them.
    check_slots: read the slots on the host and refuse those outside the cache; None: on CPU only.
    Raises ValueError for shapes, types, strides, devices, or slots (with check_slots) that do not fit.
    """
    _validate(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if (k.device.type == "cpu" if check_slots is None else check_slots) and slot_mapping.numel():
        largest, num_slots = int(slot_mapping.max()), k_cache.shape[0] * k_cache.shape[1]
        require(largest < num_slots, "kv_store", f"slots must be below {num_slots}", largest)
    store = kv_store_triton if uses_triton(k) else kv_store_reference
    store(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


@triton.jit
def _to_e4m3(x, scale):
    """Round fp32 to the bits of float8_e4m3fn by integers: the same on every card and in the interpreter."""
    value = tl.div_rn(x, scale)
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    magnitude = tl.minimum(tl.abs(value), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 524287 + ((bits >> 20) & 1)) >> 20) - 960
    # below 2^-6 codes are multiples of 2^-9: adding 2^23 rounds to a whole number in the low bits
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (tl.where(value != value, 127, code) | sign).to(tl.uint8)


@triton.jit
def _store_rows(
    x, cache, scale, tokens, heads, slots, stride_n, stride_h, stride_cp, stride_ct, stride_ch, stride_s, is_row,
    page, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, :, None] & (columns < WIDTH)[None, None, :]
    rows = x + tokens[:, None] * stride_n + heads[None, :] * stride_h
    values = tl.load(rows[:, :, None] + columns[None, None, :], mask=mask, other=0.0)
    places = cache + (slots // page * stride_cp + slots % page * stride_ct)[:, None] + heads[None, :] * stride_ch
    if FP8:
        # heads of no row divide by the last real one's scale
        scales = tl.load(scale + heads * stride_s, mask=tl.max(is_row.to(tl.int32), 0) > 0, other=1.0)
        values = _to_e4m3(values.to(tl.float32), scales[None, :, None])
    tl.store(places[:, :, None] + columns[None, None, :], values, mask=mask)


@triton.jit
def _kv_store_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_kcp, stride_kct, stride_kch, stride_vcp, stride_vct, stride_vch,
    stride_sn, stride_ks, stride_vs, n, num_heads, page,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_V: tl.constexpr, FP8: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    slots = tl.load(slot_mapping + tokens * stride_sn, mask=tokens < n, other=-1).to(tl.int64)
    is_row = (slots >= 0)[:, None] & (heads < num_heads)[None, :]
    _store_rows(k, k_cache, k_scale, tokens, heads, slots, stride_kn, stride_kh, stride_kcp, stride_kct, stride_kch,
                stride_ks, is_row, page, K_DIM, BLOCK_K, FP8)
    if HAS_V:
        _store_rows(v, v_cache, v_scale, tokens, heads, slots, stride_vn, stride_vh, stride_vcp, stride_vct,
                    stride_vch, stride_vs, is_row, page, V_DIM, BLOCK_V, FP8)


def kv_store_triton(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Launch the kernel on validated tensors."""
    n, num_heads, k_dim = k.shape
    if k.numel() == 0:
        return
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    values, value_cache = (k, k_cache) if v is None or v_cache is None else (v, v_cache)
    v_dim = values.shape[2]
    block_k, block_v = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    block_h = min(triton.next_power_of_2(num_heads), 8)
    block_n = max(1, min(16, 4096 // (max(block_k, block_v) * block_h)))
    if is_fp8:
        k_cache, value_cache = k_cache.view(torch.uint8), value_cache.view(torch.uint8)
    scales = [k if scale is None else scale for scale in (k_scale, v_scale)]
    _kv_store_kernel[(triton.cdiv(n, block_n), triton.cdiv(num_heads, block_h))](
        k, values, k_cache, value_cache, slot_mapping, *scales,
        *k.stride()[:2], *values.stride()[:2], *k_cache.stride()[:3], *value_cache.stride()[:3], slot_mapping.stride(0),
        *(scale.stride(0) if scale.ndim == 1 else 0 for scale in scales), n, num_heads, k_cache.shape[1],
        K_DIM=k_dim, V_DIM=v_dim, BLOCK_K=block_k, BLOCK_V=block_v, BLOCK_N=block_n, BLOCK_H=block_h,
        HAS_V=v is not None, FP8=is_fp8, num_warps=4)


def kv_store_reference(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write in plain torch, by slot where a cache's pages lie one behind the other, else by page and offset."""
    is_stored = slot_mapping >= 0
    is_whole = bool(is_stored.all())
    slots = (slot_mapping if is_whole else slot_mapping[is_stored]).long()
    page = k_cache.shape[1]
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if x is None or cache is None:
            continue
        rows = x.detach() if is_whole else x.detach()[is_stored]
        if scale is not None:
            wide = (rows.float() / scale.reshape(-1, 1)).clamp(-E4M3_MAX, E4M3_MAX)
            # an index cannot write float8: its bytes can be written
            rows, cache = wide.to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        if cache.stride(0) == page * cache.stride(1):
            cache.flatten(0, 1)[slots] = rows
        else:
            cache[slots // page, slots % page] = rows


def _validate(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    op = "kv_store"
    require((v is None) == (v_cache is None), op, "v and v_cache must be given together", "one of them")
    require(k.ndim == 3 and 1 <= k.shape[2] <= MAX_HEAD_DIM, op, f"k must be [N, Hkv, D] with D in 1..{MAX_HEAD_DIM}",
            list(k.shape))
    require(k.dtype in DTYPES, op, "k must be fp16, bf16 or fp32", k.dtype)
    require(slot_mapping.shape == k.shape[:1] and slot_mapping.dtype in (torch.int32, torch.int64), op,
            f"slot_mapping must be [{k.shape[0]}] int32 or int64", (list(slot_mapping.shape), slot_mapping.dtype))
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    for name, x, cache, scale in (("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale)):
        if x is None or cache is None:
            require(scale is None, op, f"{name}_scale must be None without {name}", scale)
            continue
        require(x.ndim == 3 and x.shape[:2] == k.shape[:2] and 1 <= x.shape[2] <= MAX_HEAD_DIM, op,
                f"{name} must be [{k.shape[0]}, {k.shape[1]}, D] to match k", list(x.shape))
        require(x.dtype == k.dtype, op, f"{name} must be {k.dtype} like k", x.dtype)
        require(cache.ndim == 4 and cache.shape[:2] == k_cache.shape[:2] and cache.shape[2:] == x.shape[1:], op,
                f"{name}_cache must be [P, page, {x.shape[1]}, {x.shape[2]}] to match {name}", list(cache.shape))
        require(cache.dtype == k_cache.dtype and (is_fp8 or cache.dtype == x.dtype), op,
                f"{name}_cache must be {x.dtype} like {name}, or float8_e4m3fn, both alike", cache.dtype)
        require((scale is not None) == is_fp8, op, f"{name}_scale must be given for a float8 cache and for no other",
                (cache.dtype, scale))
        if scale is not None:
            require(scale.dtype == torch.float32 and scale.shape in ((), (k.shape[1],)), op,
                    f"{name}_scale must be [] or [{k.shape[1]}] fp32", (list(scale.shape), scale.dtype))
            require(scale.device == k.device, op, f"{name}_scale must be on {k.device} like k", scale.device)
            require_scales(scale, op, f"{name}_scale")
        for part, tensor in ((name, x), (f"{name}_cache", cache)):
            require(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, op, f"{part}'s last stride must be 1",
                    tensor.stride())
            require(tensor.device == slot_mapping.device, op, f"{part} must be on {slot_mapping.device} like the slots",
                    tensor.device)
