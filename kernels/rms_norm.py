"""Root-mean-square normalisation: y = x / sqrt(mean(x²) + eps) · weight, with the residual added before it.

arXiv 1910.07467. The sum of squares and the product accumulate in fp32 and are rounded once.
"""

import torch

from kernels.dispatch import refuse_gradients, require, takes_gradients, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 65_536


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """Normalise each row of x.

    x: `[..., D]` fp16, bf16 or fp32, D up to 65,536; weight: `[D]`, any of these types; eps: at least 0.
    Returns `[..., D]` in x's type. Raises ValueError for shapes, types or devices that do not fit.
    """
    _validate(x, weight, None, eps)
    if uses_triton(x, weight):
        return rms_norm_triton(x, weight, None, eps)[0]
    return rms_norm_torch(x, weight, None, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add residual to x and normalise the sum; return the normalised rows and the sum, both in x's type."""
    _validate(x, weight, residual, eps)
    if uses_triton(x, weight, residual):
        return rms_norm_triton(x, weight, residual, eps)
    return rms_norm_torch(x, weight, residual, eps)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, y, total, stride_x, stride_r, num_rows, width, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    values = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    out_offsets = rows[:, None] * width + columns[None, :]
    if HAS_RESIDUAL:
        values += tl.load(residual + rows[:, None] * stride_r + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + out_offsets, rounded, mask=mask)
        values = rounded.to(tl.float32)  # the norm of what the next layer adds to
    mean = tl.sum(values * values, 1) / width
    scale = tl.math.rsqrt(mean + eps)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(y + out_offsets, (values * scale[:, None] * weights[None, :]).to(y.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated tensors: the normalised rows and the sum (x itself without a residual)."""
    refuse_gradients("rms_norm", x, weight, residual)
    width = x.shape[-1]
    rows = _as_rows(x)
    added = rows if residual is None else _as_rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, total
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, min(16, 2048 // block_width))
    _rms_norm_kernel[(triton.cdiv(rows.shape[0], block_rows),)](
        rows, added, weight, y, total, rows.stride(0), added.stride(0), rows.shape[0], width, eps,
        BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, HAS_RESIDUAL=residual is not None,
        num_warps=max(4, min(16, block_width // 1024)))
    return y, total


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in fp32 with one pass for the norms and two for the product; with gradients by the reference."""
    if takes_gradients(x, weight, residual):
        return rms_norm_reference(x, weight, residual, eps)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (values * scale).mul_(weight.float()).to(x.dtype), total


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    values = total.to(wide)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.to(wide)).to(x.dtype), total


def _validate(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> None:
    op = "rms_norm" if residual is None else "add_rms_norm"
    require(x.ndim >= 1 and 0 < x.shape[-1] <= MAX_WIDTH, op, f"x must be [..., D] with D in 1..{MAX_WIDTH}",
            list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(weight.dtype in DTYPES, op, "weight must be fp16, bf16 or fp32", weight.dtype)
    require(weight.shape == x.shape[-1:], op, f"weight must be [{x.shape[-1]}] to match x {list(x.shape)}",
            list(weight.shape))
    require(weight.is_contiguous(), op, "weight must be contiguous", weight.stride())
    require(weight.device == x.device, op, f"weight must be on {x.device} like x", weight.device)
    require(eps >= 0, op, "eps must be at least 0", eps)
    if residual is not None:
        require(residual.shape == x.shape and residual.dtype == x.dtype, op,
                f"residual must be {list(x.shape)} {x.dtype} like x", (list(residual.shape), residual.dtype))
        require(residual.device == x.device, op, f"residual must be on {x.device} like x", residual.device)
