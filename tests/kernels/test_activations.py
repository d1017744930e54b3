from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.gelu import gelu, gelu_reference
from kernels.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize("width", [1, 63, 128, 1000])
def test_equal_torch(width: int) -> None:
    gate, up = torch.randn(3, 2 * width).chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(gelu(gate), F.gelu(gate))
    torch.testing.assert_close(gelu(gate, approximate="tanh"), F.gelu(gate, approximate="tanh"))
    # and torch's own agree with the formulas in fp64
    torch.testing.assert_close(gelu_reference(gate.double(), "tanh"), F.gelu(gate.double(), approximate="tanh"))
    torch.testing.assert_close(gelu_reference(gate.double()), F.gelu(gate.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    gate, up = ((torch.randn(100, 64) * 4).to(dtype) for _ in range(2))
    want = silu_mul_reference(gate.double(), up.double()).to(dtype)
    assert float((silu_mul(gate, up) != want).float().mean()) < 0.005  # but for halfway values
    torch.testing.assert_close(gelu(gate), gelu_reference(gate.double()).to(dtype))


def test_gradients_are_torchs() -> None:
    gate, up = (torch.randn(4, 8, requires_grad=True, dtype=torch.float32) for _ in range(2))
    grads = torch.autograd.grad(silu_mul(gate, up).sum() + gelu(gate).sum(), (gate, up))
    want = torch.autograd.grad((F.silu(gate) * up).sum() + F.gelu(gate).sum(), (gate, up))
    torch.testing.assert_close(grads, want)


@pytest.mark.parametrize(("gate", "up", "rule"), [
    (torch.randn(2, 3), torch.randn(2, 4), r"silu_mul: up must be \[2, 3\] torch.float32 like gate, got \(\[2, 4\]"),
    (torch.randn(2, 3), torch.randn(2, 3).half(), r"silu_mul: up must be .* got \(\[2, 3\], torch.float16\)"),
    (torch.randn(2, 3).double(), torch.randn(2, 3), r"silu_mul: gate must be \[..., C\] fp16, bf16 or fp32, got"),
    (torch.randn(2, 3), torch.empty(2, 3, device="meta"), "silu_mul: up must be on cpu like gate, got meta"),
])
def test_bad_halves_are_named(gate: torch.Tensor, up: torch.Tensor, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        silu_mul(gate, up)


def test_a_bad_form_or_type_is_named() -> None:
    form: Any = "sigmoid"
    with pytest.raises(ValueError, match="gelu: approximate must be 'none' or 'tanh', got sigmoid"):
        gelu(torch.randn(2), approximate=form)
    with pytest.raises(ValueError, match=r"gelu: x must be fp16, bf16 or fp32, got torch.int64"):
        gelu(torch.arange(3))
