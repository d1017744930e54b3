"""Launches that ship, by op and card, for where nothing was tuned. Each says whether a sweep stands behind it.

`autotune` falls back to them; attention over whole sequences and over lists of blocks asks for its launch here itself.
`sizes` bounds a row: it holds for shapes whose named sizes are at most these; the first row that holds is taken.
A row is untuned until a sweep by `autotune` on that card was run; its date, card, sweep and gain then go into `label`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNTUNED = "shipped, untuned"


@dataclass(frozen=True)
class Shipped:
    """Hold one launch as a dict of its configuration's fields, and what stands behind it."""

    op: str
    arch: int
    config: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "bf16"
    label: str = UNTUNED


def _paged(block_n: int, num_warps: int, num_stages: int, block_m: int) -> dict[str, Any]:
    return {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages, "num_splits": None,
            "block_m": block_m, "span": None}


def _attention(block_m: int, block_n: int, use_tma: bool = True) -> dict[str, Any]:
    return {"block_m": block_m, "block_n": block_n, "num_warps": 8, "num_stages": 2, "use_tma": use_tma,
            "max_registers": None}


def _block_sparse(block_n: int, num_warps: int, use_tma: bool = True) -> dict[str, Any]:
    return {"block_n": block_n, "num_warps": num_warps, "num_stages": 2, "use_tma": use_tma, "max_registers": None}


def _gemm(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_warps": num_warps,
            "num_stages": num_stages}


def _gemv(block_n: int, block_k: int) -> dict[str, Any]:
    return {"block_n": block_n, "block_k": block_k, "num_warps": 4, "num_stages": 1}


SHIPPED: tuple[Shipped, ...] = (
    # d: head dim; packed: 1 for several sequences in one tensor, which have no descriptors
    Shipped("attention", 90, _attention(128, 128), {"d": 128}),
    Shipped("attention", 90, _attention(128, 64), {"d": 256}),
    Shipped("attention", 100, _attention(128, 128), {"d": 128, "packed": 0}),
    Shipped("attention", 100, _attention(128, 64), {"d": 256, "packed": 0}),
    # behind pointers, twice the keys a step exceed a thread's registers: 80 B of stack at 128 channels with Triton 3.6,
    # 24 B at 256 with 3.9 (compiled 2026-11-30 and 2026-12-01)
    Shipped("attention", 100, _attention(128, 64), {"d": 128, "packed": 1}),
    Shipped("attention", 100, _attention(128, 32), {"d": 256, "packed": 1}),
    # 101,376 B of shared memory a block, not 232,448
    Shipped("attention", 120, _attention(128, 64), {"d": 128}),
    Shipped("attention", 120, _attention(64, 32, use_tma=False), {"d": 256}),
    # block_q, block_k: tokens a block
    *(row for arch in (90, 100) for row in (
        Shipped("block_sparse_attention", arch, _block_sparse(64, 4), {"block_q": 64, "block_k": 64, "d": 128}),
        Shipped("block_sparse_attention", arch, _block_sparse(64, 8), {"block_k": 64, "d": 128}),
        Shipped("block_sparse_attention", arch, _block_sparse(128, 4), {"block_q": 64, "d": 128}),
        Shipped("block_sparse_attention", arch, _block_sparse(128, 8), {"d": 128}),
        Shipped("block_sparse_attention", arch, _block_sparse(64, 4), {"block_q": 64, "d": 256}),
        Shipped("block_sparse_attention", arch, _block_sparse(64, 8), {"d": 256}),
    )),
    Shipped("block_sparse_attention", 120, _block_sparse(64, 4), {"block_q": 64, "d": 64}),
    Shipped("block_sparse_attention", 120, _block_sparse(64, 8), {"d": 128}),
    Shipped("block_sparse_attention", 120, _block_sparse(16, 8, use_tma=False), {"d": 256}),
    # rows: query tokens times heads of one key head's group; d: key width
    *(row for arch in (90, 100) for row in (
        Shipped("paged_attention", arch, _paged(64, 4, 3, 16), {"rows": 16, "d": 128}),
        Shipped("paged_attention", arch, _paged(64, 4, 3, 32), {"rows": 32, "d": 128}),
        Shipped("paged_attention", arch, _paged(64, 8, 2, 64), {"d": 128}),
        Shipped("paged_attention", arch, _paged(32, 4, 2, 16), {"d": 256}),
        Shipped("paged_attention", arch, _paged(32, 8, 2, 16), {"d": 1024}),
        Shipped("nvfp4_gemv", arch, _gemv(8, 2048), {"m": 1}),
        Shipped("nvfp4_gemm", arch, _gemm(16, 64, 128, 4, 3), {"m": 16}),
        Shipped("nvfp4_gemm", arch, _gemm(64, 128, 64, 8, 3), {"m": 64}),
        Shipped("nvfp4_gemm", arch, _gemm(128, 128, 64, 8, 3)),
    )),
    Shipped("nvfp4_w4a4", 100, {**_gemm(128, 128, 128, 8, 3), "fused": True}, {"m": 128}),
    Shipped("nvfp4_w4a4", 100, {**_gemm(128, 128, 256, 8, 3), "fused": False}),
)


def card_family(sm: tuple[int, int]) -> int:
    """Return the card whose rows hold for compute capability sm: 90, 100 (11.x too), 120 and later, or sm's own."""
    if sm >= (12, 0):
        return 120
    if sm >= (10, 0):
        return 100
    return 90 if sm >= (9, 0) else 10 * sm[0] + sm[1]


def shipped_config(op: str, arch: int, shape: Mapping[str, int], dtype: str) -> Shipped | None:
    """Return the first row for op on arch that holds for shape, or None."""
    for row in SHIPPED:
        if (row.op, row.arch, row.dtype) == (op, arch, dtype) and all(
                shape.get(name, 0) <= size for name, size in row.sizes.items()):
            return row
    return None
