from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gelu import gelu_reference, gelu_triton
from kernels.silu_mul import silu_mul_reference, silu_mul_triton

# one rounding of the result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (63, 63), (5, 128), (1000, 9), (2, 5000)])
def test_silu_mul_matches_fp64_on_halves_of_a_projection(rows: int, width: int, dtype: torch.dtype) -> None:
    gate, up = (torch.randn(rows, 2 * width) * 4).to(dtype).chunk(2, -1)
    want = silu_mul_reference(gate.double(), up.double())
    torch.testing.assert_close(silu_mul_triton(gate, up).double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_silu_mul_reads_each_input_by_its_own_stride() -> None:
    gate, up = torch.randn(20, 150)[:, 7:107], torch.randn(20, 100)
    torch.testing.assert_close(silu_mul_triton(gate, up), silu_mul_reference(gate, up))
    torch.testing.assert_close(silu_mul_triton(up, gate), silu_mul_reference(up, gate))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1,), (63,), (128, 3), (1000, 7), (0, 4), ()])
def test_gelu_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype, approximate: Literal["none", "tanh"]) -> None:
    x = (torch.randn(shape) * 4).to(dtype)
    want = gelu_reference(x.double(), approximate)
    torch.testing.assert_close(gelu_triton(x, approximate).double(), want, atol=TOLERANCE[dtype],
                               rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_far_from_zero_neither_overflows(approximate: Literal["none", "tanh"]) -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
    torch.testing.assert_close(gelu_triton(x, approximate), x.clamp(min=0), atol=1e-6, rtol=0)
    torch.testing.assert_close(silu_mul_triton(x, torch.ones(6)), x.clamp(min=0), atol=1e-6, rtol=1e-6)


@settings(max_examples=12, deadline=None)
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), transposed=st.booleans())
def test_any_shape_and_strides(shape: list[int], transposed: bool) -> None:
    gate, up = torch.randn(shape), torch.randn(shape)
    if transposed:
        gate, up = gate.transpose(0, -1), torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))
        up = up.reshape(gate.shape)
    torch.testing.assert_close(silu_mul_triton(gate, up), silu_mul_reference(gate, up))
    torch.testing.assert_close(gelu_triton(gate, "tanh"), torch.nn.functional.gelu(gate, approximate="tanh"))
