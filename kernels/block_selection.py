"""The choice of key blocks for each block of queries: dot products of pooled blocks, then the best of each row.

The router of VSA's fine branch (arXiv 2505.13389), also without training: `block_scores` pools blocks to their mean in
fp32 and takes dot products (subtracting K's mean would shift each row by a constant and change no choice),
`select_blocks` takes the best blocks of each row and those that are forced.
The choice is defined to the last tie, so that every path makes the same one: by score, equal scores by their id.
The two stay apart: the coarse branch of `gated_sparse_attention` reads the scores too, and one kernel for both would
save their 56 MB there and back at Wan 14B's 720p, 23 us on an H200 beside 15 ms of sparse attention at its floor.
"""

import torch
import torch.nn.functional as F

from kernels.attention_torch import DTYPES
from kernels.block_sparse_attention import BLOCK_SIZES
from kernels.dispatch import refuse_gradients, require, tl, triton, uses_triton

# key blocks of a row that stay in the registers of sixteen warps: a million tokens in blocks of 64
MAX_BLOCKS = 16_384


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
    scores: torch.Tensor, num_blocks: int, *, forced: torch.Tensor | None = None, check_forced: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best key blocks of each query block, ids ascending.

    scores: `[B, H, Qb, Kb]` fp32, any strides; no gradient goes through the choice. Of equal scores (-0 and 0 among
    them) the lower id wins; NaN counts as -inf. num_blocks: how many each row takes, 1..Kb, forced ones among them.
    forced: `[Kb]` or `[..., Qb, Kb]` bool, blocks that come before all others, at most num_blocks a row.
    check_forced: count them on the host; None: on CPU only. Where nobody counts, the lowest ids of too many are taken.
    Returns block_indices `[B, H, Qb, num_blocks]` and block_counts `[B, H, Qb]` int32.
    Raises ValueError for shapes, types, devices or counts that do not fit.
    """
    op = "select_blocks"
    require(scores.ndim == 4, op, "scores must be [B, H, Qb, Kb]", list(scores.shape))
    require(1 <= num_blocks <= scores.shape[-1], op, f"num_blocks must be in 1..{scores.shape[-1]}", num_blocks)
    require(scores.dtype == torch.float32, op, "scores must be fp32", scores.dtype)
    if forced is not None:
        require(forced.dtype == torch.bool and 1 <= forced.ndim <= 4 and forced.shape[-1] == scores.shape[-1]
                and all(a in (1, b) for a, b in zip(forced.shape[::-1], scores.shape[::-1], strict=False)),
                op, f"forced must be bool that broadcasts to {list(scores.shape)}, a place a key block",
                (forced.dtype, list(forced.shape)))
        require(forced.device == scores.device, op, f"forced must be on {scores.device} like the scores",
                forced.device)
        if forced.device.type == "cpu" if check_forced is None else check_forced:
            most = int(forced.sum(-1).max()) if forced.numel() else 0
            require(most <= num_blocks, op, f"forced must be at most num_blocks {num_blocks} a row", most)
    scores = scores.detach()
    fits = scores.shape[-1] <= MAX_BLOCKS
    return (select_blocks_triton if uses_triton(scores) and fits else select_blocks_torch)(scores, num_blocks, forced)


@triton.jit
def _select_kernel(
    scores, forced, block_indices, block_counts, stride_sb, stride_sh, stride_sq, stride_fb, stride_fh, stride_fq,
    num_heads, num_rows, width, num_blocks, BLOCK: tl.constexpr, HAS_FORCED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    ids = tl.arange(0, BLOCK)
    is_block = ids < width
    score = tl.load(scores + batch * stride_sb + head * stride_sh + row * stride_sq + ids, mask=is_block,
                    other=float("-inf"))
    # one zero and no NaN: equal scores have equal bits
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if HAS_FORCED:
        is_forced = tl.load(forced + batch * stride_fb + head * stride_fh + row * stride_fq + ids, mask=is_block,
                            other=0)
        keys = tl.where(is_forced != 0, 2147483647, keys)
    low = tl.min(tl.where(is_block, keys, 2147483647), 0)
    # below every score's key, so that what lies beyond the row is never counted
    keys = tl.where(is_block, keys, -2147483648)
    high = tl.max(keys, 0)
    # invariant: num_blocks keys at least lie at or above low, fewer above high; a place that parts them ends it early
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # of both, rounded up, without a carry
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(count >= num_blocks, middle, low)
        high = tl.where(count == num_blocks, low, tl.where(count > num_blocks, high, middle - 1))
    is_above = keys > low
    is_tied = keys == low
    missing = num_blocks - tl.sum(is_above.to(tl.int32), 0)
    is_taken = is_above | (is_tied & (tl.cumsum(is_tied.to(tl.int32), 0) <= missing))
    place = tl.cumsum(is_taken.to(tl.int32), 0) - 1
    out_row = batch_head * num_rows + row
    tl.store(block_indices + out_row * num_blocks + place, ids, mask=is_taken)
    tl.store(block_counts + out_row, num_blocks)


def select_blocks_triton(
    scores: torch.Tensor, num_blocks: int, forced: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated arguments, at most MAX_BLOCKS wide: a program a row, which stays in registers.

    The threshold is found by bisection over the bits of fp32, without a sort: 32 steps at most, each a count, 14 to 17
    on average for an eighth of 256 to 2048 normal scores. Counts are exact, so that repeats are equal.
    """
    batch, num_heads, num_rows, width = scores.shape
    block_indices = torch.empty(batch, num_heads, num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    block_counts = torch.empty(batch, num_heads, num_rows, dtype=torch.int32, device=scores.device)
    if block_counts.numel():
        scores = scores if scores.stride(3) == 1 else scores.contiguous()
        marks = scores if forced is None else forced.contiguous().view(torch.uint8).expand(scores.shape)
        block = triton.next_power_of_2(width)
        # up to 512 blocks a row belongs to one warp, which counts without a barrier
        _select_kernel[(num_rows, batch * num_heads)](
            scores, marks, block_indices, block_counts, *scores.stride()[:3], *marks.stride()[:3], num_heads, num_rows,
            width, num_blocks, BLOCK=block, HAS_FORCED=forced is not None, num_warps=max(1, min(16, block // 512)))
    return block_indices, block_counts


def select_blocks_torch(
    scores: torch.Tensor, num_blocks: int, forced: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by torch's top-k, which leaves ties open, where none lies on its border: half the reference's time."""
    ranked = torch.where(scores.isnan(), float("-inf"), scores)
    if forced is not None:
        ranked = torch.where(forced, float("inf"), ranked)
    best = ranked.topk(num_blocks, dim=-1, sorted=False)
    if bool(((ranked >= best.values.amin(-1, keepdim=True)).sum(-1) > num_blocks).any()):
        return select_blocks_reference(scores, num_blocks, forced)
    indices = best.indices.to(torch.int32).sort(dim=-1).values
    return indices, torch.full(indices.shape[:-1], num_blocks, dtype=torch.int32, device=indices.device)


def select_blocks_reference(
    scores: torch.Tensor, num_blocks: int, forced: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose in plain torch: the largest of keys that hold the order of score and id, no two of them equal."""
    bits = (torch.where(scores.isnan(), float("-inf"), scores) + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    if forced is not None:
        keys = torch.where(forced, 2**31 - 1, keys)
    keys = keys * 2**32 - torch.arange(keys.shape[-1], device=keys.device)
    indices = keys.topk(num_blocks, dim=-1, sorted=False).indices.to(torch.int32).sort(dim=-1).values
    return indices, torch.full(indices.shape[:-1], num_blocks, dtype=torch.int32, device=indices.device)


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
