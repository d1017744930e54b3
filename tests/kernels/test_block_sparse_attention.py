from typing import Any

import pytest
import torch

from kernels.attention import attention
from kernels.block_selection import block_scores, select_blocks
from kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_reference


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("n", [1, 63, 128, 1000])
def test_gathered_blocks_match_the_reference(n: int, ragged: bool) -> None:
    q, k, v = (torch.randn(1, 2, n, 64) for _ in range(3))
    blocks = -(-n // 64)
    indices, counts = select_blocks(block_scores(q, k, block_q=64, block_k=64), min(3, blocks))
    if ragged:
        counts = torch.randint(0, indices.shape[-1] + 1, counts.shape, dtype=torch.int32)
    sizes: dict[str, Any] = {"block_q": 64, "block_k": 64}
    out, lse = block_sparse_attention(q, k, v, indices, counts, **sizes, check_blocks=True)
    want, want_lse = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts, **sizes,
                                                      scale=0.125)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_all_blocks_is_dense_attention() -> None:
    q, k, v = (torch.randn(1, 2, 200, 64) for _ in range(3))
    indices, counts = select_blocks(block_scores(q, k), 2)
    torch.testing.assert_close(block_sparse_attention(q, k, v, indices, counts)[0], attention(q, k, v))


@pytest.mark.parametrize(("ids", "rule"), [([[1, 0]], "ascend"), ([[0, 2]], "ids must be in"), ([[-1, 0]], "ids")])
def test_bad_lists_are_refused_when_checked(ids: list[list[int]], rule: str) -> None:
    q = torch.randn(1, 1, 64, 64)
    k = torch.randn(1, 1, 128, 64)
    indices = torch.tensor([[ids]], dtype=torch.int32)
    counts = torch.full((1, 1, 1), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=rule):
        block_sparse_attention(q, k, k, indices, counts, block_q=64, block_k=64, check_blocks=True)
