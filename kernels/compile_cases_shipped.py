"""What `compile_check` compiles of `shipped_configs`: a launch for each row, at the largest sizes that it holds for."""

from collections.abc import Callable

import torch

from kernels.attention import AttentionConfig, attention_triton
from kernels.block_sparse_attention import BlockSparseConfig, block_sparse_attention_triton
from kernels.compile_case import DECODE, NATIVE, NOTHING, CompileCase, Kinds, by_width, half, kinds, nvfp4_weight, tiles
from kernels.paged_attention import PagedConfig, paged_attention_triton
from kernels.quantization.nvfp4 import GemmConfig, GemvConfig, nvfp4_linear_triton
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import W4A4Config, nvfp4_w4a4_linear_triton
from kernels.shipped_configs import SHIPPED, Shipped

Launch = Callable[[], object]


def _attention(row: Shipped) -> tuple[Launch, Kinds]:
    d = row.sizes["d"]
    # what holds for packed sequences, which have no descriptors, and for others is launched both ways
    ways = [row.sizes["packed"]] if "packed" in row.sizes else [0, 1]

    def launch() -> None:
        q, k, cu = half(1, 4, 2000, d), half(1, 2, 2000, d), torch.empty(5, dtype=torch.int32)
        for is_packed in ways:
            attention_triton(q, k, k, causal=True, scale=0.1, varlen=(cu, cu, 500) if is_packed else None,
                             config=AttentionConfig(**row.config))

    return launch, [kind for is_packed in ways for kind in (tiles("cp.async") if is_packed else by_width(d))[row.arch]]


def _block_sparse(row: Shipped) -> tuple[Launch, Kinds]:
    block_q, block_k = (row.sizes.get(name, 128) for name in ("block_q", "block_k"))
    blocks = -(-1000 // block_q)

    def launch() -> None:
        q = half(1, 2, 1000, row.sizes["d"])
        block_sparse_attention_triton(
            q, q, q, torch.zeros(1, 2, blocks, 4, dtype=torch.int32), torch.zeros(1, 2, blocks, dtype=torch.int32),
            block_q=block_q, block_k=block_k, scale=0.1, config=BlockSparseConfig(**row.config))

    return launch, by_width(row.sizes["d"])[row.arch]


def _paged(row: Shipped) -> tuple[Launch, Kinds]:
    d, tokens = min(row.sizes["d"], 576), 2 * row.sizes.get("rows", 64)

    def launch() -> None:
        k = half(16, 64, 1 if d == 576 else 16, d)
        paged_attention_triton(
            half(tokens, 16, d), k, k[..., :512] if d == 576 else half(*k.shape),
            torch.empty(2, 16, dtype=torch.int32), torch.empty(2, dtype=torch.int32), scale=0.1, window=None,
            cu_seqlens_q=torch.empty(3, dtype=torch.int32), config=PagedConfig(**row.config))

    return launch, _products(row)


def _gemv(row: Shipped) -> tuple[Launch, Kinds]:
    return (lambda: nvfp4_linear_triton(half(row.sizes["m"], 512), nvfp4_weight(), gemv=GemvConfig(**row.config)),
            [NOTHING])


def _gemm(row: Shipped) -> tuple[Launch, Kinds]:
    m = row.sizes.get("m", 256)
    return (lambda: nvfp4_linear_triton(half(m, 512), nvfp4_weight(), gemm=GemmConfig(**row.config)), _products(row))


def _w4a4(row: Shipped) -> tuple[Launch, Kinds]:
    m = row.sizes.get("m", 256)
    return (lambda: nvfp4_w4a4_linear_triton(half(m, 512), nvfp4_weight(), torch.ones(()),
                                             swizzled=swizzle_scales(nvfp4_weight().scales),
                                             config=W4A4Config(**row.config)),
            [kinds("tcgen05", "nvfp4")] if row.config["fused"] else NATIVE[row.arch])


def _products(row: Shipped) -> Kinds:
    """Tiles of few rows never reach the card's own products."""
    return [DECODE] if row.config["block_m"] < 64 else tiles("cp.async")[row.arch]


OPS = {"attention": _attention, "block_sparse_attention": _block_sparse, "paged_attention": _paged,
       "nvfp4_gemv": _gemv, "nvfp4_gemm": _gemm, "nvfp4_w4a4": _w4a4}


def _case(row: Shipped) -> CompileCase:
    launch, expected = OPS[row.op](row)
    sizes = ", ".join(f"{name} up to {size}" for name, size in row.sizes.items()) or "any size"
    return CompileCase(f"shipped {row.op}: {sizes}", lambda arch: launch(), {row.arch: expected}, is_tested=False)


SHIPPED_CASES: tuple[CompileCase, ...] = tuple(_case(row) for row in SHIPPED)
