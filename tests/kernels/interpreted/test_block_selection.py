import pytest
import torch

from kernels.block_selection import pool_blocks_reference, pool_blocks_triton


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
