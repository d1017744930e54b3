from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.gated_sparse_attention import gated_sparse_attention, gated_sparse_attention_reference


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, chosen: int, lengths: list[int]
) -> torch.Tensor:
    """Both branches block by block with torch's attention, for one batch and head; 64 tokens a block."""
    blocks = [x.split(64) for x in (q, k, v)]
    means = [torch.stack([part[:n].mean(0) for part, n in zip(parts, lengths, strict=True)]) for parts in blocks]
    scores = means[0] @ means[1].t() * q.shape[-1] ** -0.5
    coarse = torch.softmax(scores, -1) @ means[2]
    outs = []
    for i, part in enumerate(blocks[0]):
        ids = scores[i].topk(chosen).indices.tolist()
        keys, values = (torch.cat([parts[j][: lengths[j]] for j in ids]) for parts in blocks[1:])
        outs.append(F.scaled_dot_product_attention(part, keys, values) + coarse[i] * gate.split(64)[i])
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [None, [64, 10, 64, 8]])
def test_equals_both_branches_by_hand(lengths: list[int] | None) -> None:
    q, k, v = (torch.randn(1, 1, 200, 64) for _ in range(3))
    gate = torch.rand(1, 1, 200, 64)
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    want = by_hand(q[0, 0], k[0, 0], v[0, 0], gate[0, 0], 2, lengths or [64, 64, 64, 8])
    for attend in (gated_sparse_attention, gated_sparse_attention_reference):
        got = attend(q, k, v, gate, 2, block=64, lengths=given)
        torch.testing.assert_close(got[0, 0], want, atol=1e-5, rtol=1e-5)


def test_without_the_coarse_branch_and_with_all_blocks_it_is_attention() -> None:
    q, k, v = (torch.randn(2, 2, 150, 64).bfloat16() for _ in range(3))
    gate = torch.full((2, 2, 150, 1), 0.5)
    got = gated_sparse_attention(q, k, v, torch.zeros(1, 1, 1, 1), 2, gate_fine=gate)
    want = 0.5 * F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize(("change", "rule"), [
    ({"gate_coarse": torch.zeros(1, 1, 99, 64)},
     r"gate_coarse must broadcast to \[1, 1, 100, 64\], got \[1, 1, 99, 64\]"),
    ({"gate_fine": torch.zeros(100)}, "gate_fine must broadcast"),
    ({"k": torch.zeros(1, 1, 64, 64)}, "k and v must be"),
    ({"scale": -1.0}, "scale must be above 0"),
    ({"num_blocks": 3}, r"num_blocks must be in 1..2, got 3"),
    ({"lengths": torch.ones(3, dtype=torch.int32)}, r"lengths must be contiguous \[2\] int32"),
    ({"block": 32}, r"block must be one of \(64, 128\), got 32"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    x = torch.zeros(1, 1, 100, 64)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "gate_coarse": x, "num_blocks": 1, "block": 64}
    with pytest.raises(ValueError, match=rule):
        gated_sparse_attention(**(arguments | change))
