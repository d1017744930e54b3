from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layer_norm_modulate import layer_norm_modulate_reference, layer_norm_modulate_triton

# one rounding of results of up to about ten
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(x: torch.Tensor, parts: list[Any]) -> None:
    y, total = layer_norm_modulate_triton(x, *parts, eps=1e-6)
    # the sum is rounded to x's type before it is normalised
    assert torch.equal(total, layer_norm_modulate_reference(x, *parts, eps=1e-6)[1])
    wide: list[Any] = [None if part is None else part.double() for part in parts[2:]]
    want, _ = layer_norm_modulate_reference(total.double(), None, None, *wide, eps=1e-6)
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("form", ["plain", "affine", "modulated", "gated", "all"])
@pytest.mark.parametrize(("n", "width"), [(6, 1), (12, 63), (4, 128), (6, 1000)])
def test_matches_fp64(n: int, width: int, form: str, dtype: torch.dtype) -> None:
    x = (torch.randn(n, 2, width) * 2 + 1).to(dtype).transpose(0, 1)
    # the six modulations of a block are chunks of one tensor, per clip, frame or token
    table = torch.randn(2, 2, 6, width).unbind(2)
    branch = torch.randn(2, n, width).to(dtype)
    affine = [torch.randn(width), torch.randn(width).to(dtype)]
    none: list[Any] = [None, None]
    parts: list[Any] = {"plain": [*none, *none, *none], "affine": [branch, None, *none, *affine],
             "modulated": [*none, *table[:2], *none], "gated": [branch, table[2], *none, *none],
             "all": [branch, table[2], torch.randn(1, 1, width), torch.randn(2, n, width), *affine]}[form]
    check(x, parts)


def test_a_large_mean_leaves_the_variance_its_digits() -> None:
    x = torch.randn(1, 5, 512) + 1000
    none: list[Any] = [None] * 6
    y, _ = layer_norm_modulate_triton(x, *none, eps=1e-6)
    want, _ = layer_norm_modulate_reference(x.double(), *none, eps=1e-6)
    # the mean's own rounding, 3e-5 of 1000; squares summed before it is taken away would be off by a tenth
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=0)


@settings(max_examples=12, deadline=None)
@given(batch=st.integers(0, 3), runs=st.integers(1, 4), run=st.integers(0, 5), width=st.integers(1, 70),
       transposed=st.booleans())
def test_any_shape_and_strides(batch: int, runs: int, run: int, width: int, transposed: bool) -> None:
    n = runs * run
    x = torch.randn(n, batch, width + 2)[..., 1 : width + 1].transpose(0, 1) if transposed else torch.randn(
        batch, n, width)
    scale, shift, gate = (torch.randn(batch or 1, runs, width) for _ in range(3))
    check(x, [torch.randn(batch, n, width), gate, scale, shift[:1], None, None])
