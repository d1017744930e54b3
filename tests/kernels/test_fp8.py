from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantization.fp8 import (
    FP8Tensor,
    Per,
    dequantize_fp8,
    fp8_linear,
    fp8_linear_reference,
    fp8_linear_scaled_mm,
    quantize_fp8,
)


def e4m3(byte: int) -> float:
    """The format's definition: bias 7, subnormals in eighths of 2^-6, no infinities."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 128 else value


def test_every_byte_decodes_as_the_format_says() -> None:
    finite = [b for b in range(256) if b & 127 != 127]
    codes = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        got = dequantize_fp8(FP8Tensor(codes, torch.tensor(1.0)), dtype)[0].tolist()
        assert got == [e4m3(b) for b in finite]


@pytest.mark.parametrize("per", get_args(Per))
def test_rounds_to_the_nearest_value_of_the_format(per: Per) -> None:
    x = torch.randn(7, 100) * torch.logspace(-3, 3, 7)[:, None]
    q = quantize_fp8(x, per=per)
    values = torch.tensor([e4m3(b) for b in range(256) if b & 127 != 127]).double()
    scaled = x.double() / q.scale.double().reshape(-1, 1)
    nearest = (scaled[..., None] - values).abs().amin(-1)
    torch.testing.assert_close((q.codes.double() - scaled).abs(), nearest, atol=1e-4, rtol=1e-4)
    assert q.codes.float().abs().max() == 448


def test_beyond_a_given_scale_values_end_at_the_largest() -> None:
    q = quantize_fp8(torch.tensor([[1e6, -1e6, 1.0]]), per="tensor", scale=torch.tensor(1.0))
    assert q.codes.float().tolist() == [[448.0, -448.0, 1.0]]
    assert quantize_fp8(torch.zeros(2, 3)).scale.tolist() == [1.0, 1.0]


# sums of products that are exact in fp32: their order and one rounding of the result
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("per", get_args(Per))
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("m", [1, 63, 0])
def test_linear_matches_fp64(m: int, is_static: bool, per: Per, dtype: torch.dtype) -> None:
    weight, x = quantize_fp8(torch.randn(33, 100), per=per), torch.randn(m, 100).to(dtype)
    scale = torch.tensor(0.01) if is_static else None
    x_quantized = quantize_fp8(x, per="tensor" if is_static else "channel", scale=scale)
    want = dequantize_fp8(x_quantized, torch.float64) @ dequantize_fp8(weight, torch.float64).t()
    y = fp8_linear(x, weight, input_scale=scale)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_unquantised_activations() -> None:
    weight, x = quantize_fp8(torch.randn(8, 32)), torch.randn(2, 3, 32)
    torch.testing.assert_close(fp8_linear(x, weight, quantize_input=False), x @ dequantize_fp8(weight).t())


@settings(max_examples=20, deadline=None)
@given(m=st.integers(0, 40), n=st.integers(1, 4), k=st.integers(1, 6), per=st.sampled_from(get_args(Per)),
       is_static=st.booleans(), dtype=st.sampled_from(list(TOLERANCE)), is_view=st.booleans())
def test_the_scaled_product_of_torch_agrees(
    m: int, n: int, k: int, per: Per, is_static: bool, dtype: torch.dtype, is_view: bool
) -> None:
    weight = quantize_fp8(torch.randn(16 * n, 16 * k), per=per)
    x = torch.randn(2, m, 16 * k).to(dtype)
    x = x.transpose(0, 1) if is_view else x
    scale = torch.tensor(0.01) if is_static else None
    got, want = fp8_linear_scaled_mm(x, weight, scale), fp8_linear_reference(x, weight, input_scale=scale)
    # with one scale a row torch computes bf16
    torch.testing.assert_close(got, want, atol=5e-2, rtol=1.6e-2)


def test_a_token_does_not_depend_on_others() -> None:
    weight, x = quantize_fp8(torch.randn(16, 32)), torch.randn(4, 32)
    x[3] *= 1000
    torch.testing.assert_close(fp8_linear(x, weight)[:3], fp8_linear(x[:3], weight))


@pytest.mark.parametrize(("change", "rule"), [
    (lambda a: a.update(x=torch.randn(2, 31)), r"x must be \[..., 32\] to match the weight, got \[2, 31\]"),
    (lambda a: a.update(x=torch.randn(2, 32).double()), "x must be fp16, bf16 or fp32, got torch.float64"),
    (lambda a: a.update(input_scale=torch.ones(2)), r"input_scale must be \[\] fp32"),
    (lambda a: a.update(input_scale=torch.zeros(())), r"input_scale must be finite and above 0, got \[0.0\]"),
    (lambda a: a.update(input_scale=torch.ones(()), quantize_input=False), "input_scale must be None"),
    (lambda a: a.update(weight=FP8Tensor(torch.randn(4, 32), torch.ones(()))), r"codes must be \[N, K\] float8_e4m3fn"),
    (lambda a: a.update(weight=FP8Tensor(a["weight"].codes, torch.ones(3))), r"scale must be \[\] or \[4\] fp32"),
])
def test_bad_input_is_named(change: Callable[[dict[str, Any]], None], rule: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(2, 32), "weight": quantize_fp8(torch.randn(4, 32))}
    change(arguments)
    with pytest.raises(ValueError, match=f"fp8_linear: {rule}"):
        fp8_linear(**arguments)


@pytest.mark.parametrize(("arguments", "rule"), [
    ({"x": torch.randn(3)}, r"x must be \[N, K\] floating point"),
    ({"x": torch.randn(3, 4), "per": "row"}, "per must be 'tensor' or 'channel', got row"),
    ({"x": torch.randn(3, 4), "scale": torch.ones(())}, r"scale must be \[3\] fp32 per channel"),
    ({"x": torch.randn(3, 4), "scale": torch.tensor([1.0, -2.0, float("nan")])},
     r"scale must be finite and above 0, got \[-2.0, nan\]"),
    ({"x": torch.randn(3, 4), "scale": torch.ones(3, device="meta")}, "scale must be on cpu like x, got meta"),
])
def test_bad_matrices_are_named(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"quantize_fp8: {rule}"):
        quantize_fp8(**arguments)
