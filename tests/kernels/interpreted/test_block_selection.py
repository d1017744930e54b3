import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_selection import (
    pool_blocks_reference,
    pool_blocks_triton,
    select_blocks_reference,
    select_blocks_torch,
    select_blocks_triton,
)


@pytest.mark.parametrize(("n", "block"), [(1, 64), (63, 64), (130, 128), (1000, 128)])
def test_means_of_blocks(n: int, block: int) -> None:
    x = torch.randn(2, n, 2, 80, dtype=torch.bfloat16).transpose(1, 2)
    torch.testing.assert_close(pool_blocks_triton(x, block), pool_blocks_reference(x.double(), block).float(),
                               atol=1e-5, rtol=1e-5)


def test_means_of_tiles_with_lengths() -> None:
    x = torch.randn(1, 2, 150, 64)
    lengths = torch.tensor([64, 3, 22], dtype=torch.int32)
    torch.testing.assert_close(pool_blocks_triton(x, 64, lengths), torch.stack(
        [x[:, :, 64 * i : 64 * i + n].double().mean(2) for i, n in enumerate([64, 3, 22])], 2).float())


def by_sorting(scores: torch.Tensor, num_blocks: int, forced: torch.Tensor | None) -> torch.Tensor:
    """The rule in Python: forced ones first, then by score (NaN as -inf), then by id."""
    marks = torch.zeros(scores.shape, dtype=torch.bool) if forced is None else forced.expand(scores.shape)
    chosen = torch.empty(*scores.shape[:3], num_blocks, dtype=torch.int32)
    for place in itertools.product(*map(range, scores.shape[:3])):
        row = zip(scores[place].tolist(), marks[place].tolist(), strict=True)
        ranks = [(not is_forced, 0.0 if is_forced else math.inf if math.isnan(score) else -score, i)
                 for i, (score, is_forced) in enumerate(row)]
        chosen[place] = torch.tensor(sorted(i for _, _, i in sorted(ranks)[:num_blocks]))
    return chosen


def check(scores: torch.Tensor, num_blocks: int, forced: torch.Tensor | None = None) -> None:
    want = by_sorting(scores, num_blocks, forced)
    for select in (select_blocks_triton, select_blocks_torch, select_blocks_reference):
        indices, counts = select(scores, num_blocks, forced)
        assert torch.equal(indices, want) and indices.dtype == torch.int32
        assert torch.equal(counts, torch.full(scores.shape[:3], num_blocks, dtype=torch.int32))


@pytest.mark.parametrize(("width", "num_blocks"), [(1, 1), (63, 8), (128, 128), (1000, 125), (8192, 1024)])
def test_the_best_of_a_row(width: int, num_blocks: int) -> None:
    check(torch.randn(1, 1, 2, width), num_blocks)


def test_ties_go_to_the_lower_id_and_forced_ones_before_infinity() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[0.0, -0.0, 0.0, -0.0, 0.0, -1.0], [inf, inf, nan, 1.0, -inf, inf],
                         [nan, -inf, nan, -inf, nan, -inf], [1e-45, -1e-45, 0.0, 1e-38, 3.4e38, -3.4e38]])[None, None]
    forced = torch.tensor([False, False, True, False, False, True])
    for num_blocks in (2, 3, 5):
        check(rows, num_blocks)
        check(rows, num_blocks, forced)


def test_too_many_forced_ones_that_nobody_counted_are_cut_at_the_highest_id() -> None:
    check(torch.randn(1, 1, 2, 9), 2, torch.tensor([[False] * 3 + [True] * 6]))


@settings(max_examples=12, deadline=None)
@given(data=st.data(), batch=st.integers(0, 2), heads=st.integers(1, 2), rows=st.integers(0, 2),
       width=st.integers(1, 80), layout=st.sampled_from(["whole", "view", "transposed"]),
       marks=st.sampled_from([None, (), (1, 1, 1), (1, 1, 0), (0, 0, 1)]))
def test_any_scores_and_strides(
    data: st.DataObject, batch: int, heads: int, rows: int, width: int, layout: str, marks: tuple[int, ...] | None
) -> None:
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])
    seed = data.draw(st.integers(0, 1000))
    values = data.draw(st.lists(few, min_size=1, max_size=4)) if data.draw(st.booleans()) else None
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if values is None:
            return torch.randn(shape, generator=generator)
        return torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]

    if layout == "whole":
        scores = draw(batch, heads, rows, width)
    elif layout == "view":
        scores = draw(rows, batch, heads, 2 * width + 1)[..., 1::2].permute(1, 2, 0, 3)
    else:
        scores = draw(width, rows, heads, batch).permute(3, 2, 1, 0)
    forced = None
    if marks is not None:
        sizes = [size if is_whole else 1 for size, is_whole in zip((batch, heads, rows), marks, strict=False)]
        forced = torch.rand(*sizes, width, generator=generator) < 0.3
    check(scores, data.draw(st.integers(1, width)), forced)
