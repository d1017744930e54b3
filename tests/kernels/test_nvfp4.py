from dataclasses import replace

import pytest
import torch

from kernels.quantization.nvfp4 import E2M1_VALUES, dequantize_nvfp4, nvfp4_linear, quantize_nvfp4


def test_values_of_the_format_survive_and_halves_go_to_even() -> None:
    # one block whose largest value is 6 has scale 1 when the global scale is 1
    values = torch.tensor([*E2M1_VALUES, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    weight = quantize_nvfp4(values[None], torch.tensor(1.0))
    rounded = torch.tensor([*E2M1_VALUES, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0])
    assert torch.equal(dequantize_nvfp4(weight)[0], rounded)


def test_layout_of_codes() -> None:
    weight = quantize_nvfp4(torch.tensor([[6.0, -0.5] + [0.0] * 14]), torch.tensor(1.0))
    assert weight.codes[0, 0] == 0x97  # the even index in the low nibble: 6 is code 7, -0.5 is 8 + 1


def test_zeros_stay_zeros_with_scale_one() -> None:
    weight = quantize_nvfp4(torch.zeros(2, 32))
    assert torch.equal(weight.scales.float(), torch.ones(2, 2)) and not dequantize_nvfp4(weight).any()


def test_error_stays_within_half_a_step() -> None:
    x = torch.randn(64, 256)
    weight = quantize_nvfp4(x)
    step = (weight.scales.float() * weight.global_scale).repeat_interleave(16, 1)
    # steps are .5 to 2 wide; a scale rounded down clips values above 6 by at most 1/16 of them
    assert bool(((dequantize_nvfp4(weight) - x).abs() <= 1.01 * step + 1e-6).all())


def test_linear_is_the_decoded_product() -> None:
    weight, x = quantize_nvfp4(torch.randn(24, 64)), torch.randn(2, 3, 64)
    torch.testing.assert_close(nvfp4_linear(x, weight), x @ dequantize_nvfp4(weight).t())


@pytest.mark.parametrize(("change", "rule"), [
    ({"x": torch.randn(2, 16)}, r"x must be \[..., 32\] to match the weight, got \[2, 16\]"),
    ({"x": torch.randn(2, 32).double()}, "x must be fp16, bf16 or fp32, got torch.float64"),
    ({"codes": torch.zeros(16, dtype=torch.uint8)}, r"codes must be \[N, K / 2\] uint8, got \(\[16\]"),
    ({"codes": torch.zeros(4, 16)}, r"codes must be \[N, K / 2\] uint8"),
    ({"codes": torch.zeros(16, 4, dtype=torch.uint8).t()}, "codes must be contiguous"),
    ({"codes": torch.zeros(4, 12, dtype=torch.uint8)}, "K must be a multiple of 16, got 24"),
    ({"scales": torch.ones(4, 2)}, r"scales must be \[4, 2\] float8_e4m3fn"),
    ({"global_scale": torch.ones(2)}, "global_scale must be one fp32"),
    ({"global_scale": torch.ones((), device="meta")},
     r"scales and global_scale must be on cpu like the codes, got \(device.*meta"),
])
def test_bad_input_is_named(change: dict[str, torch.Tensor], rule: str) -> None:
    weight = quantize_nvfp4(torch.randn(4, 32))
    x = change.pop("x", torch.randn(2, 32))
    with pytest.raises(ValueError, match=f"nvfp4_linear: {rule}"):
        nvfp4_linear(x, replace(weight, **change))


def test_bad_matrices_are_named() -> None:
    with pytest.raises(ValueError, match=r"quantize_nvfp4: .* K a multiple of 16"):
        quantize_nvfp4(torch.randn(4, 24))


@pytest.mark.parametrize(("scale", "rule"), [
    (torch.ones(1), r"global_scale must be \[\] fp32, got \(\[1\], torch.float32\)"),
    (torch.ones((), dtype=torch.float64), r"global_scale must be \[\] fp32, got \(\[\], torch.float64\)"),
    (torch.ones((), device="meta"), "global_scale must be on cpu like weight, got meta"),
    *((torch.tensor(value), rf"global_scale must be finite and above 0, got \[{value}\]")
      for value in (0.0, -1.0, float("inf"), float("nan"))),
])
def test_a_bad_global_scale_is_named(scale: torch.Tensor, rule: str) -> None:
    with pytest.raises(ValueError, match=f"quantize_nvfp4: {rule}"):
        quantize_nvfp4(torch.randn(4, 32), scale)
