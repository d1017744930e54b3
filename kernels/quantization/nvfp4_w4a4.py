"""NVFP4 weights times NVFP4 activations (W4A4): what `tl.dot_scaled` multiplies natively on sm_100 and later.

y = (Xq · Wqᵀ) · global(X) · global(W), Xq and Wq codes times E4M3 block scales (see `nvfp4`), products in fp32.
Activations are quantised to the bit as `quantize_nvfp4` does it with a given global scale, so that a row's result
depends on no other row: for few tokens inside the product's own kernel, else by one pass over them before it.
Elsewhere the same numbers are decoded and multiplied by torch.
"""

from dataclasses import dataclass

import torch

from kernels.dispatch import capability, refuse_gradients, require, require_scales, tl, triton, uses_triton
from kernels.quantization.nvfp4 import (
    BLOCK,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_linear_reference,
    quantize_nvfp4,
    validate_nvfp4_linear,
)
from kernels.quantization.nvfp4_scales import TILE_ROWS, swizzle_scales


@dataclass(frozen=True)
class W4A4Config:
    """Hold one way to launch: tile sizes, warps, stages, activations quantised inside the product's kernel.

    With swizzled weight scales block_n is a multiple of 128 and block_k of 64.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fused: bool


def nvfp4_w4a4_linear(
    x: torch.Tensor, weight: NVFP4Tensor, input_scale: torch.Tensor, *, swizzled: torch.Tensor | None = None,
    config: W4A4Config | None = None,
) -> torch.Tensor:
    """Quantise x and multiply it by the transposed weight.

    x: `[..., K]` fp16, bf16 or fp32. input_scale: `[]` fp32 above 0, x's global scale (largest magnitude / 2688).
    swizzled: the weight's scales by `swizzle_scales`, which Blackwell reads without reordering; optional.
    Returns `[..., N]` in x's type. Raises ValueError for shapes, types or devices that do not fit.
    """
    _validate(x, weight, input_scale, swizzled)
    sm = capability(x.device)
    if uses_triton(x) and sm is not None and sm >= (10, 0):
        return nvfp4_w4a4_linear_triton(x, weight, input_scale, swizzled=swizzled, config=config)
    return nvfp4_w4a4_linear_reference(x, weight, input_scale)


@triton.jit
def _round_even(x):
    # below 2^22 this leaves the nearest integer, ties to even
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _encode_e4m3(x):
    # x in [2^-9, 448]: exponent from the bits, mantissa in units of the step (2^-9 for subnormals)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 120, 1)
    mantissa = _round_even(x * ((137 - exponent) << 23).to(tl.float32, bitcast=True))
    code = (exponent << 3) + mantissa.to(tl.int32) - 8
    step = ((exponent + 117) << 23).to(tl.float32, bitcast=True)
    return code, mantissa * step


@triton.jit
def _encode_e2m1(x):
    a = tl.minimum(tl.abs(x), 6.0)
    exponent = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 126, 1)
    mantissa = _round_even(a * ((129 - exponent) << 23).to(tl.float32, bitcast=True))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return ((exponent << 1) + mantissa.to(tl.int32) - 2) | sign


@triton.jit
def _quantize(x, global_scale, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    # [M, K] fp32 to codes [M, K / 2] and scales [M, K / 16], both as bytes
    blocks = x.reshape(BLOCK_M, BLOCK_K // 16, 16)
    amax = tl.max(tl.abs(blocks), 2)
    scale = tl.math.div_rn(amax, tl.zeros_like(amax) + 6.0 * global_scale)
    scale = tl.minimum(tl.maximum(scale, 0.001953125), 448.0)
    code, rounded = _encode_e4m3(tl.where(amax > 0.0, scale, 1.0))
    divisor = rounded * global_scale
    values = tl.math.div_rn(blocks, tl.broadcast_to(divisor[:, :, None], (BLOCK_M, BLOCK_K // 16, 16)))
    pairs = _encode_e2m1(values).reshape(BLOCK_M, BLOCK_K // 2, 2)
    low, high = tl.split(pairs)
    return (low | (high << 4)).to(tl.uint8), code.to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x, global_scale, codes, scales, m, k, stride_x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1) * BLOCK_K
    offs_k = start + tl.arange(0, BLOCK_K)
    offs_b = start // 2 + tl.arange(0, BLOCK_K // 2)
    offs_g = start // 16 + tl.arange(0, BLOCK_K // 16)
    is_row = (rows < m)[:, None]
    tile = tl.load(x + rows[:, None] * stride_x + offs_k[None, :], mask=is_row & (offs_k < k)[None, :], other=0.0)
    code, scale = _quantize(tile.to(tl.float32), tl.load(global_scale), BLOCK_M, BLOCK_K)
    tl.store(codes + rows[:, None] * (k // 2) + offs_b[None, :], code, mask=is_row & (offs_b < k // 2)[None, :])
    tl.store(scales + rows[:, None] * (k // 16) + offs_g[None, :], scale, mask=is_row & (offs_g < k // 16)[None, :])


@triton.jit
def _w4a4_kernel(
    x, x_scales, x_global, codes, scales, global_scale, y, m, n, k, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FUSED: tl.constexpr, SWIZZLED: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = tl.program_id(1).to(tl.int64)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K // 2)
    offs_g = tl.arange(0, BLOCK_K // 16)
    is_m = (offs_m < m)[:, None]
    is_n = (offs_n < n)[:, None]
    input_scale = tl.load(x_global)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        is_b = (start // 2 + offs_b < k // 2)[None, :]
        is_g = (start // 16 + offs_g < k // 16)[None, :]
        if FUSED:
            tile = tl.load(x + offs_m[:, None] * stride_x + (start + offs_k)[None, :],
                           mask=is_m & (start + offs_k < k)[None, :], other=0.0)
            a, a_scale = _quantize(tile.to(tl.float32), input_scale, BLOCK_M, BLOCK_K)
        else:
            a = tl.load(x + offs_m[:, None] * (k // 2) + (start // 2 + offs_b)[None, :], mask=is_m & is_b, other=0)
            a_scale = tl.load(x_scales + offs_m[:, None] * (k // 16) + (start // 16 + offs_g)[None, :],
                              mask=is_m & is_g, other=0)
        w = tl.load(codes + offs_n[:, None] * (k // 2) + (start // 2 + offs_b)[None, :], mask=is_n & is_b, other=0)
        if SWIZZLED:
            # tiles of 128 rows and 4 scales, 512 bytes each: read as they lie, put in order in registers
            row_tiles = tile_n * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
            k_tiles = start // 64 + tl.arange(0, BLOCK_K // 64)
            num_k_tiles = tl.cdiv(k, 64)
            inside = (row_tiles < tl.cdiv(n, 128))[:, None, None] & (k_tiles < num_k_tiles)[None, :, None]
            w_scale = tl.load(scales + (row_tiles[:, None, None] * num_k_tiles + k_tiles[None, :, None]) * 512
                              + tl.arange(0, 512)[None, None, :], mask=inside, other=0)
            w_scale = w_scale.reshape(BLOCK_N // 128, BLOCK_K // 64, 32, 4, 4)
            w_scale = tl.trans(w_scale, 0, 3, 2, 1, 4).reshape(BLOCK_N, BLOCK_K // 16)
        else:
            w_scale = tl.load(scales + offs_n[:, None] * (k // 16) + (start // 16 + offs_g)[None, :],
                              mask=is_n & is_g, other=0)
        acc = tl.dot_scaled(a, a_scale.to(tl.float8e4nv, bitcast=True), "e2m1",
                            tl.trans(w), w_scale.to(tl.float8e4nv, bitcast=True), "e2m1", acc)
    acc = acc * (input_scale * tl.load(global_scale))
    tl.store(y + offs_m[:, None] * n + offs_n[None, :], acc.to(y.dtype.element_ty),
             mask=is_m & (offs_n < n)[None, :])


def default_w4a4_config(m: int, is_swizzled: bool, sm: tuple[int, int] | None = None) -> W4A4Config:
    """Return the launch that m tokens take on a card of compute capability sm (10.0 by default); untuned."""
    if sm is not None and sm >= (12, 0):
        # 101,376 B of shared memory a block; quantising inside the product costs what its two stages need
        return W4A4Config(128, 128, 128, 8, 2, False)
    if m <= 128:
        return W4A4Config(128, 128, 128 if is_swizzled else 256, 8, 3, True)
    return W4A4Config(128, 128, 256, 8, 3, False)


def quantize_activations_triton(x: torch.Tensor, input_scale: torch.Tensor) -> NVFP4Tensor:
    """Quantise validated `[M, K]` x in one pass, to the bit as `quantize_nvfp4(x, input_scale)`."""
    m, k = x.shape
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(m, k // BLOCK, dtype=torch.uint8, device=x.device)
    if codes.numel():
        block_k = min(1024, max(64, triton.next_power_of_2(k)))
        block_m = 4096 // block_k
        _quantize_kernel[(triton.cdiv(m, block_m), triton.cdiv(k, block_k))](
            x, input_scale, codes, scales, m, k, x.stride(0), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=4)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), input_scale)


def nvfp4_w4a4_linear_triton(
    x: torch.Tensor, weight: NVFP4Tensor, input_scale: torch.Tensor, *, swizzled: torch.Tensor | None = None,
    config: W4A4Config | None = None,
) -> torch.Tensor:
    """Launch on validated tensors; shapes as in `nvfp4_w4a4_linear`."""
    refuse_gradients("nvfp4_w4a4_linear", x)
    n, k = weight.shape
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    m = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    config = config or default_w4a4_config(m, swizzled is not None, capability(x.device))
    require(swizzled is None or (config.block_n % 128 == 0 and config.block_k % 64 == 0), "nvfp4_w4a4_linear",
            "block_n must be a multiple of 128 and block_k of 64 with swizzled scales",
            (config.block_n, config.block_k))
    a, a_scales, stride = rows, weight.codes, rows.stride(0)
    if not config.fused:
        quantized = quantize_activations_triton(rows, input_scale)
        a, a_scales, stride = quantized.codes, quantized.scales.view(torch.uint8), k // 2
    scales = weight.scales if swizzled is None else swizzled
    _w4a4_kernel[(triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n))](
        a, a_scales, input_scale, weight.codes, scales.view(torch.uint8), weight.global_scale, y, m, n, k, stride,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, FUSED=config.fused,
        SWIZZLED=swizzled is not None, num_warps=config.num_warps, num_stages=config.num_stages)
    return y


def nvfp4_w4a4_linear_reference(x: torch.Tensor, weight: NVFP4Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """Quantise x by `quantize_nvfp4`, decode both and multiply in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.reshape(-1, x.shape[-1])
    decoded = dequantize_nvfp4(quantize_nvfp4(rows, input_scale), wide).reshape(x.shape)
    return nvfp4_linear_reference(decoded, weight).to(x.dtype)


def _validate(x: torch.Tensor, weight: NVFP4Tensor, input_scale: torch.Tensor, swizzled: torch.Tensor | None) -> None:
    op = "nvfp4_w4a4_linear"
    validate_nvfp4_linear(x, weight, op)
    require(input_scale.shape == () and input_scale.dtype == torch.float32 and input_scale.device == x.device, op,
            f"input_scale must be [] fp32 on {x.device}", (list(input_scale.shape), input_scale.dtype,
                                                          input_scale.device))
    require_scales(input_scale, op, "input_scale")
    if swizzled is not None:
        n, k = weight.shape
        tiles = (-(-n // TILE_ROWS), -(-k // 64), 32, 4, 4)
        require(swizzled.shape == tiles and swizzled.dtype == torch.float8_e4m3fn and swizzled.is_contiguous()
                and swizzled.device == x.device, op,
                f"swizzled must be contiguous {list(tiles)} float8_e4m3fn on {x.device}",
                (list(swizzled.shape), swizzled.dtype, swizzled.device))


def swizzled_of(weight: NVFP4Tensor) -> torch.Tensor:
    """Return the weight's scales as `nvfp4_w4a4_linear` takes them swizzled."""
    return swizzle_scales(weight.scales)
