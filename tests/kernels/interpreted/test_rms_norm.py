import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm import rms_norm_reference, rms_norm_triton
from tests.kernels.interpreted.layouts import laid_out, layouts

# one rounding of the result, two with a residual
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (63, 128), (5, 1000), (3, 63)])
def test_matches_fp64(rows: int, width: int, has_residual: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(width, rows) * 3).to(dtype).t()  # transposed, so not contiguous
    residual = torch.randn(rows, width).to(dtype) if has_residual else None
    weight = torch.randn(width)
    y, total = rms_norm_triton(x, weight, residual, 1e-6)
    want_total = x if residual is None else (x.double() + residual.double()).to(dtype)
    want, _ = rms_norm_reference(want_total.double(), weight.double(), None, 1e-6)
    torch.testing.assert_close(total, want_total)
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 40)), width=st.integers(1, 140),
       places=st.tuples(layouts, layouts), is_transposed=st.booleans(), rank=st.integers(1, 4),
       has_residual=st.booleans(), eps=st.sampled_from([0.0, 1e-6, 1.0]))
def test_any_shape_and_layout(
    sizes: tuple[int, int, int], width: int, places: tuple[str, str], is_transposed: bool, rank: int,
    has_residual: bool, eps: float,
) -> None:
    x, residual = (laid_out(torch.randn(*sizes, width), place) for place in places)
    if is_transposed:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)  # columns that do not lie beside one another
    if rank < 4 and all(sizes):
        x, residual = (t[(0,) * (4 - rank)] for t in (x, residual))
    weight = torch.randn(width)
    y, total = rms_norm_triton(x, weight, residual if has_residual else None, eps)
    want_total = x.double() + residual.double() if has_residual else x.double()
    assert y.shape == total.shape == x.shape
    torch.testing.assert_close(total.double(), want_total, atol=1e-6, rtol=1e-6)
    want, _ = rms_norm_reference(total.double(), weight.double(), None, eps)
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)
