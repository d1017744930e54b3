from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.quantization.nvfp4 import (
    GemmConfig,
    GemvConfig,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_linear_triton,
    quantize_nvfp4,
)

# weights are exact in every type: what differs is the order of sums and one rounding of the result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
GEMV, GEMM = {"gemv": GemvConfig(16, 128, 4, 2)}, {"gemm": GemmConfig(16, 32, 64, 4, 2)}


@pytest.mark.parametrize("kernel", [GEMV, GEMM], ids=["gemv", "gemm"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (1, 63, 304), (3, 40, 128)])
def test_linear_matches_fp64(m: int, n: int, k: int, dtype: torch.dtype, kernel: dict[str, Any]) -> None:
    weight = quantize_nvfp4(torch.randn(n, k))
    x = torch.randn(m, k).to(dtype)
    y = nvfp4_linear_triton(x, weight, **kernel)
    want = x.double() @ dequantize_nvfp4(weight, torch.float64).t()
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * k**0.5, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", [GEMV, GEMM], ids=["gemv", "gemm"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_byte_of_codes_decodes_exactly(dtype: torch.dtype, kernel: dict[str, Any]) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 8).contiguous()
    weight = NVFP4Tensor(codes, torch.ones(256, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    for position in (0, 1):
        x = torch.zeros(1, 16, dtype=dtype)
        x[0, position] = 1
        want = dequantize_nvfp4(weight)[:, position]
        assert torch.equal(nvfp4_linear_triton(x, weight, **kernel)[0].float(), want)


@pytest.mark.parametrize("kernel", [GEMV, GEMM], ids=["gemv", "gemm"])
def test_every_scale_decodes_exactly(kernel: dict[str, Any]) -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[scales.float().isfinite()][:, None]
    weight = NVFP4Tensor(torch.full((len(scales), 8), 0x57, dtype=torch.uint8), scales, torch.tensor(0.5))
    x = torch.eye(16)[:1]
    want = dequantize_nvfp4(weight)[:, 0]
    assert torch.equal(nvfp4_linear_triton(x, weight, **kernel)[0], want)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=st.integers(0, 20), n=st.integers(1, 40), blocks=st.integers(1, 12), layout=st.sampled_from("rts"),
       kernel=st.sampled_from([GEMV, GEMM]), dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0, 99))
def test_any_shape_and_layout(
    m: int, n: int, blocks: int, layout: str, kernel: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    k = 16 * blocks
    x = {"r": torch.randn(m, k), "t": torch.randn(k, m).t(), "s": torch.randn(m, 2 * k)[:, k:]}[layout].to(dtype)
    weight = quantize_nvfp4(torch.randn(n, k))
    y = nvfp4_linear_triton(x, weight, **kernel)
    want = x.double() @ dequantize_nvfp4(weight, torch.float64).t()
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * k**0.5, rtol=TOLERANCE[dtype])
