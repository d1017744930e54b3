"""What `gpu_check` runs: for each op real sizes, a few launch configurations, torch's own ways, a reference in fp64.

The launch that the card takes by itself comes first, then others to compare it with; what a card has no room for is
refused by it and not counted. The most valuable checks come first. `SMALL_CASES` are of all kernels at sizes that a
checker of memory or an interpreter gets through.
"""

from typing import Any

import torch

from kernels import attention, block_sparse_attention, block_sparse_backward
from kernels.attention import AttentionConfig
from kernels.block_sparse_attention import BlockSparseConfig
from kernels.block_sparse_backward import BackwardConfig
from kernels.gpu_case import Case, with_default
from kernels.gpu_cases_attention import choice_case, dense_case, packed_case, select_case, sparse_case
from kernels.gpu_cases_backward import dense_backward_case, sparse_backward_case
from kernels.gpu_cases_decode import decode_case, mixed_case, paged_case
from kernels.gpu_cases_quantized import fp8_case, nvfp4_case, quantize_case, w4a4_case
from kernels.gpu_cases_rows import (
    ROW_CASES,
    gelu_case,
    head_norm_case,
    kv_store_case,
    layer_norm_case,
    norm_case,
    rotary_3d_case,
    rotary_case,
    silu_mul_case,
    tile_case,
)
from kernels.gpu_cases_sampling import SAMPLING_CASES, sampling_case, spec_accept_case
from kernels.paged_attention import PagedConfig
from kernels.quantization.nvfp4 import GemmConfig, GemvConfig
from kernels.quantization.nvfp4_w4a4 import W4A4Config, default_w4a4_config

WAN_480P_TOKENS, WAN_HEADS = 32_760, 12
Capability = tuple[int, int]


def cases(sm: Capability) -> tuple[Case, ...]:
    """Return the checks of a card of compute capability sm, the most valuable first."""
    wan = (WAN_HEADS, WAN_480P_TOKENS)
    return (
        dense_case("dense Wan 480p", 1, WAN_HEADS, WAN_HEADS, WAN_480P_TOKENS, 128, False, _dense(
            128, sm, AttentionConfig(128, 128, 8, 2, True), AttentionConfig(128, 64, 8, 2, True, 128),
            AttentionConfig(64, 64, 4, 2, True), AttentionConfig(128, 64, 8, 3, True),
            AttentionConfig(64, 128, 4, 2, True), AttentionConfig(128, 128, 8, 3, True),
            AttentionConfig(128, 64, 8, 3, False))),
        sparse_case("sparse Wan 480p, 128", *wan, 128, 0.125, _sparse(
            128, sm, BlockSparseConfig(128, 8, 2, True), BlockSparseConfig(64, 8, 2, True, 128),
            BlockSparseConfig(64, 8, 3, True), BlockSparseConfig(64, 8, 2, False)), peers_of="dense Wan 480p"),
        sparse_case("sparse Wan 480p, 64", *wan, 64, 0.125, _sparse(
            64, sm, BlockSparseConfig(64, 4, 2, True), BlockSparseConfig(64, 4, 3, True),
            BlockSparseConfig(64, 4, 3, False)), peers_of="dense Wan 480p"),
        decode_case("decode B64, page 64", 64, 4096, 64, (
            PagedConfig(64, 4, 3, 4), PagedConfig(64, 4, 5, 4), PagedConfig(64, 4, 5, 2), PagedConfig(128, 8, 2, 4))),
        nvfp4_case("NVFP4 GEMV 14336x4096", 1, 14336, 4096, 8, (
            GemvConfig(8, 2048, 4, 1), GemvConfig(4, 4096, 4, 1), GemvConfig(8, 4096, 8, 1), GemvConfig(4, 2048, 4, 1),
            GemvConfig(8, 1024, 4, 1), GemvConfig(4, 1024, 2, 1), GemmConfig(16, 32, 256, 4, 4))),
        *(dense_case(f"dense D{d} causal", 1, 8, 2, 4000, d, True, _dense(
            d, sm, AttentionConfig(128, 64, 8, 2, d in (64, 256)))) for d in (64, 80, 96, 256)),
        *_backward_cases(sm),
        decode_case("decode B1, page 16", 1, 32768, 16, (PagedConfig(64, 4, 3, 64), PagedConfig(64, 4, 5, 64))),
        nvfp4_case("NVFP4 GEMV 4096x4096", 1, 4096, 4096, 32, (
            GemvConfig(8, 2048, 4, 1), GemvConfig(4, 4096, 4, 1), GemvConfig(4, 2048, 4, 1),
            GemvConfig(2, 4096, 4, 1))),
        nvfp4_case("NVFP4 GEMM M2048", 2048, 14336, 4096, 2, (
            GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 256, 64, 8, 3))),
        nvfp4_case("NVFP4 M16", 16, 14336, 4096, 8, (GemmConfig(16, 64, 128, 4, 3), GemmConfig(16, 32, 256, 4, 4))),
        select_case("scores and top-k, 128", WAN_HEADS, WAN_480P_TOKENS, 128),
        choice_case("top-k, Wan 720p", 40, 591, 74),
        choice_case("top-k of 2048", 4, 2048, 256),
        dense_case("causal GQA 8192", 2, 32, 8, 8192, 128, True, _dense(
            128, sm, AttentionConfig(128, 128, 8, 2, True), AttentionConfig(128, 64, 8, 3, True))),
        packed_case("packed 8192", (4096, 1, 0, 777, 3318), 32, 8, 128, with_default(
            attention.default_config(_like(128), sm, is_packed=True), AttentionConfig(128, 64, 8, 3, False),
            AttentionConfig(128, 128, 8, 2, False))),
        *ROW_CASES,
        *SAMPLING_CASES,
        *_decode_cases(),
        *(_w4a4_cases(sm) if sm >= (10, 0) else ()),
    )


def _like(d: int) -> torch.Tensor:
    return torch.empty(1, 1, 1, d, dtype=torch.bfloat16)


def _dense(d: int, sm: Capability, *others: AttentionConfig) -> tuple[Any, ...]:
    return with_default(attention.default_config(_like(d), sm), *others)


def _sparse(block: int, sm: Capability, *others: BlockSparseConfig) -> tuple[Any, ...]:
    return with_default(block_sparse_attention.default_config(_like(128), block, block, sm), *others)


def _backward(d: int, sm: Capability, *others: BackwardConfig) -> tuple[Any, ...]:
    return with_default(block_sparse_backward.default_backward_config(_like(d), sm), *others)


def _backward_cases(sm: Capability) -> tuple[Case, ...]:
    wan = (WAN_HEADS, WAN_480P_TOKENS)
    return (
        dense_backward_case("dense Wan 480p, gradients", WAN_HEADS, WAN_HEADS, WAN_480P_TOKENS, 128, False),
        sparse_backward_case("sparse Wan 480p, 128, gradients", *wan, 128, 0.125, 128, _backward(
            128, sm, BackwardConfig(64, 64, 8, 3), BackwardConfig(64, 64, 4, 2), BackwardConfig(64, 128, 8, 2)),
            peers_of="dense Wan 480p, gradients"),
        sparse_backward_case("sparse Wan 480p, 64, gradients", *wan, 64, 0.125, 128, _backward(128, sm),
                             peers_of="dense Wan 480p, gradients"),
        *(sparse_backward_case(f"sparse D{d}, gradients", 4, 4000, 128, 0.25, d, _backward(d, sm))
          for d in (64, 80, 96, 256)),
        dense_backward_case("causal GQA 8192, gradients", 32, 8, 8192, 128, True),
    )


def _decode_cases() -> tuple[Case, ...]:
    return (
        paged_case("decode fp8 B64", 64, 1, 4096, (PagedConfig(64, 4, 3, 4, 16), PagedConfig(64, 4, 5, 4, 16)),
                   fp8=True),
        paged_case("prefill chunk 2048 of 8192", 1, 2048, 8192, (
            PagedConfig(64, 8, 2, 1, 64), PagedConfig(64, 4, 2, 1, 64), PagedConfig(64, 8, 3, 1, 64))),
        mixed_case("mixed batch", (512, *[1] * 30, 0, 1, 7), (2048, *range(100, 3100, 100), 0, 1, 7), (
            PagedConfig(64, 4, 3, 2, 32), PagedConfig(64, 4, 2, 1, 64))),
        paged_case("latents B32", 32, 1, 4096, (PagedConfig(32, 8, 2, 4, 16), PagedConfig(16, 4, 2, 4, 16)),
                   heads=128, kv_heads=1, d=576, dv=512),
        paged_case("verify tree of 16, B16", 16, 16, 4096, (
            PagedConfig(64, 8, 2, 4, 64), PagedConfig(32, 4, 3, 4, 32)), tree=True),
        paged_case("decode invariant B64", 64, 1, 4096, (PagedConfig(64, 4, 3, None, 16, 1024),)),
        paged_case("decode window, sinks, soft cap", 64, 1, 4096, (PagedConfig(64, 4, 3, 2, 16),), window=1024,
                   sinks=True, soft_cap=30.0),
        fp8_case("FP8 M2048 per channel", 2048, 14336, 4096, "channel"),
        fp8_case("FP8 M16 per tensor", 16, 14336, 4096, "tensor"),
        quantize_case("NVFP4 activations 2048x4096", 2048, 4096),
    )


def _w4a4_cases(sm: Capability) -> tuple[Case, ...]:
    # 12.0 has less than half of 10.0's shared memory: its own launches alone
    others = (W4A4Config(128, 256, 256, 8, 3, False),) if sm < (12, 0) else (W4A4Config(64, 128, 128, 4, 2, False),)
    return (
        w4a4_case("W4A4 M16", 16, 14336, 4096, (default_w4a4_config(16, True, sm),)),
        w4a4_case("W4A4 M2048", 2048, 14336, 4096, with_default(default_w4a4_config(2048, True, sm), *others)),
    )


SMALL_CASES: tuple[Case, ...] = (
    dense_case("dense", 1, 2, 1, 200, 64, False, (AttentionConfig(128, 128, 4, 2, True),)),
    dense_case("causal", 1, 2, 1, 200, 64, True, (AttentionConfig(128, 128, 4, 2, False),)),
    packed_case("packed", (70, 0, 1, 60), 2, 1, 64, (AttentionConfig(64, 64, 4, 2, False),)),
    sparse_case("sparse", 1, 900, 128, 0.25, (BlockSparseConfig(128, 4, 2, True),)),
    sparse_backward_case("sparse, gradients", 1, 200, 64, 0.5, 64, (BackwardConfig(64, 64, 4, 1),)),
    dense_backward_case("dense, gradients", 2, 1, 150, 64, True),
    select_case("select", 1, 1100, 128),
    choice_case("choice", 2, 9, 3),
    decode_case("decode", 2, 128, 64, (PagedConfig(64, 4, 2, 2),)),
    mixed_case("mixed", (5, 1, 0, 1), (70, 64, 0, 1), (PagedConfig(64, 4, 2, 1, 16),)),
    paged_case("fp8", 2, 1, 100, (PagedConfig(64, 4, 2, 2, 16),), heads=4, kv_heads=2, d=64, dv=64, fp8=True),
    paged_case("chunk", 1, 9, 70, (PagedConfig(64, 4, 2, 1, 16),), heads=4, kv_heads=2, d=64, dv=64),
    paged_case("latents", 3, 1, 64, (PagedConfig(32, 4, 2, 1, 16),), heads=4, kv_heads=1, d=576, dv=512),
    paged_case("tree", 3, 5, 70, (PagedConfig(64, 4, 2, 1, 16),), heads=4, kv_heads=2, d=64, dv=64, tree=True),
    paged_case("all", 2, 1, 128, (PagedConfig(64, 4, 2, 1, 16),), heads=2, kv_heads=2, d=64, dv=64, window=40,
               sinks=True, soft_cap=5.0),
    nvfp4_case("nvfp4", 1, 32, 128, 2, (GemvConfig(16, 64, 4, 2), GemmConfig(16, 32, 64, 4, 2))),
    quantize_case("activations", 5, 128),
    norm_case("norm", 20, 100),
    rotary_3d_case("rotary_3d", (3, 4, 5), 2, 64),
    rotary_case("rotary", 40, 2, 64),
    kv_store_case("kv_store", 100, 2, 64, False),
    kv_store_case("kv_store float8", 100, 2, 64, True),
    layer_norm_case("layer_norm", 20, 100),
    silu_mul_case("silu_mul", 20, 100),
    gelu_case("gelu", 20, 100),
    head_norm_case("head norm", 20, 3, 64, False),
    head_norm_case("norm over heads", 20, 3, 64, True),
    tile_case("tiles", (5, 4, 6), (2, 4, 4), 2, 64),
    sampling_case("sampling", 2, 200, 20, 0.9),
    sampling_case("sampling, no cut", 2, 200, None, None),
    spec_accept_case("spec_accept", 3, 3, 200),
)
