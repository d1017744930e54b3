"""Root-mean-square normalisation of queries and keys: each head by itself, or all heads of a token together.

The first is Qwen3's and Gemma 3's, the second Wan's ("rms_norm_across_heads"). arXiv 1910.07467. Views of one fused
projection are read in place. The sum of squares and the product accumulate in fp32 and are rounded once.
"""

import torch

from kernels.dispatch import refuse_gradients, require, takes_gradients, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 16_384


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """Normalise heads.

    x: `[B, N, H, D]` fp16, bf16 or fp32, any strides but the last. weight: `[D]`, each head is normalised by itself, or
    `[H, D]`, all heads of a token together; any of these types. eps: at least 0.
    Returns contiguous `[B, N, H, D]` in x's type. Raises ValueError for shapes, types, strides or devices that do not
    fit.
    """
    _validate(x, weight, eps)
    if uses_triton(x, weight):
        return head_rms_norm_triton(x, weight, eps)
    return head_rms_norm_torch(x, weight, eps)


@triton.jit
def _head_rms_norm_kernel(
    x, weight, y, stride_b, stride_n, stride_h, n, num_heads, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, JOINT: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    is_head = heads < num_heads
    is_column = columns < HEAD_DIM
    mask = ((tokens < n)[:, None] & is_head[None, :])[:, :, None] & is_column[None, None, :]
    rows = x + batch * stride_b + tokens[:, None] * stride_n + heads[None, :] * stride_h
    values = tl.load(rows[:, :, None] + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(values * values, 2)
    if JOINT:
        scale = tl.math.rsqrt(tl.sum(squares, 1) / (num_heads * HEAD_DIM) + eps)[:, None, None]
        weights = tl.load(weight + heads[:, None] * HEAD_DIM + columns[None, :],
                          mask=is_head[:, None] & is_column[None, :], other=0.0).to(tl.float32)[None, :, :]
    else:
        scale = tl.math.rsqrt(squares / HEAD_DIM + eps)[:, :, None]
        weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, None, :]
    out = y + ((batch * n + tokens)[:, None] * num_heads + heads[None, :]) * HEAD_DIM
    tl.store(out[:, :, None] + columns[None, None, :], (values * scale * weights).to(y.dtype.element_ty), mask=mask)


def head_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the kernel on validated tensors."""
    refuse_gradients("head_rms_norm", x, weight)
    batch, n, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    is_joint = weight.ndim == 2
    block_d, block_h = triton.next_power_of_2(head_dim), triton.next_power_of_2(num_heads)
    block_h = block_h if is_joint else min(block_h, 4)
    block_n = max(1, min(16, 4096 // (block_d * block_h)))
    _head_rms_norm_kernel[(triton.cdiv(n, block_n), triton.cdiv(num_heads, block_h), batch)](
        x, weight, y, *x.stride()[:3], n, num_heads, eps,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_N=block_n, BLOCK_H=block_h, JOINT=is_joint,
        num_warps=max(4, min(16, block_n * block_h * block_d // 1024)))
    return y


def head_rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `head_rms_norm` in fp32 with one pass for the norms; with gradients by the reference."""
    if takes_gradients(x, weight):
        return head_rms_norm_reference(x, weight, eps)
    axes = (-1,) if weight.ndim == 1 else (-2, -1)
    values = x.float()
    norm = torch.linalg.vector_norm(values, dim=axes, keepdim=True)
    scale = norm.square_().mul_(1 / weight.numel()).add_(eps).rsqrt_()
    normed: torch.Tensor = (values.contiguous() * scale).mul_(weight.float()).to(x.dtype)
    return normed


def head_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Compute `head_rms_norm` in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    mean = wide.square().mean(-1 if weight.ndim == 1 else (-2, -1), keepdim=True)
    return (wide * torch.rsqrt(mean + eps) * weight.to(wide.dtype)).to(x.dtype)


def _validate(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    op = "head_rms_norm"
    require(x.ndim == 4 and x.shape[2] > 0 and x.shape[3] > 0, op, "x must be [B, N, H > 0, D > 0]", list(x.shape))
    require(x.shape[2] * x.shape[3] <= MAX_WIDTH or (weight.ndim == 1 and x.shape[3] <= MAX_WIDTH), op,
            f"what is normalised must be at most {MAX_WIDTH} wide", list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(x.stride(-1) == 1 or x.shape[3] == 1, op, "x's last stride must be 1", x.stride())
    require(weight.dtype in DTYPES, op, "weight must be fp16, bf16 or fp32", weight.dtype)
    require(weight.shape in (x.shape[3:], x.shape[2:]), op,
            f"weight must be [{x.shape[3]}] or [{x.shape[2]}, {x.shape[3]}] to match x {list(x.shape)}",
            list(weight.shape))
    require(weight.is_contiguous(), op, "weight must be contiguous", weight.stride())
    require(weight.device == x.device, op, f"weight must be on {x.device} like x", weight.device)
    require(eps >= 0, op, "eps must be at least 0", eps)
