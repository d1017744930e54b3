import pytest
import torch

from kernels.rms_norm import rms_norm_reference, rms_norm_triton

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
