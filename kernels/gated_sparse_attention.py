"""Video sparse attention: a coarse branch over blocks and a fine one over chosen blocks, each with its gate.

VSA (arXiv 2505.13389): tokens lie in tiles (`tile_order`), each a block. Coarse: attention among the blocks' means,
every token takes its block's output. Fine: attention of each block to the num_blocks key blocks that the coarse scores
rank highest. O = gate_coarse ∘ coarse + gate_fine ∘ fine; the choice has no gradient, both branches have.
The coarse branch and the sum are fp32, rounded once.
"""

from collections.abc import Sequence

import torch

from kernels.attention_torch import softmax_with_lse, validate_attention
from kernels.block_selection import pool_blocks, pool_blocks_reference, select_blocks
from kernels.block_sparse_attention import block_sparse_attention
from kernels.block_sparse_torch import BLOCK_SIZES, block_sparse_attention_reference
from kernels.dispatch import require


def gated_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_coarse: torch.Tensor,
    num_blocks: int,
    *,
    gate_fine: torch.Tensor | None = None,
    block: int = 128,
    lengths: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend by both branches.

    q, k, v: `[B, H, N, D]` of one clip in tile order, fp16, bf16 or fp32, D of HEAD_DIMS. gate_coarse, gate_fine: like
    q or broadcasting to it (`[B, H, N, 1]`), gate_fine 1 by default. num_blocks: key blocks of each query block in the
    fine branch, 1..ceil(N / block). block: tokens a tile, 64 or 128. lengths: `[ceil(N / block)]` int32 in 1..block,
    the real tokens of each tile (`tile_lengths`), read on CPU only; what lies beyond is not seen but must be finite,
    and its outputs mean nothing. forced: as in `select_blocks`. scale: above 0, D ** -0.5 by default.
    Returns `[B, H, N, D]` in q's type. Raises ValueError for what does not fit.
    """
    scale = _validate(q, k, v, gate_coarse, gate_fine, num_blocks, block, lengths, scale)
    means = [pool_blocks(x, block, lengths) for x in (q, k, v)]
    coarse, scores = _coarse(means, scale)
    indices, counts = select_blocks(scores.detach(), num_blocks, forced=forced)
    fine, _ = block_sparse_attention(q, k, v, indices, counts, block_q=block, block_k=block, key_lengths=lengths,
                                     scale=scale, check_blocks=False)
    return _join(coarse, fine, gate_coarse, gate_fine, block).to(q.dtype)


def gated_sparse_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_coarse: torch.Tensor,
    num_blocks: int,
    *,
    gate_fine: torch.Tensor | None = None,
    block: int = 128,
    lengths: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `gated_sparse_attention` in plain torch, with dense masks, in fp32 (fp64 for fp64 inputs)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    means = [pool_blocks_reference(x, block, lengths) for x in (q, k, v)]
    coarse, scores = _coarse(means, scale)
    indices, counts = select_blocks(scores.detach().float(), num_blocks, forced=forced)
    fine, _ = block_sparse_attention_reference(q, k, v, indices, counts, block_q=block, block_k=block,
                                               key_lengths=lengths, scale=scale)
    return _join(coarse, fine, gate_coarse, gate_fine, block).to(q.dtype)


def _coarse(means: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend among the blocks' means of q, k, v: `[B, H, blocks, D]` outputs, `[B, H, blocks, blocks]` scores."""
    q, k, v = means
    scores = q @ k.transpose(-1, -2) * scale
    return softmax_with_lse(scores)[0] @ v, scores


def _join(
    coarse: torch.Tensor, fine: torch.Tensor, gate_coarse: torch.Tensor, gate_fine: torch.Tensor | None, block: int
) -> torch.Tensor:
    wide = coarse.dtype
    spread = coarse.repeat_interleave(block, 2)[:, :, : fine.shape[2]]
    weighted = fine.to(wide) if gate_fine is None else fine.to(wide) * gate_fine.to(wide)
    return torch.addcmul(weighted, spread, gate_coarse.to(wide))


def _validate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate_coarse: torch.Tensor, gate_fine: torch.Tensor | None,
    num_blocks: int, block: int, lengths: torch.Tensor | None, scale: float | None,
) -> float:
    op = "gated_sparse_attention"
    scale = validate_attention(q, k, v, scale, op)
    require(q.shape[2] > 0 and k.shape == q.shape, op, "q must be [B, H, N > 0, D], k and v like it",
            (list(q.shape), list(k.shape)))
    for name, gate in (("gate_coarse", gate_coarse), ("gate_fine", gate_fine)):
        if gate is not None:
            fits = gate.ndim == 4 and all(a in (1, b) for a, b in zip(gate.shape, q.shape, strict=True))
            require(fits, op, f"{name} must broadcast to {list(q.shape)}", list(gate.shape))
            require(gate.is_floating_point() and gate.device == q.device, op, f"{name} must be real and on {q.device}",
                    (gate.dtype, gate.device))
    require(block in BLOCK_SIZES, op, f"block must be one of {BLOCK_SIZES}", block)
    blocks = -(-q.shape[2] // block)
    require(1 <= num_blocks <= blocks, op, f"num_blocks must be in 1..{blocks}", num_blocks)
    if lengths is not None:
        require(list(lengths.shape) == [blocks] and lengths.dtype == torch.int32 and lengths.is_contiguous(), op,
                f"lengths must be contiguous [{blocks}] int32", (list(lengths.shape), lengths.dtype, lengths.stride()))
        require(lengths.device == q.device, op, f"lengths must be on {q.device} like q", lengths.device)
        if lengths.device.type == "cpu":
            bad = lengths[(lengths < 1) | (lengths > block)]
            require(bad.numel() == 0, op, f"lengths must be in 1..{block}", bad[:4].tolist())
    return scale
