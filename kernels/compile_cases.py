"""What `compile_check` compiles: each kernel in the launches that ship, at shapes of real models, and what it must be.

A case launches on tensors without contents; `expected` names the instruction kinds that each kernel it compiles must
have, by card. Tiles of prefill, dense and sparse attention and products reach wgmma on sm_90 and tcgen05 on sm_100;
decode's sixteen rows reach mma.sync and nothing more anywhere. Loads are asynchronous: TMA or cp.async.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels import attention, block_sparse_attention, block_sparse_backward
from kernels.block_selection import MAX_BLOCKS, pool_blocks_triton, select_blocks_triton
from kernels.compile_case import (
    DECODE,
    FP8,
    NATIVE,
    NOTHING,
    CompileCase,
    Kinds,
    by_width,
    everywhere,
    half,
    kinds,
    nvfp4_weight,
    tiles,
)
from kernels.compile_cases_rows import ROW_CASES
from kernels.compile_cases_shipped import SHIPPED_CASES
from kernels.paged_attention import PagedConfig, default_paged_config, invariant_config, paged_attention_triton
from kernels.quantization.nvfp4 import nvfp4_linear_triton
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import default_w4a4_config, nvfp4_w4a4_linear_triton


def _both(loads: str) -> dict[int, Kinds]:
    return {arch: [*one, *one] for arch, one in tiles(loads).items()}


def _dense(head_dim: int, *, causal: bool = False, is_packed: bool = False) -> Callable[[int], object]:
    def launch(arch: int) -> object:
        q, k = half(1, 4, 2000, head_dim), half(1, 2, 2000, head_dim)
        cu = torch.empty(5, dtype=torch.int32)
        return attention.attention_triton(
            q, k, k, causal=causal, scale=0.1, varlen=(cu, cu, 500) if is_packed else None,
            config=attention.default_config(q, divmod(arch, 10), is_packed=is_packed))

    return launch


def _sparse(
    head_dim: int, block: int, *, has_lengths: bool = False, is_backward: bool = False
) -> Callable[[int], object]:
    def launch(arch: int) -> object:
        q = half(1, 2, 1000, head_dim)
        blocks = -(-1000 // block)
        indices = torch.zeros(1, 2, blocks, 4, dtype=torch.int32)
        counts = torch.zeros(1, 2, blocks, dtype=torch.int32)
        lengths = torch.empty(blocks, dtype=torch.int32) if has_lengths else None
        options: dict[str, Any] = {"block_q": block, "block_k": block, "scale": 0.1, "key_lengths": lengths}
        if is_backward:
            lse = torch.empty(1, 2, 1000)
            return block_sparse_backward.block_sparse_backward_triton(
                q, q, q, q, lse, q, lse, indices, counts, **options,
                config=block_sparse_backward.default_backward_config(q, divmod(arch, 10)))
        return block_sparse_attention.block_sparse_attention_triton(
            q, q, q, indices, counts, **options,
            config=block_sparse_attention.default_config(q, block, block, divmod(arch, 10)))

    return launch


def _choice(width: int, *, is_forced: bool) -> Callable[[int], object]:
    forced = torch.empty(width, dtype=torch.bool) if is_forced else None
    return lambda arch: select_blocks_triton(torch.empty(1, 2, 4, width), width // 8, forced)


def _paged(
    d: int = 128, dv: int = 128, *, heads: int = 32, kv_heads: int = 8, page: int = 64, tokens: int | None = None,
    splits: int | None = None, is_fp8: bool = False, is_tree: bool = False, is_invariant: bool = False,
) -> Callable[[int], object]:
    def launch(arch: int) -> object:
        q = half(tokens or 2, heads, d)
        k = half(16, page, kv_heads, d)
        v = k[..., :dv] if d == 576 else half(16, page, kv_heads, dv)
        scale = torch.ones(kv_heads) if is_fp8 else None
        k, v = (x.to(FP8) if is_fp8 else x for x in (k, v))
        rows = (tokens or 2) // 2 * heads // kv_heads
        config = invariant_config(q) if is_invariant else default_paged_config(q, rows)
        if splits is not None:
            config = PagedConfig(**{**vars(config), "num_splits": splits})
        mask = torch.empty(q.shape[0], 64, dtype=torch.bool) if is_tree else None
        return paged_attention_triton(
            q, k, v, torch.empty(2, 4096 // page, dtype=torch.int32), torch.empty(2, dtype=torch.int32), scale=0.1,
            window=None, cu_seqlens_q=None if tokens is None else torch.empty(3, dtype=torch.int32), tree_mask=mask,
            k_scale=scale, v_scale=scale, config=config)

    return launch


def _nvfp4(m: int) -> Callable[[int], object]:
    return lambda arch: nvfp4_linear_triton(half(m, 512), nvfp4_weight())


def _w4a4(m: int, *, is_swizzled: bool) -> Callable[[int], object]:
    def launch(arch: int) -> object:
        weight = nvfp4_weight()
        return nvfp4_w4a4_linear_triton(
            half(m, 512), weight, torch.ones(()), swizzled=swizzle_scales(weight.scales) if is_swizzled else None,
            config=default_w4a4_config(m, is_swizzled, divmod(arch, 10)))

    return launch


CASES: tuple[CompileCase, ...] = (
    *(CompileCase(f"attention, D {d}", _dense(d), by_width(d)) for d in attention.HEAD_DIMS),
    CompileCase("attention, causal", _dense(128, causal=True), tiles("tma")),
    CompileCase("attention, packed", _dense(128, causal=True, is_packed=True), tiles("cp.async")),
    *(CompileCase(f"block-sparse attention, tiles of {block}, D {d}", _sparse(d, block), by_width(d))
      for d, block in ((128, 128), (128, 64), (64, 128), (256, 128))),
    CompileCase("block-sparse attention, tiles with lengths", _sparse(128, 128, has_lengths=True), tiles("tma")),
    *(CompileCase(f"block-sparse backward, tiles of {block}, D {d}", _sparse(d, block, is_backward=True),
                  _both("cp.async")) for d, block in ((128, 128), (64, 64))),
    # 256 channels leave no room for a second stage, so that nothing is loaded ahead
    CompileCase("block-sparse backward, tiles of 128, D 256", _sparse(256, 128, is_backward=True),
                {90: [kinds("wgmma")] * 2, 100: [kinds("tcgen05")] * 2, 120: [kinds("mma")] * 2}, is_tested=False),
    *(CompileCase(f"choice among {width} blocks", _choice(width, is_forced=width < MAX_BLOCKS), everywhere(NOTHING),
                  is_tested=width < MAX_BLOCKS) for width in (591, 2048, MAX_BLOCKS)),
    CompileCase("means of blocks", lambda arch: pool_blocks_triton(half(1, 2, 1000, 128), 128), everywhere(NOTHING)),
    CompileCase("decode", _paged(splits=4), everywhere(DECODE, NOTHING)),
    CompileCase("decode, pages of 16", _paged(page=16, splits=4), everywhere(DECODE, NOTHING), is_tested=False),
    CompileCase("decode, FP8 keys", _paged(splits=4, is_fp8=True), everywhere(DECODE, NOTHING)),
    CompileCase("decode, D 256", _paged(256, 256, splits=4), everywhere(DECODE, NOTHING), is_tested=False),
    CompileCase("decode, latents", _paged(576, 512, heads=16, kv_heads=1, splits=4), everywhere(DECODE, NOTHING)),
    CompileCase("chunk of prefill", _paged(tokens=256, splits=1), tiles("cp.async")),
    CompileCase("verification of a tree", _paged(tokens=64, splits=1, is_tree=True), tiles("cp.async")),
    CompileCase("decode, invariant", _paged(tokens=64, is_invariant=True), everywhere(DECODE, NOTHING)),
    CompileCase("NVFP4, one token", _nvfp4(1), everywhere(NOTHING)),
    CompileCase("NVFP4, 16 tokens", _nvfp4(16), everywhere(DECODE)),
    CompileCase("NVFP4, 256 tokens", _nvfp4(256), tiles("cp.async")),
    # sm_90 has no products of codes
    CompileCase("W4A4, 16 tokens", _w4a4(16, is_swizzled=True),
                {100: [kinds("tcgen05", "nvfp4")], 120: NATIVE[120]}),
    CompileCase("W4A4, 256 tokens", _w4a4(256, is_swizzled=True), NATIVE),
    CompileCase("W4A4, 256 tokens, scales as they are", _w4a4(256, is_swizzled=False), NATIVE),
    *(CompileCase(name, lambda arch, launch=launch: launch(), everywhere(*[NOTHING] * count))  # type: ignore[misc]
      for name, launch, count in ROW_CASES),
    *SHIPPED_CASES,
)
