"""A linear layer that holds its weight in a quantised format: module and state knows which one it is.

Formats: "nvfp4" (W4A16), "nvfp4_w4a4", "fp8" (W8A8) and "fp8_w8a16", each as its file here defines it.
Scales keep their types through `.to(dtype)`, `.half()` and the like: only the bias follows.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from kernels.dispatch import can_run_triton, capability, require
from kernels.quantization.fp8 import FP8Tensor, Per, dequantize_fp8, fp8_linear, quantize_fp8
from kernels.quantization.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    GemmConfig,
    GemvConfig,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_linear,
    quantize_nvfp4,
)
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import nvfp4_w4a4_linear

Format = Literal["nvfp4", "nvfp4_w4a4", "fp8", "fp8_w8a16"]
FORMATS: tuple[Format, ...] = get_args(Format)
QUANTIZED = ("codes", "scales", "global_scale", "input_scale")


class QuantizedLinear(nn.Module):
    """Compute x · Wᵀ + bias with W `[N, K]` in `format`.

    codes, scales, global_scale: W as NVFP4Tensor has it; for FP8 codes and scales (`[]` or `[N]`), no global_scale.
    input_scale: `[]` fp32, needed by nvfp4_w4a4, optional for fp8 (None: one a token).
    caches_decoded: on devices without Triton keep the decoded weight after the first call (16 or 32 bits a weight).
    gemv_config, gemm_config: launches of the "nvfp4" product that `autotune` chose, None for the shipped ones.
    """

    def __init__(
        self, format: Format, weight: NVFP4Tensor | FP8Tensor, *, bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None, caches_decoded: bool = False,
    ) -> None:
        super().__init__()
        op = "QuantizedLinear"
        require(format in FORMATS, op, f"format must be one of {FORMATS}", format)
        is_nvfp4 = format.startswith("nvfp4")
        require(isinstance(weight, NVFP4Tensor if is_nvfp4 else FP8Tensor), op, f"weight must fit format {format}",
                type(weight).__name__)
        require(bias is None or bias.shape == (weight.shape[0],), op, f"bias must be [{weight.shape[0]}]",
                None if bias is None else list(bias.shape))
        require(input_scale is not None or format != "nvfp4_w4a4", op, "nvfp4_w4a4 needs an input_scale", None)
        require(input_scale is None or format in ("nvfp4_w4a4", "fp8"), op,
                f"input_scale must be None for {format}, whose activations are not quantised", input_scale)
        require(input_scale is None or (input_scale.shape == () and input_scale.dtype == torch.float32), op,
                "input_scale must be [] fp32", None if input_scale is None else (list(input_scale.shape),
                                                                                  input_scale.dtype))
        self.format: Format = format
        self.caches_decoded = caches_decoded
        self.gemv_config: GemvConfig | None = None
        self.gemm_config: GemmConfig | None = None
        self._decoded: torch.Tensor | None = None
        self._swizzled: torch.Tensor | None = None  # the scales as Blackwell reads them
        self.out_features, self.in_features = weight.shape
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.global_scale: torch.Tensor | None
        self.input_scale: torch.Tensor | None
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales if isinstance(weight, NVFP4Tensor) else weight.scale)
        self.register_buffer("global_scale", weight.global_scale if isinstance(weight, NVFP4Tensor) else None)
        self.register_buffer("input_scale", input_scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, format: Format, *, bias: torch.Tensor | None = None,
        input_amax: torch.Tensor | None = None, weight_amax: torch.Tensor | None = None, per: Per = "channel",
        caches_decoded: bool = False,
    ) -> "QuantizedLinear":
        """Quantise `[N, K]` weight into format.

        input_amax: `[]`, largest magnitude of the activations as an observer saw it, for formats that quantise them.
        weight_amax: `[]` (NVFP4: shared by fused projections; FP8 "tensor") or `[N]` (FP8 "channel"), in place of
        weight's own. per: FP8's scales. Raises ValueError for what does not fit.
        """
        require(format in FORMATS, "QuantizedLinear", f"format must be one of {FORMATS}", format)
        input_scale = None
        quantized: NVFP4Tensor | FP8Tensor
        if format.startswith("nvfp4"):
            quantized = quantize_nvfp4(weight, _positive(weight_amax, E2M1_MAX * E4M3_MAX))
            input_scale = _positive(input_amax, E2M1_MAX * E4M3_MAX)
        else:
            quantized = quantize_fp8(weight, per=per, scale=_positive(weight_amax, E4M3_MAX))
            input_scale = _positive(input_amax, E4M3_MAX)
        return cls(format, quantized, bias=bias, input_scale=input_scale, caches_decoded=caches_decoded)

    @property
    def weight_bytes(self) -> int:
        """Bytes that codes and scales take."""
        held = (self.codes, self.scales, self.global_scale)
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def quantized_weight(self) -> NVFP4Tensor | FP8Tensor:
        """Return the weight as its format's functions take it."""
        if self.global_scale is None:
            return FP8Tensor(self.codes, self.scales)
        return NVFP4Tensor(self.codes, self.scales, self.global_scale)

    def decoded(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode the weight to `[N, K]` in dtype."""
        weight = self.quantized_weight()
        return dequantize_nvfp4(weight, dtype) if isinstance(weight, NVFP4Tensor) else dequantize_fp8(weight, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `[..., K]` fp16, bf16 or fp32: `[..., N]` in the same type."""
        y = self._multiply(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.quantized_weight()
        if isinstance(weight, FP8Tensor):
            if self.format == "fp8":
                return fp8_linear(x, weight, input_scale=self.input_scale)
            return self._by_cache(x) if self._uses_cache(x) else fp8_linear(x, weight, quantize_input=False)
        if self.input_scale is not None:
            sm = capability(x.device)
            if self._swizzled is None and sm is not None and sm >= (10, 0):
                self._swizzled = swizzle_scales(weight.scales)
            return nvfp4_w4a4_linear(x, weight, self.input_scale, swizzled=self._swizzled)
        if self._uses_cache(x):
            return self._by_cache(x)
        return nvfp4_linear(x, weight, gemv=self.gemv_config, gemm=self.gemm_config)

    def _uses_cache(self, x: torch.Tensor) -> bool:
        return self.caches_decoded and not can_run_triton(x.device) and x.shape[-1] == self.in_features

    def _by_cache(self, x: torch.Tensor) -> torch.Tensor:
        # on CPU fp32: its bf16 products are many times slower
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        if self._decoded is None or self._decoded.device != x.device or self._decoded.dtype != dtype:
            self._decoded = self.decoded(dtype)
        return F.linear(x.to(dtype), self._decoded).to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "QuantizedLinear":
        held = {name: getattr(self, name) for name in QUANTIZED}
        super()._apply(fn, recurse)
        for name, before in held.items():
            after = getattr(self, name)
            if after is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self._decoded = self._swizzled = None
        return self

    def get_extra_state(self) -> dict[str, str]:
        """Put the format into the state."""
        return {"format": self.format}

    def set_extra_state(self, state: dict[str, str]) -> None:
        """Refuse the state of another format."""
        require(state.get("format") == self.format, "QuantizedLinear", f"state must be of format {self.format}",
                state.get("format"))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._decoded = self._swizzled = None

    def extra_repr(self) -> str:
        """Name format and sizes."""
        return (f"{self.in_features}, {self.out_features}, format={self.format}, bias={self.bias is not None}, "
                f"input_scale={self.input_scale is not None}")


def _positive(amax: torch.Tensor | None, largest: float) -> torch.Tensor | None:
    if amax is None:
        return None
    require(bool((amax >= 0).all() & amax.isfinite().all()), "QuantizedLinear",
            "largest magnitudes must be finite and at least 0", amax)
    return torch.where(amax > 0, amax.float() / largest, 1.0)
