from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_selection import select_blocks
from kernels.block_sparse_attention import (
    BlockSparseConfig,
    block_sparse_attention_reference,
    block_sparse_attention_triton,
)
from tests.kernels.interpreted.layouts import laid_out, layouts

# as in test_attention: rounding of weights and outputs to the type
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def lists(heads: int, q_blocks: int, k_blocks: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices, _ = select_blocks(torch.randn(1, heads, q_blocks, k_blocks), width)
    counts = torch.randint(0, width + 1, (1, heads, q_blocks), dtype=torch.int32)
    counts[..., 0] = width
    indices[torch.arange(width) >= counts[..., None]] = 1 << 30  # what lies beyond the count is never read
    return indices, counts


@pytest.mark.parametrize("use_tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize(("n_q", "n_k", "block_q", "block_k", "block_n"),
                         [(1, 1, 64, 64, 64), (63, 200, 64, 64, 64), (300, 390, 128, 128, 64),
                          (200, 130, 64, 128, 128)])
def test_matches_fp64_with_ragged_lists_and_edges(
    n_q: int, n_k: int, block_q: int, block_k: int, block_n: int, use_tma: bool
) -> None:
    q, k, v = torch.randn(1, 2, n_q, 64), torch.randn(1, 2, n_k, 64), torch.randn(1, 2, n_k, 64)
    k_blocks = -(-n_k // block_k)
    indices, counts = lists(2, -(-n_q // block_q), k_blocks, min(k_blocks, 3))
    out, lse = block_sparse_attention_triton(q, k, v, indices, counts, block_q=block_q, block_k=block_k, scale=0.125,
                                             config=BlockSparseConfig(block_n, 4, 2, use_tma))
    want, want_lse = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts,
                                                      block_q=block_q, block_k=block_k, scale=0.125)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_sixteen_bit_types(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 1, 250, head_dim).to(dtype) for _ in range(3))
    indices, counts = lists(1, 4, 4, 3)
    out, _ = block_sparse_attention_triton(q, k, v, indices, counts, block_q=64, block_k=64, scale=0.1,
                                           config=BlockSparseConfig(64, 4, 2, False))
    want, _ = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts, block_q=64,
                                               block_k=64, scale=0.1)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("use_tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize(("block_k", "block_n"), [(64, 64), (128, 64)])
def test_tiles_with_lengths_of_their_own(block_k: int, block_n: int, use_tma: bool) -> None:
    n_k = 3 * block_k + 20
    q, k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, n_k, 64), torch.randn(1, 2, n_k, 64)
    indices, counts = lists(2, 2, 4, 3)
    indices[0, 0, 0] = torch.tensor([0, 1, 3])
    # one without any token, first in a list; one that ends in its first half; the last one of 20 named too long
    lengths = torch.tensor([0, 33, block_k, 40], dtype=torch.int32)
    sizes: dict[str, Any] = {"block_q": 64, "block_k": block_k, "scale": 0.125, "key_lengths": lengths}
    out, lse = block_sparse_attention_triton(q, k, v, indices, counts, **sizes,
                                             config=BlockSparseConfig(block_n, 4, 2, use_tma))
    want, want_lse = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts, **sizes)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_head_dims(head_dim: int) -> None:
    q, k, v = (torch.randn(1, 1, 100, head_dim) for _ in range(3))
    indices, counts = lists(1, 2, 2, 2)
    sizes: dict[str, Any] = {"block_q": 64, "block_k": 64, "scale": 0.1}
    out, _ = block_sparse_attention_triton(q, k, v, indices, counts, **sizes, config=BlockSparseConfig(32, 4, 2, False))
    want, _ = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts, **sizes)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), batch=st.integers(0, 2), heads=st.integers(1, 2), n_q=st.integers(0, 130),
       n_k=st.integers(0, 200), use_tma=st.booleans(), places=st.tuples(layouts, layouts, layouts))
def test_any_lists_sizes_and_layouts(
    data: st.DataObject, batch: int, heads: int, n_q: int, n_k: int, use_tma: bool, places: tuple[str, str, str]
) -> None:
    shapes = ((batch, heads, n_q, 64), *[(batch, heads, n_k, 64)] * 2)
    q, k, v = (laid_out(torch.randn(shape), place) for shape, place in zip(shapes, places, strict=True))
    q_blocks, k_blocks = -(-n_q // 64), -(-n_k // 64)
    width = data.draw(st.integers(0, k_blocks), "width")
    # ids and counts with room behind them, as where lists are cut out of longer ones
    indices = torch.full((batch, heads, q_blocks, width + 2), 1 << 30, dtype=torch.int32)[..., :width]
    counts = torch.full((batch, heads, 2 * q_blocks), 1 << 30, dtype=torch.int32)[..., :q_blocks]
    for place in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        ids = sorted(data.draw(st.sets(st.integers(0, k_blocks - 1), max_size=width) if width else st.just(set())))
        indices[tuple(place)][: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        counts[tuple(place)] = len(ids)
    lengths = None
    if data.draw(st.booleans(), "lengths"):
        lengths = torch.tensor([data.draw(st.integers(0, 64)) for _ in range(k_blocks)], dtype=torch.int32)
    sizes: dict[str, Any] = {"block_q": 64, "block_k": 64, "scale": 0.125, "key_lengths": lengths}
    out, lse = block_sparse_attention_triton(q, k, v, indices, counts, **sizes,
                                             config=BlockSparseConfig(64, 4, 2, use_tma))
    want, want_lse = block_sparse_attention_reference(q.double(), k.double(), v.double(), indices, counts, **sizes)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
