from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4, quantize_nvfp4
from kernels.quantization.nvfp4_w4a4 import (
    W4A4Config,
    nvfp4_w4a4_linear_triton,
    quantize_activations_triton,
    swizzled_of,
)

# both sides are exact in every type: what differs is the order of sums and one rounding of the result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
FUSED, APART = W4A4Config(16, 32, 64, 4, 2, True), W4A4Config(16, 32, 64, 4, 2, False)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@pytest.fixture(autouse=True)
def _scales_are_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode E4M3 block scales as what they are: the interpreter takes every scale for E8M0."""
    original = interpreter._dot_scaled_scale_to_f32

    def decode(handle: Any, compute_type: Any) -> np.ndarray:
        if handle.dtype.scalar == tl.float8e4nv:
            return np.asarray(E4M3[handle.data.view(np.uint8)])
        return np.asarray(original(handle, compute_type))

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", decode)


def scale_of(x: torch.Tensor) -> torch.Tensor:
    return (x.float().abs().amax() / 2688).clamp(min=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 304), (63, 128), (2, 1008)])
def test_activations_are_quantised_to_the_bit(m: int, k: int, dtype: torch.dtype) -> None:
    x = (torch.randn(m, k) * torch.logspace(-6, 3, k)).to(dtype)  # scales from below to above E4M3's range
    x[0, :16] = 0
    scale = torch.tensor(0.05)
    got, want = quantize_activations_triton(x, scale), quantize_nvfp4(x, scale)
    assert torch.equal(got.scales.view(torch.uint8), want.scales.view(torch.uint8))
    assert torch.equal(got.codes, want.codes)


def test_every_halfway_value_goes_to_the_even_code() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat([halves, -halves])[None]
    got = dequantize_nvfp4(quantize_activations_triton(x, torch.tensor(1.0)))
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(got, torch.cat([even, -even])[None])


def test_every_scale_is_encoded_as_torch_does() -> None:
    # block maxima at every E4M3 value, between two and halfway: 127 · 3 scales
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    targets = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 1.013])
    x = torch.zeros(len(targets), 16)
    x[:, 3] = 6 * targets
    got, want = quantize_activations_triton(x, torch.tensor(1.0)), quantize_nvfp4(x, torch.tensor(1.0))
    assert torch.equal(got.scales.view(torch.uint8), want.scales.view(torch.uint8))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (3, 63, 304), (20, 40, 128)])
def test_product_matches_fp64(m: int, n: int, k: int, dtype: torch.dtype, fused: bool, swizzled: bool) -> None:
    weight, x = quantize_nvfp4(torch.randn(n, k)), torch.randn(m, k).to(dtype)
    config = W4A4Config(32, 128 if swizzled else 32, 64, 4, 2, fused)
    y = nvfp4_w4a4_linear_triton(x, weight, scale_of(x), swizzled=swizzled_of(weight) if swizzled else None,
                                 config=config)
    decoded = dequantize_nvfp4(quantize_nvfp4(x, scale_of(x)), torch.float64)
    want = decoded @ dequantize_nvfp4(weight, torch.float64).t()
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * k**0.5, rtol=TOLERANCE[dtype])


def test_every_byte_of_codes_and_every_scale_decodes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.where(scales.float().isfinite(), scales.float(), 1.0).to(torch.float8_e4m3fn)[:, None].contiguous()
    weight = NVFP4Tensor(codes, scales, torch.tensor(0.5))
    x = torch.zeros(2, 16)
    x[0, 0] = x[1, 1] = 6.0  # 6 is a code, its block's scale is 1
    y = nvfp4_w4a4_linear_triton(x, weight, torch.tensor(1.0), config=FUSED)
    assert torch.equal(y.t(), dequantize_nvfp4(weight)[:, :2] * 6)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=st.integers(0, 20), n=st.integers(1, 40), blocks=st.integers(1, 9), transposed=st.booleans(),
       fused=st.booleans(), seed=st.integers(0, 99))
def test_any_shape(m: int, n: int, blocks: int, transposed: bool, fused: bool, seed: int) -> None:
    torch.manual_seed(seed)
    k = 16 * blocks
    weight = quantize_nvfp4(torch.randn(n, k))
    x = torch.randn(k, m).t() if transposed else torch.randn(m, 2 * k)[:, :k]
    scale = torch.tensor(0.002)
    y = nvfp4_w4a4_linear_triton(x, weight, scale, config=FUSED if fused else APART)
    want = dequantize_nvfp4(quantize_nvfp4(x, scale), torch.float64) @ dequantize_nvfp4(weight, torch.float64).t()
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)
