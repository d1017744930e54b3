"""NVFP4 weights: E2M1 codes in blocks of 16 with E4M3 scales and one fp32 scale, and the linear that reads them.

value = code · block scale · global scale, global = amax / (6 · 448), block = clamp(block amax / (6 · global), 2^-9,
448) rounded to E4M3, 1 for a block of zeros; codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign, rounded to
nearest even; the low nibble is the even index along K (NVIDIA's ModelOpt layout).
The linear is weight-only (W4A16): codes are decoded in the kernel, products accumulate in fp32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dispatch import refuse_gradients, require, require_scales, tl, triton, uses_triton

BLOCK = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class NVFP4Tensor:
    """Hold a `[N, K]` matrix: codes `[N, K / 2]` u8, scales `[N, K / 16]` E4M3, global_scale `[]` fp32."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Give the shape of the weight that it stands for, `[N, K]`."""
        return self.codes.shape[0], self.codes.shape[1] * 2


@dataclass(frozen=True)
class GemvConfig:
    """Hold one way to launch the product with one token: weight rows and columns a step, warps, stages."""

    block_n: int = 8
    block_k: int = 2048
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class GemmConfig:
    """Hold one way to launch the product with several tokens: tile sizes, warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def quantize_nvfp4(weight: torch.Tensor, global_scale: torch.Tensor | None = None) -> NVFP4Tensor:
    """Quantise a matrix.

    weight: `[N, K]` floating point, K a multiple of 16, finite. global_scale: `[]` fp32 above 0, where several
    matrices share one; from weight's largest magnitude by default. Raises ValueError for shapes, types, devices or (on
    CPU) a scale that do not fit.
    """
    require(weight.ndim == 2 and weight.shape[1] % BLOCK == 0 and weight.is_floating_point(), "quantize_nvfp4",
            "weight must be [N, K] floating point with K a multiple of 16", (list(weight.shape), weight.dtype))
    if global_scale is not None:
        require(global_scale.shape == () and global_scale.dtype == torch.float32, "quantize_nvfp4",
                "global_scale must be [] fp32", (list(global_scale.shape), global_scale.dtype))
        require(global_scale.device == weight.device, "quantize_nvfp4",
                f"global_scale must be on {weight.device} like weight", global_scale.device)
        require_scales(global_scale, "quantize_nvfp4", "global_scale")
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    if global_scale is None:
        amax = blocks.abs().amax() if blocks.numel() else torch.zeros((), device=weight.device)
        global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), 1.0)
    block_amax = blocks.abs().amax(-1)
    scales = (block_amax / (E2M1_MAX * global_scale)).clamp(E4M3_MIN, E4M3_MAX)
    scales = torch.where(block_amax > 0, scales, 1.0).to(torch.float8_e4m3fn)
    magnitudes = (blocks / (scales.float() * global_scale)[..., None]).flatten(1)
    codes = _encode_e2m1(magnitudes)
    return NVFP4Tensor(codes[:, ::2] | codes[:, 1::2] << 4, scales, global_scale)


def dequantize_nvfp4(weight: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to `[N, K]` in dtype, products in fp32; ValueError for parts that do not fit one another."""
    validate_nvfp4(weight, "dequantize_nvfp4")
    table = torch.tensor(E2M1_VALUES, device=weight.codes.device)
    table = torch.cat([table, -table])
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1).int()
    scales = (weight.scales.float() * weight.global_scale).repeat_interleave(BLOCK, 1)
    return (table[codes] * scales).to(dtype)


def nvfp4_linear(
    x: torch.Tensor, weight: NVFP4Tensor, *, gemv: GemvConfig | None = None, gemm: GemmConfig | None = None
) -> torch.Tensor:
    """Multiply x by the transposed weight.

    x: `[..., K]` fp16, bf16 or fp32. gemv, gemm: a tuned launch for one token, for several.
    Returns `[..., N]` in x's type. Raises ValueError for shapes, types or devices that do not fit. On CPU the weight is
    decoded at each call: decode once and keep it where speed matters.
    """
    validate_nvfp4_linear(x, weight)
    if uses_triton(x):
        is_vector = x.numel() == x.shape[-1]
        return nvfp4_linear_triton(x, weight, gemv=gemv if is_vector else None, gemm=None if is_vector else gemm)
    return nvfp4_linear_reference(x, weight)


@triton.jit
def _gemv_kernel(
    x, codes, scales, global_scale, y, n, num_words, stride_x,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # a word is eight codes: half a block of one scale
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, BLOCK_K // 8)
    acc = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
    for start in tl.range(0, num_words, BLOCK_K // 8):
        words = start + offs_w
        is_word = words < num_words
        mask = (rows < n)[:, None] & is_word[None, :]
        packed = tl.load(codes + rows[:, None] * num_words + words[None, :], mask=mask, other=0)
        scale = tl.load(scales + rows[:, None] * (num_words // 2) + (words // 2)[None, :], mask=mask, other=0.0)
        part = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
        for i in tl.static_range(4):
            # codes i and i + 4 side by side, placed as two bf16 of value * 2^-126
            if i < 2:
                pair = ((packed << (12 - 4 * i)) & -2147450880) | ((packed << (6 - 4 * i)) & 29360576)
            else:
                pair = ((packed << (12 - 4 * i)) & -2147450880) | ((packed >> (4 * i - 6)) & 29360576)
            low = (pair << 16).to(tl.float32, bitcast=True)
            high = (pair & -65536).to(tl.float32, bitcast=True)
            values = x + token * stride_x + words * 8 + i
            x_low = tl.load(values, mask=is_word, other=0.0).to(tl.float32)
            x_high = tl.load(values + 4, mask=is_word, other=0.0).to(tl.float32)
            # 2^63 here and 2^63 at the end undo it, so that neither side leaves fp32's range
            part += low * (x_low * 9.223372036854775808e18)[None, :]
            part += high * (x_high * 9.223372036854775808e18)[None, :]
        acc += part * scale.to(tl.float32)
    total = tl.sum(acc, 1) * 9.223372036854775808e18 * tl.load(global_scale)
    tl.store(y + token * n + rows, total.to(y.dtype.element_ty), mask=rows < n)


@triton.jit
def _gemm_kernel(
    x, codes, scales, global_scale, y, m, n, k, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K // 2)
    offs_g = tl.arange(0, BLOCK_K // 16)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        x_tile = tl.load(x + offs_m[:, None] * stride_x + (start + offs_k)[None, :],
                         mask=(offs_m < m)[:, None] & (start + offs_k < k)[None, :], other=0.0)
        packed = tl.load(codes + offs_n[:, None] * (k // 2) + (start // 2 + offs_b)[None, :],
                         mask=(offs_n < n)[:, None] & (start // 2 + offs_b < k // 2)[None, :], other=0)
        scale = tl.load(scales + offs_n[:, None] * (k // 16) + (start // 16 + offs_g)[None, :],
                        mask=(offs_n < n)[:, None] & (start // 16 + offs_g < k // 16)[None, :], other=0.0)
        packed = packed.to(tl.int16)
        low = ((packed & 8) << 12) | ((packed & 7) << 9)
        high = ((packed & 128) << 8) | ((packed & 112) << 5)
        # at fp16's exponent a code is value · 2^-14; code · scale has five significant bits, exact in every type
        values = tl.join(low, high).reshape(BLOCK_N, BLOCK_K // 16, 16).to(tl.float16, bitcast=True).to(tl.float32)
        values = values * (scale.to(tl.float32) * 16384.0)[:, :, None]
        w_tile = values.reshape(BLOCK_N, BLOCK_K).to(x_tile.dtype)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    acc = acc * tl.load(global_scale)
    tl.store(y + offs_m[:, None] * n + offs_n[None, :], acc.to(y.dtype.element_ty),
             mask=(offs_m < m)[:, None] & (offs_n < n)[None, :])


def default_gemm_config(m: int, dtype: torch.dtype) -> GemmConfig:
    """Return the launch that m tokens take; untuned."""
    if dtype == torch.float32:
        return GemmConfig(32, 64, 32, 4, 2)
    return GemmConfig(16, 64, 128, 4, 3) if m <= 16 else GemmConfig(64 if m <= 64 else 128, 128, 64, 8, 3)


def nvfp4_linear_triton(
    x: torch.Tensor, weight: NVFP4Tensor, *, gemv: GemvConfig | None = None, gemm: GemmConfig | None = None
) -> torch.Tensor:
    """Launch on validated tensors: the vector kernel for one token (or where gemv is given), else the matrix kernel."""
    refuse_gradients("nvfp4_linear", x)
    n, k = weight.shape
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    m = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if gemm is None and (m == 1 or gemv is not None):
        gemv = gemv or GemvConfig()
        _gemv_kernel[(triton.cdiv(n, gemv.block_n), m)](
            rows, weight.codes.view(torch.int32), weight.scales, weight.global_scale, y, n, k // 8, rows.stride(0),
            BLOCK_N=gemv.block_n, BLOCK_K=gemv.block_k,
            num_warps=gemv.num_warps, num_stages=gemv.num_stages)
        return y
    gemm = gemm or default_gemm_config(m, x.dtype)
    _gemm_kernel[(triton.cdiv(m, gemm.block_m), triton.cdiv(n, gemm.block_n))](
        rows, weight.codes, weight.scales, weight.global_scale, y, m, n, k, rows.stride(0),
        BLOCK_M=gemm.block_m, BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k,
        num_warps=gemm.num_warps, num_stages=gemm.num_stages)
    return y


def nvfp4_linear_reference(x: torch.Tensor, weight: NVFP4Tensor) -> torch.Tensor:
    """Decode and multiply in fp32 (fp64 for fp64 inputs): on CPU faster than in bf16."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.linear(x.to(wide), dequantize_nvfp4(weight, wide)).to(x.dtype)


def _encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    a = x.abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    # halfway values go to the even code: below 1 up, and so on
    for threshold, goes_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
                               (5.0, False)):
        code += a >= threshold if goes_up else a > threshold
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def validate_nvfp4(weight: NVFP4Tensor, op: str) -> None:
    """Raise ValueError that names op unless codes and scales fit one another."""
    codes, scales, global_scale = weight.codes, weight.scales, weight.global_scale
    require(codes.dtype == torch.uint8 and codes.ndim == 2, op, "codes must be [N, K / 2] uint8",
            (list(codes.shape), codes.dtype))
    n, k = weight.shape
    require(k % BLOCK == 0, op, "K must be a multiple of 16", k)
    require(scales.dtype == torch.float8_e4m3fn and scales.shape == (n, k // BLOCK), op,
            f"scales must be [{n}, {k // BLOCK}] float8_e4m3fn", (list(scales.shape), scales.dtype))
    require(global_scale.numel() == 1 and global_scale.dtype == torch.float32, op, "global_scale must be one fp32",
            (list(global_scale.shape), global_scale.dtype))
    require(scales.device == codes.device and global_scale.device == codes.device, op,
            f"scales and global_scale must be on {codes.device} like the codes", (scales.device, global_scale.device))


def validate_nvfp4_linear(x: torch.Tensor, weight: NVFP4Tensor, op: str = "nvfp4_linear") -> None:
    """Raise ValueError that names op unless x `[..., K]` and the weight fit each other."""
    validate_nvfp4(weight, op)
    k = weight.shape[1]
    for name, tensor in (("codes", weight.codes), ("scales", weight.scales)):
        require(tensor.is_contiguous(), op, f"{name} must be contiguous", tensor.stride())
    require(x.ndim >= 1 and x.shape[-1] == k, op, f"x must be [..., {k}] to match the weight", list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(weight.codes.device == x.device, op, f"the weight must be on {x.device} like x", weight.codes.device)
