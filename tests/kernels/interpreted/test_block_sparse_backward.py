"""Gradients of block-sparse attention by Triton's kernels against autograd in fp64, log-sum-exp in the loss too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import block_sparse_attention as module
from kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_reference
from kernels.block_sparse_backward import BackwardConfig, block_sparse_backward_triton, transpose_lists
from kernels.gated_sparse_attention import gated_sparse_attention, gated_sparse_attention_reference

# fp32 differs by summation order; 16-bit: P, dS and the results are rounded once each, 2^-8 (bf16) or 2^-11 (fp16)
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def _kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_run_triton", lambda device: True)


def lists(heads: int, q_blocks: int, k_blocks: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(1, heads, q_blocks, k_blocks).argsort(-1)[..., :width].sort(-1).values.int()
    counts = torch.randint(0, width + 1, (1, heads, q_blocks), dtype=torch.int32)
    counts[..., 0] = width
    counts[:, -1, -1] = 0
    ids[torch.arange(width) >= counts[..., None]] = 1 << 30  # what lies beyond the count is never read
    return ids, counts


def gradients(
    attend: Callable[..., Any], inputs: tuple[torch.Tensor, ...], blocks: tuple[torch.Tensor, torch.Tensor],
    options: dict[str, Any], weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*leaves, *blocks, **options)
    finite = torch.where(lse == float("-inf"), 0, lse)
    return torch.autograd.grad((out * weights).sum() + (finite.to(weights.dtype) * weights[..., 0]).sum(), leaves)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_q: int, block_k: int, width: int,
          lengths: torch.Tensor | None = None) -> None:
    blocks = -(-k.shape[2] // block_k)
    listed = lists(q.shape[1], -(-q.shape[2] // block_q), blocks, min(width, blocks))
    options: dict[str, Any] = {"block_q": block_q, "block_k": block_k, "key_lengths": lengths, "scale": 0.3}
    weights = torch.randn(q.shape).to(q.dtype)
    got = gradients(block_sparse_attention, (q, k, v), listed, options, weights)
    want = gradients(block_sparse_attention_reference, (q.double(), k.double(), v.double()), listed, options,
                     weights.double())
    for name, mine, theirs in zip("qkv", got, want, strict=True):
        assert mine.dtype == q.dtype
        torch.testing.assert_close(mine.double(), theirs, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype],
                                   msg=f"gradient of {name}: {mine}, autograd's {theirs}")


@pytest.mark.parametrize(("n_q", "n_k", "block_q", "block_k"), [(1, 1, 64, 64), (63, 150, 64, 64), (150, 63, 64, 128),
                                                                (200, 190, 128, 64)])
def test_match_fp64_with_ragged_lists_and_edges(n_q: int, n_k: int, block_q: int, block_k: int) -> None:
    # token-major views, each with strides of its own
    q, k, v = (torch.randn(1, n, 2, 64 * parts).transpose(1, 2)[..., :64]
               for n, parts in ((n_q, 1), (n_k, 2), (n_k, 3)))
    check(q, k, v, block_q, block_k, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_sixteen_bit_types_and_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = ((torch.randn(1, 1, 130, head_dim) * 0.5).to(dtype) for _ in range(3))
    check(q, k, v, 64, 64, 2)


def test_the_widest_heads_in_two_batches() -> None:
    listed = torch.zeros(2, 1, 1, 1, dtype=torch.int32), torch.ones(2, 1, 1, dtype=torch.int32)
    options: dict[str, Any] = {"block_q": 64, "block_k": 64, "scale": 0.1}
    inputs = tuple(torch.randn(2, 1, 40, 256) for _ in range(3))
    weights = torch.randn(2, 1, 40, 256)
    got = gradients(block_sparse_attention, inputs, listed, options, weights)
    want = gradients(block_sparse_attention_reference, tuple(x.double() for x in inputs), listed, options,
                     weights.double())
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-4)


def test_tiles_with_lengths_of_their_own() -> None:
    lengths = torch.tensor([50, 64, 1], dtype=torch.int32)
    q, k, v = (torch.randn(1, 2, 192, 64) for _ in range(3))
    check(q, k, v, 64, 64, 2, lengths)


def test_lists_turn_over() -> None:
    ids, counts = lists(2, 5, 7, 3)
    query_blocks, query_counts = transpose_lists(ids, counts, 7)
    for head in range(2):
        for key_block in range(7):
            want = [q for q in range(5) if key_block in ids[0, head, q, : counts[0, head, q]].tolist()]
            assert query_blocks[0, head, key_block, : query_counts[0, head, key_block]].tolist() == want


def test_other_launches_give_the_same() -> None:
    q, k, v, grad_out = (torch.randn(1, 1, 128, 64) for _ in range(4))
    ids, counts = torch.tensor([[[[0]]]], dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    options: dict[str, Any] = {"block_q": 128, "block_k": 128, "scale": 0.125}
    with torch.no_grad():
        out, lse = block_sparse_attention(q, k, v, ids, counts, **options)
    launches = [block_sparse_backward_triton(q, k, v, out, lse, grad_out, torch.zeros_like(lse), ids, counts, **options,
                                             config=config)
                for config in (BackwardConfig(128, 64, 4, 1), BackwardConfig(32, 128, 4, 1))]
    torch.testing.assert_close(launches[0], launches[1])


@pytest.mark.parametrize("has_gate_fine", [False, True])
def test_both_branches_and_gates_of_video_sparse_attention(has_gate_fine: bool) -> None:
    n, lengths = 190, torch.tensor([64, 40, 62], dtype=torch.int32)
    q, k, v, weights = (torch.randn(1, 2, n, 64) for _ in range(4))
    gates = [torch.rand(1, 2, n, 64), torch.rand(1, 2, n, 1)][: 2 if has_gate_fine else 1]

    def run(attend: Callable[..., torch.Tensor], wide: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v, *gates)]
        out = attend(*leaves[:4], 2, gate_fine=leaves[4] if has_gate_fine else None, block=64, lengths=lengths)
        is_real = (torch.arange(n) % 64 < lengths.repeat_interleave(64)[:n])[:, None]
        return out.detach() * is_real, *torch.autograd.grad((out * weights.to(wide) * is_real).sum(), leaves)

    for mine, theirs in zip(run(gated_sparse_attention, torch.float32),
                            run(gated_sparse_attention_reference, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=5e-5, rtol=5e-5)
