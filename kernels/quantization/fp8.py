"""FP8 linear layers: E4M3 weights with one scale a matrix or one an output row, E4M3 or unquantised activations.

value = code · scale, scale = largest magnitude / 448 (1 for zeros), rounded to nearest even; products in fp32.
Activations take a calibrated scale, or one a token from its own largest magnitude, so that no row depends on another.
`torch._scaled_mm` multiplies the codes where the card has FP8 tensor cores (compute capability 8.9 and later) and N and
K are multiples of 16; elsewhere codes are decoded, exactly, and multiplied by torch: sums differ in their order only.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.dispatch import capability, require, require_scales

E4M3_MAX = 448.0
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Per = Literal["tensor", "channel"]


@dataclass(frozen=True)
class FP8Tensor:
    """Hold a `[N, K]` matrix: codes `[N, K]` E4M3, scale `[]` or `[N]` fp32."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Give the shape of the weight that it stands for, `[N, K]`."""
        return self.codes.shape[0], self.codes.shape[1]


def quantize_fp8(x: torch.Tensor, *, per: Per = "channel", scale: torch.Tensor | None = None) -> FP8Tensor:
    """Quantise a matrix.

    x: `[N, K]` floating point, finite. per: one scale a matrix ("tensor") or one a row ("channel").
    scale: `[]` fp32 above 0 with "tensor", or `[N]` with "channel"; from x's largest magnitudes by default. What lies
    beyond 448 · scale becomes that. Raises ValueError for shapes or scales that do not fit.
    """
    require(x.ndim == 2 and x.is_floating_point(), "quantize_fp8", "x must be [N, K] floating point",
            (list(x.shape), x.dtype))
    require(per in ("tensor", "channel"), "quantize_fp8", "per must be 'tensor' or 'channel'", per)
    wide = x.float()
    shape = () if per == "tensor" else (x.shape[0],)
    if scale is None:
        amax = torch.zeros(shape, device=x.device)
        if x.numel():
            amax = wide.abs().amax() if per == "tensor" else wide.abs().amax(1)
        scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    else:
        require(scale.shape == shape and scale.dtype == torch.float32, "quantize_fp8",
                f"scale must be {list(shape)} fp32 per {per}", (list(scale.shape), scale.dtype))
        require(scale.device == x.device, "quantize_fp8", f"scale must be on {x.device} like x", scale.device)
        require_scales(scale, "quantize_fp8", "scale")
    divisor = scale if per == "tensor" else scale[:, None]
    return FP8Tensor((wide / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def dequantize_fp8(x: FP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to `[N, K]` in dtype, products in fp32 (fp64 for fp64); ValueError for parts that do not fit."""
    _validate_parts(x, "dequantize_fp8")
    wide = torch.promote_types(dtype, torch.float32)
    scale = x.scale if x.scale.ndim == 0 else x.scale[:, None]
    return (x.codes.to(wide) * scale.to(wide)).to(dtype)


def fp8_linear(
    x: torch.Tensor, weight: FP8Tensor, *, input_scale: torch.Tensor | None = None, quantize_input: bool = True
) -> torch.Tensor:
    """Multiply x by the transposed weight.

    x: `[..., K]` fp16, bf16 or fp32. input_scale: `[]` fp32 above 0 for all tokens; None: one a token.
    quantize_input: False leaves x as it is (W8A16) and decodes the weight.
    Returns `[..., N]` in x's type. Raises ValueError for shapes, types or devices that do not fit.
    """
    _validate(x, weight, input_scale, quantize_input)
    if quantize_input and can_scale_mm(x.device, weight.shape):
        return fp8_linear_scaled_mm(x, weight, input_scale)
    return fp8_linear_reference(x, weight, input_scale=input_scale, quantize_input=quantize_input)


def can_scale_mm(device: torch.device, shape: tuple[int, int]) -> bool:
    """Say whether `torch._scaled_mm` multiplies a `[N, K]` weight of this shape on device."""
    sm = capability(device)
    return sm is not None and sm >= (8, 9) and all(size > 0 and size % 16 == 0 for size in shape)


def fp8_linear_scaled_mm(x: torch.Tensor, weight: FP8Tensor, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Launch torch's scaled product on validated tensors; with one scale a row it computes bf16 and nothing else."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    a = _quantize_input(rows, input_scale)
    scale_a, scale_b, dtype = a.scale, weight.scale, x.dtype
    if scale_a.ndim or scale_b.ndim:
        scale_a = scale_a.expand(rows.shape[0])[:, None].contiguous()
        scale_b = scale_b.expand(weight.shape[0])[None].contiguous()
        dtype = torch.bfloat16
    y = torch._scaled_mm(a.codes, weight.codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def fp8_linear_reference(
    x: torch.Tensor, weight: FP8Tensor, *, input_scale: torch.Tensor | None = None, quantize_input: bool = True
) -> torch.Tensor:
    """Quantise x, decode both and multiply in fp32 (fp64 for fp64 inputs): on CPU faster than in bf16."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    if quantize_input:
        values = dequantize_fp8(_quantize_input(x.reshape(-1, x.shape[-1]), input_scale), wide).view(x.shape)
    return F.linear(values, dequantize_fp8(weight, wide)).to(x.dtype)


def _quantize_input(rows: torch.Tensor, input_scale: torch.Tensor | None) -> FP8Tensor:
    return quantize_fp8(rows, per="channel" if input_scale is None else "tensor", scale=input_scale)


def _validate_parts(x: FP8Tensor, op: str) -> None:
    require(x.codes.ndim == 2 and x.codes.dtype == torch.float8_e4m3fn, op, "codes must be [N, K] float8_e4m3fn",
            (list(x.codes.shape), x.codes.dtype))
    n = x.shape[0]
    require(x.scale.shape in ((), (n,)) and x.scale.dtype == torch.float32, op, f"scale must be [] or [{n}] fp32",
            (list(x.scale.shape), x.scale.dtype))
    require(x.scale.device == x.codes.device, op, f"scale must be on {x.codes.device} like the codes", x.scale.device)


def _validate(x: torch.Tensor, weight: FP8Tensor, input_scale: torch.Tensor | None, quantize_input: bool) -> None:
    op = "fp8_linear"
    _validate_parts(weight, op)
    require(weight.codes.is_contiguous(), op, "codes must be contiguous", weight.codes.stride())
    k = weight.shape[1]
    require(x.ndim >= 1 and x.shape[-1] == k, op, f"x must be [..., {k}] to match the weight", list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(input_scale is None or (input_scale.shape == () and input_scale.dtype == torch.float32), op,
            "input_scale must be [] fp32 or None",
            None if input_scale is None else (list(input_scale.shape), input_scale.dtype))
    require(input_scale is None or quantize_input, op, "input_scale must be None where x is not quantised", input_scale)
    for name, tensor in (("codes", weight.codes), ("input_scale", input_scale)):
        require(tensor is None or tensor.device == x.device, op, f"{name} must be on {x.device} like x",
                None if tensor is None else tensor.device)
    if input_scale is not None:
        require_scales(input_scale, op, "input_scale")
