import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.head_rms_norm import head_rms_norm_reference, head_rms_norm_triton

# one rounding of the result, as in test_rms_norm
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("n", "heads", "head_dim"), [(1, 1, 1), (63, 3, 63), (128, 12, 64), (1000, 2, 16)])
def test_matches_fp64(n: int, heads: int, head_dim: int, joint: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(1, n, 3, heads, head_dim) * 3).to(dtype)[:, :, 1]
    weight = torch.randn(heads, head_dim) if joint else torch.randn(head_dim)
    want = head_rms_norm_reference(x.double(), weight.double(), 1e-6)
    torch.testing.assert_close(head_rms_norm_triton(x, weight, 1e-6).double(), want, atol=TOLERANCE[dtype],
                               rtol=TOLERANCE[dtype])


@settings(max_examples=12, deadline=None)
@given(batch=st.integers(0, 2), n=st.integers(0, 20), heads=st.integers(1, 7), head_dim=st.integers(1, 70),
       joint=st.booleans(), order=st.permutations([0, 1, 2]))
def test_any_shape_and_strides(batch: int, n: int, heads: int, head_dim: int, joint: bool, order: list[int]) -> None:
    shape = [(batch, n, heads)[axis] for axis in order]
    x = torch.randn(*shape, head_dim + 3)[..., 1 : head_dim + 1].permute(*(order.index(axis) for axis in range(3)), 3)
    weight = torch.randn(heads, head_dim) if joint else torch.randn(head_dim)
    want = head_rms_norm_reference(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(head_rms_norm_triton(x, weight, 1e-5).double(), want, atol=1e-5, rtol=1e-5)
