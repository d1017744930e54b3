"""The choice of key blocks for each block of queries: dot products of pooled blocks, then the best of each row.

The router of VSA's fine branch (arXiv 2505.13389), also without training: `block_scores` pools blocks to their mean in
fp32 and takes dot products (subtracting K's mean would shift each row by a constant and change no choice),
`select_blocks` takes the best blocks of each row and those that are forced.
"""

import torch
import torch.nn.functional as F

from kernels.attention_torch import DTYPES
from kernels.block_sparse_attention import BLOCK_SIZES
from kernels.dispatch import refuse_gradients, require, tl, triton, uses_triton


def block_scores(q: torch.Tensor, k: torch.Tensor, *, block_q: int = 128, block_k: int = 128) -> torch.Tensor:
    """Score key blocks for query blocks: the dot products of their means, `[B, H, ceil(Nq/bq), ceil(Nk/bk)]` fp32.

    q: `[B, H, Nq, D]`, k: `[B, H, Nk, D]`. A ragged last block is divided by its valid count.
    """
    for name, x, size in (("q", q, block_q), ("k", k, block_k)):
        require(x.ndim == 4 and x.shape[2] > 0, "block_scores", f"{name} must be [B, H, N > 0, D]", list(x.shape))
        require(size in BLOCK_SIZES, "block_scores", f"block size must be one of {BLOCK_SIZES}", size)
        require(x.stride(-1) == 1, "block_scores", f"{name}'s last stride must be 1", x.stride())
        require(x.dtype in DTYPES and x.dtype == q.dtype, "block_scores", f"{name} must be fp16, bf16 or fp32 like q",
                x.dtype)
        require(x.device == q.device, "block_scores", f"{name} must be on {q.device} like q", x.device)
    require(k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3], "block_scores",
            f"k must be [B, H, Nk, D] to match q {list(q.shape)}", list(k.shape))
    return pool_blocks(q, block_q) @ pool_blocks(k, block_k).transpose(-1, -2)


def pool_blocks(x: torch.Tensor, block: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Average x over blocks of tokens.

    x: `[B, H, N, D]`. lengths: `[ceil(N / block)]` int32, how many tokens of each block count, at least 1; all by
    default. Returns `[B, H, ceil(N / block), D]` fp32; gradients by torch.
    """
    return (pool_blocks_triton if uses_triton(x) else pool_blocks_reference)(x, block, lengths)


def select_blocks(
    scores: torch.Tensor, num_blocks: int, *, forced: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best key blocks of each query block, ids ascending.

    scores: `[B, H, Qb, Kb]` fp32. num_blocks: how many each row takes, 1..Kb, forced ones among them.
    forced: `[Kb]` or `[..., Qb, Kb]` bool, blocks that are always taken, at most num_blocks a row.
    Returns block_indices `[B, H, Qb, num_blocks]` and block_counts `[B, H, Qb]` int32.
    """
    require(scores.ndim == 4, "select_blocks", "scores must be [B, H, Qb, Kb]", list(scores.shape))
    require(1 <= num_blocks <= scores.shape[-1], "select_blocks", f"num_blocks must be in 1..{scores.shape[-1]}",
            num_blocks)
    require(scores.is_floating_point(), "select_blocks", "scores must be floating point", scores.dtype)
    if forced is not None:
        require(forced.dtype == torch.bool and forced.ndim <= 4 and forced.shape[-1] == scores.shape[-1]
                and all(a in (1, b) for a, b in zip(forced.shape[::-1], scores.shape[::-1], strict=False)),
                "select_blocks", f"forced must be bool that broadcasts to {list(scores.shape)}, a place a key block",
                (forced.dtype, list(forced.shape)))
        require(forced.device == scores.device, "select_blocks", f"forced must be on {scores.device} like the scores",
                forced.device)
        if forced.device.type == "cpu":
            most = int(forced.sum(-1).max()) if forced.numel() else 0
            require(most <= num_blocks, "select_blocks", f"forced must be at most num_blocks {num_blocks} a row", most)
        scores = torch.where(forced, float("inf"), scores)
    indices = scores.topk(num_blocks, dim=-1, sorted=False).indices.to(torch.int32).sort(dim=-1).values
    counts = torch.full(scores.shape[:-1], num_blocks, dtype=torch.int32, device=scores.device)
    return indices, counts


@triton.jit
def _pool_kernel(
    x, means, lengths, stride_xb, stride_xh, stride_xn, stride_mb, stride_mh, stride_mn, num_heads, n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    offs_n = block * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    rows = x + batch * stride_xb + head * stride_xh + offs_n[:, None] * stride_xn + offs_d[None, :]
    count = tl.minimum(n - block * BLOCK, BLOCK)
    if HAS_LENGTHS:
        count = tl.minimum(tl.load(lengths + block), count)
    is_token = tl.arange(0, BLOCK) < count
    tile = tl.load(rows, mask=is_token[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0).to(tl.float32)
    mean = tl.sum(tile, 0) / count.to(tl.float32)
    tl.store(means + batch * stride_mb + head * stride_mh + block * stride_mn + offs_d, mean, mask=offs_d < HEAD_DIM)


def pool_blocks_triton(x: torch.Tensor, block: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Launch the kernel: shapes as in `pool_blocks`, one read of x."""
    refuse_gradients("block_scores", x)
    batch, num_heads, n, head_dim = x.shape
    means = torch.empty(batch, num_heads, triton.cdiv(n, block), head_dim, dtype=torch.float32, device=x.device)
    if means.numel():
        _pool_kernel[(means.shape[2], batch * num_heads)](
            x, means, means if lengths is None else lengths, *x.stride()[:3], *means.stride()[:3], num_heads, n,
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK=block, HAS_LENGTHS=lengths is not None)
    return means


def pool_blocks_reference(x: torch.Tensor, block: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `pool_blocks` in plain torch, in fp32 (fp64 for fp64 inputs)."""
    n = x.shape[2]
    num_blocks = triton.cdiv(n, block)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = F.pad(wide, (0, 0, 0, num_blocks * block - n)).unflatten(2, (num_blocks, block))
    valid = (n - torch.arange(num_blocks, device=x.device) * block).clamp(max=block)
    if lengths is not None:
        valid = torch.minimum(valid, lengths)
        is_token = torch.arange(block, device=x.device) < valid[:, None]
        blocks = torch.where(is_token[..., None], blocks, 0)
    sums: torch.Tensor = blocks.sum(3)
    return sums / valid[:, None]
