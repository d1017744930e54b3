"""The Gaussian error linear unit: y = x · Φ(x), by erf, or by its tanh form (arXiv 1606.08415); fp32, rounded once.

(1 + tanh(u)) / 2 is the logistic function of 2u, which keeps its digits where tanh(u) is near -1.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.dispatch import refuse_gradients, require, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 2048


def gelu(x: torch.Tensor, *, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """Apply GELU to each element.

    x: any shape and strides, fp16, bf16 or fp32. approximate: "none" for erf, "tanh".
    Returns x's shape and type. Raises ValueError for a type or form that does not fit.
    """
    require(x.dtype in DTYPES, "gelu", "x must be fp16, bf16 or fp32", x.dtype)
    require(approximate in ("none", "tanh"), "gelu", "approximate must be 'none' or 'tanh'", approximate)
    if uses_triton(x):
        return gelu_triton(x, approximate)
    return F.gelu(x, approximate=approximate)


@triton.jit
def _gelu_kernel(x, y, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    if TANH:
        # 2 · sqrt(2 / pi)
        result = values / (1.0 + tl.exp(-1.5957691216057308 * (values + 0.044715 * values * values * values)))
    else:
        result = 0.5 * values * (1.0 + tl.math.erf(values * 0.7071067811865476))
    tl.store(y + offsets, result.to(y.dtype.element_ty), mask=offsets < n)


def gelu_triton(x: torch.Tensor, approximate: Literal["none", "tanh"]) -> torch.Tensor:
    """Launch the kernel on a validated tensor."""
    refuse_gradients("gelu", x)
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        _gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), TANH=approximate == "tanh", BLOCK=BLOCK,
                                                       num_warps=4)
    return y


def gelu_reference(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """Compute `gelu` in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if approximate == "tanh":
        return (wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)
    return (0.5 * wide * torch.erfc(-wide / math.sqrt(2))).to(x.dtype)
