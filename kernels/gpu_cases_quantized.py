"""What `gpu_check` runs of quantised products: NVFP4 weights, FP8, NVFP4 by NVFP4, and the pass over activations."""

from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu_case import Case, Inputs, randn
from kernels.quantization.fp8 import FP8Tensor, dequantize_fp8, fp8_linear_scaled_mm, quantize_fp8
from kernels.quantization.nvfp4 import (
    GemvConfig,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_linear_triton,
    quantize_nvfp4,
)
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import nvfp4_w4a4_linear_triton, quantize_activations_triton

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def _nvfp4_inputs(m: int, n: int, k: int, copies: int, device: torch.device, filled: bool) -> Inputs:
    if not filled:
        weight = NVFP4Tensor(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 16).to(torch.float8_e4m3fn),
                             torch.ones(()))
        return {"x": torch.empty(m, k, dtype=torch.bfloat16), "weights": [weight]}
    weights = [quantize_nvfp4(torch.randn(n, k, device=device)) for _ in range(copies)]
    return {"x": randn(m, k, device=device, filled=True), "weights": weights,
            "dense": [dequantize_nvfp4(w, torch.bfloat16) for w in weights]}


def nvfp4_case(name: str, m: int, n: int, k: int, copies: int, configs: tuple[Any, ...]) -> Case:
    """Check the product with NVFP4 weights; `copies` of them are timed in turn, so that none lies in the cache."""
    def launch(x: Inputs, c: Any) -> torch.Tensor:
        kind = "gemv" if isinstance(c, GemvConfig) else "gemm"
        return nvfp4_linear_triton(x["x"], x["weights"][0], **{kind: c})

    return Case(
        name, f"M{m} N{n} K{k}", lambda device, filled: _nvfp4_inputs(m, n, k, copies, device, filled), launch, configs,
        lambda x: x["x"][:256].double() @ dequantize_nvfp4(x["weights"][0], torch.float64).t(),
        lambda x, out: out[:256], {"bf16 linear": lambda x: F.linear(x["x"], x["dense"][0])}, 2.0 * m * n * k,
        n * k * 0.5625 + 2.0 * m * (n + k),
        lambda x: [{"x": x["x"], "weights": [w], "dense": [d]}
                   for w, d in zip(x["weights"], x["dense"], strict=True)])


def fp8_case(name: str, m: int, n: int, k: int, per: Any) -> Case:
    """Check torch's scaled product, whose operands' layout is ours; not compiled ahead (no Triton)."""
    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:
            weight = FP8Tensor(torch.empty(n, k).to(FP8), torch.ones(() if per == "tensor" else (n,)))
            return {"x": torch.empty(m, k, dtype=BF16), "weight": weight}
        weight = quantize_fp8(torch.randn(n, k, device=device), per=per)
        rows = torch.randn(m, k, device=device).to(BF16)
        return {"x": rows, "weight": weight, "dense": dequantize_fp8(weight, BF16),
                "decoded": dequantize_fp8(quantize_fp8(rows), BF16)}

    def reference(x: Inputs) -> torch.Tensor:
        rows = dequantize_fp8(quantize_fp8(x["x"][:256]), torch.float64)
        return rows @ dequantize_fp8(x["weight"], torch.float64).t()

    def launch(x: Inputs, config: Any) -> torch.Tensor | None:
        # where compilation is tried ahead, on tensors of a CPU, there is nothing to compile
        return fp8_linear_scaled_mm(x["x"], x["weight"], None) if "dense" in x else None

    return Case(name, f"M{m} N{n} K{k} per {per}", make, launch, (None,), reference, lambda x, out: out[:256],
                {"bf16 linear": _of_decoded}, 2.0 * m * n * k, n * k + 2.0 * m * (n + k))


def _of_decoded(x: Inputs) -> torch.Tensor:
    # of activations as quantised: of the others its error would be the quantisation's and allow anything
    return F.linear(x["decoded"], x["dense"])


def quantize_case(name: str, m: int, k: int) -> Case:
    """Check the pass that quantises activations, decoded, against torch's to the bit."""
    def make(device: torch.device, filled: bool) -> Inputs:
        x = torch.randn(m, k, device=device).to(BF16) if filled else torch.empty(m, k, dtype=BF16, device=device)
        return {"x": x, "scale": torch.tensor(0.002, device=device)}

    def launch(x: Inputs, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = quantize_activations_triton(x["x"], x["scale"])
        return q.codes, q.scales.view(torch.uint8), q.global_scale

    def sample(x: Inputs, out: Any) -> torch.Tensor:
        return dequantize_nvfp4(NVFP4Tensor(out[0][:512], out[1][:512].view(FP8), out[2]))

    return Case(name, f"{m} x {k}", make, launch, (None,),
                lambda x: dequantize_nvfp4(quantize_nvfp4(x["x"][:512], x["scale"])), sample, {}, 0.0, m * k * 2.5625,
                is_exact=True)


def w4a4_case(name: str, m: int, n: int, k: int, configs: tuple[Any, ...]) -> Case:
    """Check the product of NVFP4 by NVFP4; meant for sm_100 and later, emulated by Triton before."""
    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:
            weight = NVFP4Tensor(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 16).to(FP8),
                                 torch.ones(()))
            return {"x": torch.empty(m, k, dtype=BF16), "weight": weight, "scale": torch.ones(()),
                    "swizzled": swizzle_scales(weight.scales)}
        weight = quantize_nvfp4(torch.randn(n, k, device=device))
        rows, scale = torch.randn(m, k, device=device).to(BF16), torch.tensor(0.002, device=device)
        return {"x": rows, "weight": weight, "swizzled": swizzle_scales(weight.scales), "scale": scale,
                "dense": dequantize_nvfp4(weight, BF16),
                "decoded": dequantize_nvfp4(quantize_nvfp4(rows, scale), BF16)}

    def reference(x: Inputs) -> torch.Tensor:
        rows = dequantize_nvfp4(quantize_nvfp4(x["x"][:256], x["scale"]), torch.float64)
        return rows @ dequantize_nvfp4(x["weight"], torch.float64).t()

    return Case(
        name, f"M{m} N{n} K{k}", make,
        lambda x, c: nvfp4_w4a4_linear_triton(x["x"], x["weight"], x["scale"], swizzled=x["swizzled"], config=c),
        configs, reference, lambda x, out: out[:256],
        {"bf16 linear": _of_decoded}, 2.0 * m * n * k, n * k * 0.5625 + 2.0 * m * (n + k))
