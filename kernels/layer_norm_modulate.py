"""Layer normalisation with Wan's modulation: y = norm(x) · weight + bias, then · (1 + scale) + shift.

`add_layer_norm_modulate` first adds a branch to the residual stream: x + branch · gate, rounded to x's type, as the
blocks of diffusers' Wan transformer do (adaLN of DiT, arXiv 2212.09748). Moments and products are fp32, rounded once.
"""

import torch
import torch.nn.functional as F

from kernels.dispatch import refuse_gradients, require, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 16_384


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Normalise each token and modulate it.

    x: `[B, N, C]` fp16, bf16 or fp32, C up to 16,384. scale, shift: both or neither, `[1 or B, M, C]` of these types,
    M = 1 for all tokens, N for each, or a divisor of N for each run of N / M tokens (a frame). weight, bias: `[C]`.
    eps: at least 0. Returns `[B, N, C]` in x's type. Raises ValueError for shapes, types, strides or devices that do
    not fit.
    """
    _validate(x, None, None, scale, shift, weight, bias, eps)
    is_triton = uses_triton(x, scale, shift, weight, bias)
    run = layer_norm_modulate_triton if is_triton else layer_norm_modulate_torch
    return run(x, None, None, scale, shift, weight, bias, eps=eps)[0]


def add_layer_norm_modulate(
    x: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add branch · gate to x, normalise and modulate the sum; return both, the sum second, in x's type.

    branch: `[B, N, C]` like x. gate: `[1 or B, M, C]` like scale, 1 by default. The rest as in `layer_norm_modulate`.
    """
    _validate(x, branch, gate, scale, shift, weight, bias, eps)
    is_triton = uses_triton(x, branch, gate, scale, shift, weight, bias)
    run = layer_norm_modulate_triton if is_triton else layer_norm_modulate_torch
    return run(x, branch, gate, scale, shift, weight, bias, eps=eps)


@triton.jit
def _layer_norm_kernel(
    x, branch, gate, scale, shift, weight, bias, y, total,
    stride_xb, stride_xn, stride_rb, stride_rn, stride_gb, stride_gm, stride_cb, stride_cm, stride_hb, stride_hm,
    num_tokens, width, gate_run, scale_run, shift_run, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    is_column = columns < width
    mask = (tokens < num_tokens)[:, None] & is_column[None, :]
    values = tl.load(x + batch * stride_xb + tokens[:, None] * stride_xn + columns[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    out_offsets = (batch * num_tokens + tokens)[:, None] * width + columns[None, :]
    if HAS_BRANCH:
        added = tl.load(branch + batch * stride_rb + tokens[:, None] * stride_rn + columns[None, :], mask=mask,
                        other=0.0).to(tl.float32)
        if HAS_GATE:
            added *= tl.load(gate + batch * stride_gb + (tokens // gate_run)[:, None] * stride_gm + columns[None, :],
                             mask=mask, other=0.0).to(tl.float32)
        rounded = (values + added).to(total.dtype.element_ty)
        tl.store(total + out_offsets, rounded, mask=mask)
        values = rounded.to(tl.float32)  # the norm of what the next layer adds to
    mean = tl.sum(values, 1) / width
    centred = tl.where(mask, values - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / width
    result = centred * tl.math.rsqrt(variance + eps)[:, None]
    if HAS_WEIGHT:
        result *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        rows = scale + batch * stride_cb + (tokens // scale_run)[:, None] * stride_cm + columns[None, :]
        factor = 1.0 + tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        rows = shift + batch * stride_hb + (tokens // shift_run)[:, None] * stride_hm + columns[None, :]
        result = result * factor + tl.load(rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + out_offsets, result.to(y.dtype.element_ty), mask=mask)


def layer_norm_modulate_triton(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated tensors: the modulated rows and the sum (x itself without a branch)."""
    refuse_gradients("layer_norm_modulate", x, branch, gate, scale, shift, weight, bias)
    batch, n, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if branch is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, total
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, min(16, 2048 // block_width))
    strides: list[int] = []
    runs: list[int] = []
    for part in (gate, scale, shift):
        strides += (0, 0) if part is None else (part.stride(0) if part.shape[0] > 1 else 0, part.stride(1))
        runs.append(n if part is None else n // part.shape[1])
    added = x if branch is None else branch
    _layer_norm_kernel[(triton.cdiv(n, block_rows), batch)](
        x, *(x if part is None else part for part in (branch, gate, scale, shift, weight, bias)), y, total,
        *x.stride()[:2], *added.stride()[:2], *strides, n, width, *runs, eps,
        BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, HAS_BRANCH=branch is not None, HAS_GATE=gate is not None,
        HAS_SCALE=scale is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        num_warps=max(4, min(16, block_width // 1024)))
    return y, total


def layer_norm_modulate_torch(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both with torch's fused norm and fused multiply-adds, in fp32."""
    n = x.shape[1]
    total = x
    if branch is not None and gate is None:
        total = (x.float() + branch.float()).to(x.dtype)
    elif branch is not None and gate is not None:
        total = _add_gated(x.float(), branch.float(), gate.float()).to(x.dtype)
    weight, bias = (None if part is None else part.float() for part in (weight, bias))
    normed = F.layer_norm(total.float(), (x.shape[2],), weight, bias, eps)
    if scale is not None and shift is not None:
        if scale.shape[1] == shift.shape[1]:
            runs = scale.shape[1]
            rows = normed.unflatten(1, (runs, n // runs)) if n else normed[:, None]
            normed = torch.addcmul(shift.float()[:, :, None], rows, 1 + scale.float()[:, :, None]).view(normed.shape)
        else:
            normed = normed * (1 + _expand(scale.float(), n)) + _expand(shift.float(), n)
    return normed.to(x.dtype), total


def _add_gated(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    runs = gate.shape[1]
    if runs in (1, x.shape[1]):
        return torch.addcmul(x, branch, gate)
    shape = (runs, x.shape[1] // runs)
    return torch.addcmul(x.unflatten(1, shape), branch.unflatten(1, shape), gate[:, :, None]).flatten(1, 2)


def _expand(part: torch.Tensor, n: int) -> torch.Tensor:
    return part if part.shape[1] in (1, n) else part.repeat_interleave(n // part.shape[1], 1)


def layer_norm_modulate_reference(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = x.shape[1]
    total = x
    if branch is not None:
        gated = branch.to(wide) if gate is None else branch.to(wide) * _expand(gate.to(wide), n)
        total = (x.to(wide) + gated).to(x.dtype)
    values = total.to(wide)
    centred = values - values.mean(-1, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.to(wide)
    if bias is not None:
        result = result + bias.to(wide)
    if scale is not None and shift is not None:
        result = result * (1 + _expand(scale.to(wide), n)) + _expand(shift.to(wide), n)
    return result.to(x.dtype), total


def _validate(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    op = "layer_norm_modulate" if branch is None else "add_layer_norm_modulate"
    require(x.ndim == 3 and 0 < x.shape[2] <= MAX_WIDTH, op, f"x must be [B, N, C] with C in 1..{MAX_WIDTH}",
            list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(eps >= 0, op, "eps must be at least 0", eps)
    require((scale is None) == (shift is None), op, "scale and shift must be given together", "one of them")
    batch, n, width = x.shape
    if branch is not None:
        require(branch.shape == x.shape and branch.dtype == x.dtype, op,
                f"branch must be {list(x.shape)} {x.dtype} like x", (list(branch.shape), branch.dtype))
    for name, part in (("gate", gate), ("scale", scale), ("shift", shift)):
        if part is not None:
            require(part.ndim == 3 and part.shape[0] in (1, batch) and part.shape[2] == width and part.shape[1] > 0
                    and n % part.shape[1] == 0, op, f"{name} must be [1 or {batch}, a divisor of {n}, {width}]",
                    list(part.shape))
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None:
            require(part.shape == (width,), op, f"{name} must be [{width}] to match x {list(x.shape)}",
                    list(part.shape))
    for name, part in (("x", x), ("branch", branch), ("gate", gate), ("scale", scale), ("shift", shift),
                       ("weight", weight), ("bias", bias)):
        if part is not None:
            require(part.dtype in DTYPES, op, f"{name} must be fp16, bf16 or fp32", part.dtype)
            require(part.stride(-1) == 1 or width == 1, op, f"{name}'s last stride must be 1", part.stride())
            require(part.device == x.device, op, f"{name} must be on {x.device} like x", part.device)
