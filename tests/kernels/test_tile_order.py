import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tile_order import tile_index, tile_lengths, tile_order, tile_order_reference, untile_order

Sizes = tuple[int, int, int]


@settings(deadline=None, max_examples=50)
@given(grid=st.tuples(*[st.integers(1, 8)] * 3), tile=st.tuples(*[st.integers(1, 5)] * 3))
def test_map_mask_and_order_agree(grid: Sizes, tile: Sizes) -> None:
    n = math.prod(grid)
    x = torch.arange(1.0, n + 1)[None, None, :, None].repeat(2, 1, 1, 3)
    tiled = tile_order(x, grid, tile)
    assert torch.equal(tiled, tile_order_reference(x, grid, tile))
    assert torch.equal(untile_order(tiled, grid, tile), x)
    index = tile_index(grid, tile)
    assert torch.equal(index.float() + 1, tiled[0, 0, :, 0])
    # each tile's tokens come first
    by_tile = (index >= 0).view(-1, math.prod(tile))
    assert torch.equal(by_tile.sum(1), tile_lengths(grid, tile)) and int(by_tile.sum()) == n
    assert bool((by_tile[:, 1:] <= by_tile[:, :-1]).all())


def test_a_tile_is_a_neighbourhood() -> None:
    index = tile_index((4, 4, 4), (2, 2, 2))
    assert index[:8].tolist() == [0, 1, 4, 5, 16, 17, 20, 21]


def test_gradients_go_back_to_their_tokens() -> None:
    x = torch.randn(1, 1, 27, 2, requires_grad=True)
    tiled = tile_order(x, (3, 3, 3), (2, 2, 2))
    (tiled * tiled.detach()).sum().backward()
    torch.testing.assert_close(x.grad, x.detach())


@pytest.mark.parametrize(("x", "grid", "tile", "rule"), [
    (torch.randn(1, 1, 9, 2), (2, 2, 2), (2, 2, 2), r"tile_order: x must be \[B, H, 8, D\] .* got \[1, 1, 9, 2\]"),
    (torch.randn(1, 1, 8, 2), (2, 2, 2), (0, 2, 2), r"tile_order: tile must be three sizes of at least 1, got \(0, 2"),
    (torch.randn(1, 1, 8, 2), (2, 4), (1, 1, 1), r"tile_order: grid must be three sizes of at least 1, got \(2, 4\)"),
    (torch.randn(1, 1, 8, 2).double(), (2, 2, 2), (1, 1, 1), "tile_order: x must be fp16, bf16 or fp32, got"),
    (torch.randn(1, 1, 8, 4)[..., ::2], (2, 2, 2), (1, 1, 1), "tile_order: x's last stride must be 1, got"),
])
def test_bad_input_is_named(x: torch.Tensor, grid: Any, tile: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        tile_order(x, grid, tile)


def test_a_sequence_of_another_length_is_not_untiled() -> None:
    with pytest.raises(ValueError, match=r"untile_order: x must be \[B, H, 64, D\] .* got \[1, 1, 27, 2\]"):
        untile_order(torch.randn(1, 1, 27, 2), (3, 3, 3), (2, 2, 2))
