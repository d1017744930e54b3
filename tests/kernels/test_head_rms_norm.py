from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.head_rms_norm import head_rms_norm, head_rms_norm_reference


@pytest.mark.parametrize("n", [1, 63, 128, 1000])
def test_equals_torch_by_head_and_over_heads(n: int) -> None:
    x = torch.randn(2, n, 3, 4, 32)[:, :, 1]
    weight = torch.randn(4, 32)
    torch.testing.assert_close(head_rms_norm(x, weight[0], eps=1e-5), F.rms_norm(x, (32,), weight[0], 1e-5))
    torch.testing.assert_close(head_rms_norm(x, weight, eps=1e-5), F.rms_norm(x, (4, 32), weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, 4, 32).to(dtype), torch.randn(4, 32).to(dtype)
    want = head_rms_norm_reference(x.double(), weight.double())
    torch.testing.assert_close(head_rms_norm(x, weight).double(), want, atol=2e-2, rtol=2e-2)


def test_gradients_are_torchs() -> None:
    x, weight = torch.randn(1, 3, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    grads = torch.autograd.grad(head_rms_norm(x, weight).square().sum(), (x, weight))
    want = torch.autograd.grad(F.rms_norm(x, (8,), weight, 1e-6).square().sum(), (x, weight))
    torch.testing.assert_close(grads, want)


@pytest.mark.parametrize(("change", "rule"), [
    ({"x": torch.randn(2, 4, 8)}, r"head_rms_norm: x must be \[B, N, H > 0, D > 0\], got \[2, 4, 8\]"),
    ({"x": torch.randn(1, 2, 4, 8).double()}, "head_rms_norm: x must be fp16, bf16 or fp32, got torch.float64"),
    ({"x": torch.randn(1, 2, 4, 16)[..., ::2]}, "head_rms_norm: x's last stride must be 1, got"),
    ({"weight": torch.randn(4)}, r"weight must be \[8\] or \[4, 8\] to match x \[1, 2, 4, 8\], got \[4\]"),
    ({"weight": torch.randn(8, 4).t()}, r"head_rms_norm: weight must be contiguous, got \(1, 4\)"),
    ({"weight": torch.ones(8, dtype=torch.int32)}, "head_rms_norm: weight must be fp16, bf16 or fp32, got torch.int32"),
    ({"x": torch.empty(1, 1, 300, 64), "weight": torch.empty(300, 64)}, "must be at most 16384 wide, got"),
    ({"eps": -1e-6}, "head_rms_norm: eps must be at least 0, got -1e-06"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        head_rms_norm(**{"x": torch.randn(1, 2, 4, 8), "weight": torch.randn(8), **change})
