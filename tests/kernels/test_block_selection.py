import torch

from kernels.block_selection import select_blocks


def test_forced_blocks_are_taken_and_ids_ascend() -> None:
    forced = torch.zeros(8, dtype=torch.bool)
    forced[[0, 7]] = True
    indices, _ = select_blocks(torch.randn(2, 3, 5, 8), 4, forced=forced)
    assert bool((indices[..., 0] == 0).all() and (indices[..., -1] == 7).all())
    assert bool((indices[..., 1:] > indices[..., :-1]).all())
