"""What decoding, quantised products and their helpers become on cards that are not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.dry_launch import SHARED_LIMIT_BYTES, dry_launches
from kernels.paged_attention import PagedConfig, paged_attention_triton
from kernels.quantization.nvfp4 import GemmConfig, GemvConfig, NVFP4Tensor, nvfp4_linear_triton
from kernels.quantization.nvfp4_scales import swizzle_scales
from kernels.quantization.nvfp4_w4a4 import W4A4Config, nvfp4_w4a4_linear_triton
from kernels.shipped_configs import SHIPPED, Shipped

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def paged(
    heads: int, kv_heads: int, d: int, dv: int, config: PagedConfig, tokens: int | None = None, fp8: bool = False,
    tree: bool = False, page: int = 64,
) -> None:
    k = torch.empty(16, page, kv_heads, d, dtype=BF16)
    v = k[..., :dv] if d == 576 else torch.empty(16, page, kv_heads, dv, dtype=BF16)
    scale = torch.ones(kv_heads) if fp8 else None
    k, v = (x.to(FP8) if fp8 else x for x in (k, v))
    cu = None if tokens is None else torch.empty(3, dtype=torch.int32)
    mask = torch.empty(tokens or 0, 64, dtype=torch.bool) if tree else None
    paged_attention_triton(torch.empty(tokens or 2, heads, d, dtype=BF16), k, v, torch.empty(2, 16, dtype=torch.int32),
                           torch.empty(2, dtype=torch.int32), scale=0.1, window=None, cu_seqlens_q=cu, tree_mask=mask,
                           k_scale=scale, v_scale=scale, config=config)


def nvfp4_weight() -> NVFP4Tensor:
    return NVFP4Tensor(torch.empty(512, 256, dtype=torch.uint8), torch.empty(512, 32).to(FP8), torch.ones(()))


def nvfp4(m: int, **config: Any) -> None:
    nvfp4_linear_triton(torch.empty(m, 512, dtype=BF16), nvfp4_weight(), **config)


def w4a4(m: int, config: W4A4Config, is_swizzled: bool = True) -> None:
    weight = nvfp4_weight()
    nvfp4_w4a4_linear_triton(torch.empty(m, 512, dtype=BF16), weight, torch.ones(()), config=config,
                             swizzled=swizzle_scales(weight.scales) if is_swizzled else None)


DECODE = {"mma", "cp.async"}
# what is expected of each kernel that a launch compiles, by card; an absent card is not compiled for
CASES: dict[str, tuple[Callable[[], None], dict[int, list[set[str]]]]] = {
    "decode with fp8 keys": (
        lambda: paged(8, 2, 128, 128, PagedConfig(64, 4, 3, 4), fp8=True),
        {90: [DECODE, set()], 100: [DECODE, set()], 120: [DECODE, set()]}),
    "decode in pages of 16": (
        lambda: paged(8, 2, 128, 128, PagedConfig(64, 4, 3, 4), page=16),
        {90: [DECODE, set()], 100: [DECODE, set()], 120: [DECODE, set()]}),
    "latents": (
        lambda: paged(16, 1, 576, 512, PagedConfig(32, 8, 2, 4)),
        {90: [DECODE, set()], 100: [DECODE, set()], 120: [DECODE, set()]}),
    "chunk of prefill": (
        lambda: paged(32, 8, 128, 128, PagedConfig(64, 8, 2, 1, 64), tokens=256),
        {90: [{"wgmma", "cp.async"}], 100: [{"tcgen05", "cp.async"}], 120: [DECODE]}),
    "verification": (
        lambda: paged(32, 8, 128, 128, PagedConfig(64, 8, 2, 1, 64), tokens=64, tree=True),
        {90: [{"wgmma", "cp.async"}], 100: [{"tcgen05", "cp.async"}], 120: [DECODE]}),
    "invariant": (
        lambda: paged(32, 8, 128, 128, PagedConfig(64, 4, 3, None, 16, 1024), tokens=64),
        {90: [DECODE], 100: [DECODE], 120: [DECODE]}),
    "NVFP4 vector": (
        lambda: nvfp4(1, gemv=GemvConfig()),
        {90: [set()], 100: [set()], 120: [set()]}),
    "NVFP4 matrix": (
        lambda: nvfp4(256, gemm=GemmConfig(128, 128, 64, 8, 3)),
        {90: [{"wgmma", "cp.async"}], 100: [{"tcgen05", "cp.async"}], 120: [DECODE]}),
    "NVFP4 few tokens": (
        lambda: nvfp4(16, gemm=GemmConfig(16, 64, 128, 4, 3)),
        {90: [DECODE], 100: [DECODE], 120: [DECODE]}),
    # natively by sm_100 and sm_120 only
    "W4A4, activations quantised in the product": (
        lambda: w4a4(16, W4A4Config(128, 128, 128, 8, 3, True)),
        {100: [{"tcgen05", "nvfp4"}]}),
    "W4A4, activations quantised before it": (
        lambda: w4a4(256, W4A4Config(128, 128, 256, 8, 3, False)),
        {100: [set(), {"tcgen05", "nvfp4", "cp.async"}]}),
    "W4A4, scales as they are": (
        lambda: w4a4(256, W4A4Config(128, 128, 128, 8, 2, False), False),
        {100: [set(), {"tcgen05", "nvfp4", "cp.async"}], 120: [set(), {"mma", "nvfp4", "cp.async"}]}),
}


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("name", list(CASES))
def test_instructions_and_no_spills(name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, expected = CASES[name]
    if arch not in expected:
        pytest.skip("this kernel is not for this card")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with dry_launches(arch) as compiled:
        launch()
    assert len(compiled) == len(expected[arch])
    for kernel, kinds in zip(compiled, expected[arch], strict=True):
        assert kinds <= set(kernel.instructions), kernel
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[arch], kernel


def launch_shipped(row: Shipped) -> None:
    if row.op == "paged_attention":
        d = min(row.sizes["d"], 576)
        rows = row.sizes.get("rows", 64)
        paged(16, 16 if d < 576 else 1, d, min(d, 512), PagedConfig(**row.config), tokens=2 * rows)
    elif row.op == "nvfp4_gemv":
        nvfp4(1, gemv=GemvConfig(**row.config))
    elif row.op == "nvfp4_gemm":
        nvfp4(row.sizes.get("m", 256), gemm=GemmConfig(**row.config))
    else:
        assert row.op == "nvfp4_w4a4"
        w4a4(row.sizes.get("m", 256), W4A4Config(**row.config))


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: f"{row.op}-{row.arch}-{row.sizes}")
def test_what_ships_compiles_without_spills(row: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with dry_launches(row.arch) as compiled:
        launch_shipped(row)
    assert compiled
    for kernel in compiled:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[row.arch], kernel
