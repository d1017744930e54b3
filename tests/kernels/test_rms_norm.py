import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("width", [1, 63, 128, 1000])
def test_equals_torch(width: int) -> None:
    x, residual, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), torch.nn.functional.rms_norm(x, (width,), weight, 1e-5))
    y, total = add_rms_norm(x, residual, weight)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x + residual, (width,), weight, 1e-6))


def test_gradients_are_torchs() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    grads = torch.autograd.grad(rms_norm(x, weight).square().sum(), (x, weight))
    want = torch.autograd.grad(torch.nn.functional.rms_norm(x, (8,), weight, 1e-6).square().sum(), (x, weight))
    torch.testing.assert_close(grads, want)


def test_bad_weight_is_named() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight must be \[64\] to match x \[2, 64\], got \[32\]"):
        rms_norm(torch.randn(2, 64), torch.randn(32))
