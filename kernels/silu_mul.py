"""The gated activation of SwiGLU: y = gate · sigmoid(gate) · up (arXiv 2002.05202); fp32, rounded once."""

import torch
import torch.nn.functional as F

from kernels.dispatch import refuse_gradients, require, takes_gradients, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply silu(gate) by up.

    gate, up: `[..., C]` fp16, bf16 or fp32 alike; the halves of one projection (`x.chunk(2, -1)`) are read in place.
    Returns `[..., C]` in their type. Raises ValueError for shapes, types or devices that do not fit.
    """
    op = "silu_mul"
    require(gate.ndim >= 1 and gate.dtype in DTYPES, op, "gate must be [..., C] fp16, bf16 or fp32",
            (list(gate.shape), gate.dtype))
    require(up.shape == gate.shape and up.dtype == gate.dtype, op,
            f"up must be {list(gate.shape)} {gate.dtype} like gate", (list(up.shape), up.dtype))
    require(up.device == gate.device, op, f"up must be on {gate.device} like gate", up.device)
    if uses_triton(gate, up):
        return silu_mul_triton(gate, up)
    return silu_mul_torch(gate, up)


@triton.jit
def _silu_mul_kernel(
    gate, up, y, stride_g, stride_u, num_rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    g = tl.load(gate + rows[:, None] * stride_g + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + rows[:, None] * stride_u + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + rows[:, None] * width + columns[None, :], (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty),
             mask=mask)


def silu_mul_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on validated tensors."""
    refuse_gradients("silu_mul", gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    width = gate.shape[-1]
    gate_rows, up_rows = (x if x.stride(-1) == 1 else x.contiguous() for x in
                          (gate.reshape(-1, width), up.reshape(-1, width)))
    block_width = min(triton.next_power_of_2(width), 2048)
    block_rows = max(1, 2048 // block_width)
    _silu_mul_kernel[(triton.cdiv(gate_rows.shape[0], block_rows), triton.cdiv(width, block_width))](
        gate_rows, up_rows, y, gate_rows.stride(0), up_rows.stride(0), gate_rows.shape[0], width,
        BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=4)
    return y


def silu_mul_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `silu_mul` with torch's fused silu."""
    activated = F.silu(gate.float())
    if takes_gradients(gate, up):
        return (activated * up.float()).to(gate.dtype)
    return activated.mul_(up).to(gate.dtype)


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `silu_mul` in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g = gate.to(wide)
    return (g * torch.sigmoid(g) * up.to(wide)).to(gate.dtype)
