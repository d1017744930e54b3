from collections.abc import Callable

import pytest
import torch

from kernels.block_selection import block_scores, select_blocks


def test_forced_blocks_are_taken_and_ids_ascend() -> None:
    forced = torch.zeros(8, dtype=torch.bool)
    forced[[0, 7]] = True
    indices, _ = select_blocks(torch.randn(2, 3, 5, 8), 4, forced=forced)
    assert bool((indices[..., 0] == 0).all() and (indices[..., -1] == 7).all())
    assert bool((indices[..., 1:] > indices[..., :-1]).all())


def test_equal_scores_go_by_their_id() -> None:
    scores = torch.tensor([1.0, 2.0, 0.0, 2.0, -0.0, 2.0, float("nan")])[None, None, None]
    assert select_blocks(scores, 2)[0].tolist() == [[[[1, 3]]]]
    assert select_blocks(scores, 5)[0].tolist() == [[[[0, 1, 2, 3, 5]]]]


def test_no_gradient_is_asked_of_a_choice() -> None:
    indices, counts = select_blocks(torch.randn(1, 1, 2, 5, requires_grad=True), 2)
    assert not indices.requires_grad and counts.tolist() == [[[2, 2]]]


@pytest.mark.parametrize(("call", "rule"), [
    (lambda q: block_scores(q, q[..., :32].contiguous()), r"block_scores: k must be \[B, H, Nk, D\] to match"),
    (lambda q: block_scores(q, q.half()), "block_scores: k must be fp16, bf16 or fp32 like q, got torch.float16"),
    (lambda q: block_scores(q.double(), q.double()), "block_scores: q must be fp16"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3, dtype=torch.int32), 1),
     "select_blocks: scores must be fp32, got torch.int32"),
    (lambda q: select_blocks(torch.zeros(1, 2, 3), 1), r"scores must be \[B, H, Qb, Kb\], got \[1, 2, 3\]"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3), 4), r"select_blocks: num_blocks must be in 1\.\.3, got 4"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3), 1, forced=torch.tensor(True)), "forced must be bool that"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3), 1, forced=torch.zeros(3, dtype=torch.bool, device="meta")),
     "forced must be on cpu like the scores, got meta"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3), 1, forced=torch.ones(3, dtype=torch.bool)),
     "forced must be at most num_blocks 1 a row, got 3"),
    (lambda q: select_blocks(torch.zeros(1, 1, 2, 3), 1, forced=torch.zeros(4, 3, dtype=torch.bool)),
     r"forced must be bool that broadcasts to \[1, 1, 2, 3\]"),
])
def test_bad_input_is_named(call: Callable[[torch.Tensor], object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        call(torch.randn(1, 2, 200, 64))
