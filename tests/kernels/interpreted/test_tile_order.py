import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tile_order import tile_order_reference, tile_order_triton

Sizes = tuple[int, int, int]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("grid", "tile"), [((1, 1, 1), (4, 4, 4)), ((7, 3, 3), (2, 2, 2)), ((2, 8, 8), (1, 8, 8)),
                                            ((10, 10, 10), (4, 4, 8))])
def test_there_and_back(grid: Sizes, tile: Sizes, dtype: torch.dtype) -> None:
    x = torch.randn(1, math.prod(grid), 2, 24).to(dtype).transpose(1, 2)
    tiled = tile_order_triton(x, grid, tile, inverse=False)
    assert torch.equal(tiled, tile_order_reference(x, grid, tile))
    padded = torch.where(tiled == 0, float("nan"), tiled)  # what pads hold is not read
    assert torch.equal(tile_order_triton(padded, grid, tile, inverse=True), x)


@settings(max_examples=15, deadline=None)
@given(grid=st.tuples(*[st.integers(1, 6)] * 3), tile=st.tuples(*[st.integers(1, 5)] * 3), batch=st.integers(0, 2),
       width=st.integers(1, 40))
def test_any_grid_and_tile(grid: Sizes, tile: Sizes, batch: int, width: int) -> None:
    x = torch.randn(2, math.prod(grid), batch, width + 2)[..., 1 : width + 1].permute(2, 0, 1, 3)
    tiled = tile_order_triton(x, grid, tile, inverse=False)
    assert torch.equal(tiled, tile_order_reference(x, grid, tile))
    assert torch.equal(tile_order_triton(tiled, grid, tile, inverse=True), x)
