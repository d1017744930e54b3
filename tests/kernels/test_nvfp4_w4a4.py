from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from kernels.quantization.nvfp4_scales import swizzle_scales, unswizzle_scales
from kernels.quantization.nvfp4_w4a4 import W4A4Config, nvfp4_w4a4_linear, nvfp4_w4a4_linear_triton


@given(st.integers(1, 300), st.integers(1, 20))
def test_swizzled_scales_come_back(rows: int, scales: int) -> None:
    x = torch.randint(0, 256, (rows, scales), dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = swizzle_scales(x)
    assert swizzled.shape == (-(-rows // 128), -(-scales // 4), 32, 4, 4) and swizzled.is_contiguous()
    assert torch.equal(unswizzle_scales(swizzled, rows, scales).view(torch.uint8), x.view(torch.uint8))


def test_swizzled_scales_lie_where_cublas_reads_them() -> None:
    rows, scales = 256, 8
    x = torch.randint(0, 256, (rows, scales), dtype=torch.uint8)
    flat = swizzle_scales(x).flatten()
    for row in (0, 1, 31, 32, 127, 128, 200, 255):
        for column in range(scales):
            # cuBLAS's formula for its 1D block scaling layout
            tile = row // 128 * (scales // 4) + column // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert flat[offset] == x[row, column]


def test_padding_is_zero() -> None:
    assert swizzle_scales(torch.full((1, 1), 7, dtype=torch.uint8)).sum() == 7


def test_linear_quantises_both_sides() -> None:
    weight, x = quantize_nvfp4(torch.randn(24, 64)), torch.randn(2, 3, 64)
    scale = x.abs().amax() / 2688
    decoded = dequantize_nvfp4(quantize_nvfp4(x.flatten(0, 1), scale)).view(x.shape)
    torch.testing.assert_close(nvfp4_w4a4_linear(x, weight, scale), decoded @ dequantize_nvfp4(weight).t())
    assert nvfp4_w4a4_linear(x[:0], weight, scale).shape == (0, 3, 24)


@pytest.mark.parametrize(("change", "rule"), [
    ({"x": torch.randn(2, 32)}, r"x must be \[..., 64\] to match the weight, got \[2, 32\]"),
    ({"x": torch.randn(2, 64).double()}, "x must be fp16, bf16 or fp32"),
    ({"input_scale": torch.ones(1)}, r"input_scale must be \[\] fp32"),
    ({"input_scale": torch.zeros(())}, r"input_scale must be finite and above 0, got \[0.0\]"),
    ({"input_scale": torch.tensor(float("inf"))}, r"input_scale must be finite and above 0, got \[inf\]"),
    ({"swizzled": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, r"swizzled must be contiguous \[1, 1, 32, 4, 4\]"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(2, 64), "weight": quantize_nvfp4(torch.randn(4, 64)),
                                 "input_scale": torch.ones(())}
    with pytest.raises(ValueError, match=f"nvfp4_w4a4_linear: {rule}"):
        nvfp4_w4a4_linear(**{**arguments, **change})


def test_a_tile_that_cuts_swizzled_scales_is_named() -> None:
    weight = quantize_nvfp4(torch.randn(4, 64))
    with pytest.raises(ValueError, match=r"block_n must be a multiple of 128 .* got \(64, 64\)"):
        nvfp4_w4a4_linear_triton(torch.randn(2, 64), weight, torch.ones(()), swizzled=swizzle_scales(weight.scales),
                                 config=W4A4Config(16, 64, 64, 4, 2, True))


def test_bad_scales_are_named() -> None:
    with pytest.raises(ValueError, match=r"swizzle_scales: scales must be \[M, S\] of one byte"):
        swizzle_scales(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"unswizzle_scales: scales must be \[2, 1, 32, 4, 4\] .* for 129 rows of 4"):
        unswizzle_scales(torch.zeros(512, dtype=torch.uint8), 129, 4)
