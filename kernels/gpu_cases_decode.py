"""What `gpu_check` runs of paged attention beyond plain decode, and of the quantised products beyond weight-only."""

from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu_case import Case, Inputs
from kernels.paged_attention import PagedConfig, paged_attention_reference, paged_attention_triton
from kernels.quantization.fp8 import FP8Tensor, dequantize_fp8, fp8_linear_scaled_mm, quantize_fp8
from kernels.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4, quantize_nvfp4
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import (
    W4A4Config,
    default_w4a4_config,
    nvfp4_w4a4_linear_triton,
    quantize_activations_triton,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
REFERENCED = 2


def paged_case(
    name: str, batch: int, tokens: int, context: int, configs: tuple[Any, ...], *, heads: int = 32, kv_heads: int = 8,
    d: int = 128, dv: int = 128, page: int = 64, fp8: bool = False, tree: bool = False, window: int | None = None,
    sinks: bool = False, soft_cap: float | None = None,
) -> Case:
    """Check `tokens` query tokens for each of `batch` sequences of `context` tokens; d = 576 shares its latents."""
    pages = -(-context // page)

    def make(device: torch.device, filled: bool) -> Inputs:
        def values(*shape: int) -> torch.Tensor:
            if not filled:
                return torch.empty(shape, dtype=BF16, device=device)
            return torch.randn(shape, device=device).to(BF16)

        k = values(batch * pages, page, kv_heads, d)
        v = k[..., :dv] if d == 576 else values(batch * pages, page, kv_heads, dv)
        scale = torch.full((kv_heads,), 1.0, device=device) if fp8 else None
        k, v = (x.to(FP8) if fp8 else x for x in (k, v))
        mask = None
        if tree:
            # token i continues token (i - 1) // 2: a binary tree
            mask = torch.eye(tokens, dtype=torch.bool, device=device)
            for i in range(1, tokens):
                mask[i] |= mask[(i - 1) // 2]
            mask = mask.repeat(batch, 1)
        return {
            "q": values(batch * tokens, heads, d), "k": k, "v": v, "k_scale": scale, "v_scale": scale, "mask": mask,
            "table": torch.randperm(batch * pages, device=device).view(batch, pages).int(),
            "lengths": torch.full((batch,), context, dtype=torch.int32, device=device),
            "cu": None if tokens == 1 else torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens,
            "sinks": torch.zeros(heads, device=device) if sinks else None,
        }

    def options(x: Inputs) -> dict[str, Any]:
        return {"scale": d**-0.5, "window": window, "soft_cap": soft_cap, "sinks": x["sinks"], "k_scale": x["k_scale"],
                "v_scale": x["v_scale"]}

    def launch(x: Inputs, config: Any) -> torch.Tensor:
        return paged_attention_triton(x["q"], x["k"], x["v"], x["table"], x["lengths"], cu_seqlens_q=x["cu"],
                                      tree_mask=x["mask"], config=config, **options(x))

    def reference(x: Inputs) -> torch.Tensor:
        few = min(REFERENCED, batch)
        rows = few * tokens
        cu = None if x["cu"] is None else x["cu"][: few + 1]
        mask = None if x["mask"] is None else x["mask"][:rows]
        return paged_attention_reference(x["q"][:rows].double(), x["k"], x["v"], x["table"][:few], x["lengths"][:few],
                                         cu_seqlens_q=cu, tree_mask=mask, **options(x))

    what = " ".join(word for word, is_on in (("fp8", fp8), ("tree", tree), (f"window {window}", window is not None),
                                             ("sinks", sinks), ("soft cap", soft_cap is not None)) if is_on)
    seen = context if window is None else min(window, context)
    pairs = seen if tokens < context else (context + 1) / 2
    element = 1 if fp8 else 2
    width = d if d == 576 else d + dv
    return Case(
        name, f"B{batch} n{tokens} H{heads}/{kv_heads} D{d}/{dv} context {context} page {page} {what}".strip(), make,
        launch, configs, reference, lambda x, out: out[: min(REFERENCED, batch) * tokens], {},
        2.0 * batch * tokens * heads * pairs * (d + dv),
        element * batch * seen * kv_heads * width + 2.0 * batch * tokens * heads * (d + dv),
        lambda x: [x, {**x, "q": x["q"].clone()}])


def fp8_case(name: str, m: int, n: int, k: int, per: Any) -> Case:
    """Check torch's scaled product, whose operands' layout is ours; not compiled ahead (no Triton)."""
    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:
            weight = FP8Tensor(torch.empty(n, k).to(FP8), torch.ones(() if per == "tensor" else (n,)))
            return {"x": torch.empty(m, k, dtype=BF16), "weight": weight}
        weight = quantize_fp8(torch.randn(n, k, device=device), per=per)
        return {"x": torch.randn(m, k, device=device).to(BF16), "weight": weight,
                "dense": dequantize_fp8(weight, BF16)}

    def reference(x: Inputs) -> torch.Tensor:
        rows = dequantize_fp8(quantize_fp8(x["x"][:256]), torch.float64)
        return rows @ dequantize_fp8(x["weight"], torch.float64).t()

    def launch(x: Inputs, config: Any) -> torch.Tensor | None:
        # where compilation is tried ahead, on tensors of a CPU, there is nothing to compile
        return fp8_linear_scaled_mm(x["x"], x["weight"], None) if "dense" in x else None

    # no peer sets the allowed error: bf16's product is of unquantised activations
    return Case(name, f"M{m} N{n} K{k} per {per}", make, launch, (None,), reference, lambda x, out: out[:256], {},
                2.0 * m * n * k, n * k + 2.0 * m * (n + k))


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
                lambda x: dequantize_nvfp4(quantize_nvfp4(x["x"][:512], x["scale"]), torch.float64), sample, {}, 0.0,
                m * k * 2.5625)


def w4a4_case(name: str, m: int, n: int, k: int, configs: tuple[Any, ...]) -> Case:
    """Check the product of NVFP4 by NVFP4; meant for sm_100 and later, emulated by Triton before."""
    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:
            weight = NVFP4Tensor(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 16).to(FP8),
                                 torch.ones(()))
            return {"x": torch.empty(m, k, dtype=BF16), "weight": weight, "scale": torch.ones(()),
                    "swizzled": swizzle_scales(weight.scales)}
        weight = quantize_nvfp4(torch.randn(n, k, device=device))
        return {"x": torch.randn(m, k, device=device).to(BF16), "weight": weight, "swizzled":
                swizzle_scales(weight.scales), "scale": torch.tensor(0.002, device=device),
                "dense": dequantize_nvfp4(weight, BF16)}

    def reference(x: Inputs) -> torch.Tensor:
        rows = dequantize_nvfp4(quantize_nvfp4(x["x"][:256], x["scale"]), torch.float64)
        return rows @ dequantize_nvfp4(x["weight"], torch.float64).t()

    return Case(
        name, f"M{m} N{n} K{k}", make,
        lambda x, c: nvfp4_w4a4_linear_triton(x["x"], x["weight"], x["scale"], swizzled=x["swizzled"], config=c),
        configs, reference, lambda x, out: out[:256],
        {"bf16 linear": lambda x: F.linear(x["x"], x["dense"])}, 2.0 * m * n * k,
        n * k * 0.5625 + 2.0 * m * (n + k))


DECODE_CASES: tuple[Case, ...] = (
    paged_case("decode fp8 B64", 64, 1, 4096, (PagedConfig(64, 4, 3, 4, 16), PagedConfig(64, 4, 5, 4, 16)), fp8=True),
    paged_case("prefill chunk 2048 of 8192", 1, 2048, 8192, (
        PagedConfig(64, 8, 2, 1, 64), PagedConfig(64, 4, 2, 1, 64), PagedConfig(64, 8, 3, 1, 64))),
    paged_case("latents B32", 32, 1, 4096, (PagedConfig(32, 8, 2, 4, 16), PagedConfig(16, 4, 2, 4, 16)),
               heads=128, kv_heads=1, d=576, dv=512),
    paged_case("verify tree of 16, B16", 16, 16, 4096, (PagedConfig(64, 8, 2, 4, 64), PagedConfig(32, 4, 3, 4, 32)),
               tree=True),
    paged_case("decode invariant B64", 64, 1, 4096, (PagedConfig(64, 4, 3, None, 16, 1024),)),
    paged_case("decode window, sinks, soft cap", 64, 1, 4096, (PagedConfig(64, 4, 3, 2, 16),), window=1024, sinks=True,
               soft_cap=30.0),
    fp8_case("FP8 M2048 per channel", 2048, 14336, 4096, "channel"),
    fp8_case("FP8 M16 per tensor", 16, 14336, 4096, "tensor"),
    quantize_case("NVFP4 activations 2048x4096", 2048, 4096),
)
# for sm_100 and later
BLACKWELL_CASES: tuple[Case, ...] = (
    w4a4_case("W4A4 M16", 16, 14336, 4096, (default_w4a4_config(16, True),)),
    w4a4_case("W4A4 M2048", 2048, 14336, 4096, (
        default_w4a4_config(2048, True), W4A4Config(128, 256, 256, 8, 3, False))),
)
