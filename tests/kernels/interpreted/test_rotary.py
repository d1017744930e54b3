import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rotary import rotary_3d_tables, rotary_reference, rotary_triton

# one rounding of the result, whose pairs are up to sqrt(2) longer than their parts
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def tables(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(rows, half, dtype=torch.float64) * 6
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("n", "heads", "head_dim", "half"), [(1, 3, 64, 32), (63, 2, 80, 40), (128, 5, 96, 24),
                                                              (1000, 2, 64, 31)])
def test_matches_fp64(n: int, heads: int, head_dim: int, half: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(1, heads, n, head_dim).to(dtype).transpose(1, 2)
    cos, sin = tables(n + 3, half)
    got = rotary_triton(x, cos, sin, positions=None, interleaved=interleaved, out=None)
    want = rotary_reference(x.double(), cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_by_positions_touches_only_what_turns(interleaved: bool) -> None:
    qkv = torch.randn(2, 40, 3, 4, 64)
    before, x = qkv.clone(), qkv[:, :, 1]
    cos, sin = tables(100, 16)
    positions = torch.randint(0, 100, (2, 40), dtype=torch.int32)
    assert rotary_triton(x, cos, sin, positions=positions, interleaved=interleaved, out=x).data_ptr() == x.data_ptr()
    want = rotary_reference(before[:, :, 1].double(), cos, sin, positions=positions, interleaved=interleaved)
    torch.testing.assert_close(x.double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(qkv[:, :, [0, 2]], before[:, :, [0, 2]])


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_wans_three_axes(head_dim: int, has_positions: bool) -> None:
    grid, origin = (3, 5, 7), (2, 0, 1)
    cos, sin = rotary_3d_tables(head_dim, 16)
    x = torch.randn(2, 105, 3, head_dim)
    positions = torch.randperm(105)[None] if has_positions else None
    got = rotary_triton(x, cos, sin, positions=positions, interleaved=True, out=None, grid=grid, origin=origin)
    want = rotary_reference(x.double(), cos, sin, positions=positions, interleaved=True, grid=grid, origin=origin)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@settings(max_examples=12, deadline=None)
@given(batch=st.integers(0, 2), n=st.integers(0, 40), heads=st.integers(1, 5), head_dim=st.integers(2, 70),
       data=st.data())
def test_any_shape_and_strides(batch: int, n: int, heads: int, head_dim: int, data: st.DataObject) -> None:
    half = data.draw(st.integers(1, head_dim // 2))
    interleaved = data.draw(st.booleans())
    order = data.draw(st.permutations([0, 1, 2]))
    shape = [(batch, n, heads)[axis] for axis in order]
    x = torch.randn(*shape, head_dim + 3)[..., 1 : head_dim + 1].permute(*(order.index(axis) for axis in range(3)), 3)
    # each value twice, as models store it
    cos, sin = (table.repeat_interleave(2, 1)[None, :n, ::2] for table in tables(max(n, 1), half))
    got = rotary_triton(x, cos, sin, positions=None, interleaved=interleaved, out=None)
    want = rotary_reference(x.double(), cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
