from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention import attention, attention_reference, attention_varlen, attention_with_lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 128), (63, 63), (128, 63)])
def test_torch_path_matches_the_reference(n_q: int, n_k: int, causal: bool) -> None:
    q, k, v = torch.randn(2, 4, n_q, 64), torch.randn(2, 2, n_k, 64), torch.randn(2, 2, n_k, 64)
    want, want_lse = attention_reference(q.double(), k.double(), v.double(), causal=causal)
    out, lse = attention_with_lse(q, k, v, causal=causal)
    for got in (out, attention(q, k, v, causal=causal)):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(n_q: int, n_k: int) -> None:
    q, k = torch.randn(1, 2, n_q, 64), torch.randn(1, 2, n_k, 64)
    out, lse = attention_with_lse(q, k, k)
    assert torch.equal(out, torch.zeros_like(q)) and torch.equal(lse, torch.full((1, 2, n_q), float("-inf")))
    assert torch.equal(attention(q, k, k), out)


def test_packed_sequences_equal_each_alone() -> None:
    q, k, v = (torch.randn(70, 2, 64) for _ in range(3))
    cu = torch.tensor([0, 5, 5, 70], dtype=torch.int32)
    out = attention_varlen(q, k, v, cu, cu, 65, causal=True)
    for a, b in ((0, 5), (5, 70)):
        alone = attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[a:b], alone[0].transpose(0, 1))


def test_gradients_flow_through_torch() -> None:
    q, k, v = (torch.randn(1, 1, 8, 64, dtype=torch.float32, requires_grad=True) for _ in range(3))
    gradients = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    assert all(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_is_added_to_the_scaled_scores(causal: bool) -> None:
    q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64)
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    mask = bias.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), float("-inf")) if causal else bias
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)
    got = attention(q, k, v, causal=causal, scale=0.2, bias=bias)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_row_whose_bias_hides_every_key_gives_zeros() -> None:
    q, bias = torch.randn(1, 1, 3, 64), torch.zeros(1, 1, 3, 1)
    bias[:, :, 1] = float("-inf")
    out = attention(q, q, q, bias=bias)
    assert not out[:, :, 1].any() and bool(out[:, :, [0, 2]].all())


@pytest.mark.parametrize(("change", "rule"), [
    (lambda a: a.update(bias=torch.zeros(64, 64)), r"bias must broadcast to \[1, 4, 64, 64\], got \[64, 64\]"),
    (lambda a: a.update(bias=torch.zeros(1, 4, 64, 64, dtype=torch.bool)), "bias must be floating point"),
    (lambda a: a.update(k=a["k"][..., :32]), "k and v must be"),
    (lambda a: a.update(q=a["q"].double()), "q must be fp16"),
    (lambda a: a.update(q=a["q"][0]), r"q must be \[B, H, N, D\]"),
    (lambda a: a.update(k=a["k"].transpose(2, 3)), "last stride"),
    (lambda a: a.update(q=torch.randn(1, 3, 64, 64)), "multiple of k's heads"),
    (lambda a: a.update(scale=0.0), "scale must be above 0"),
])
def test_bad_input_is_named(change: Callable[[dict[str, Any]], None], rule: str) -> None:
    q, k, v = torch.randn(1, 4, 64, 64), torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
    change(arguments)
    with pytest.raises(ValueError, match=rule):
        attention(**arguments)


@pytest.mark.parametrize(("change", "rule"), [
    (lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"].long()), r"cu_seqlens_q must be contiguous \[B \+ 1\] int32"),
    (lambda a: a.update(cu_seqlens_q=torch.tensor([0, 5, 9], dtype=torch.int32)), "cu_seqlens_q must ascend from 0 to"),
    (lambda a: a.update(cu_seqlens_k=torch.tensor([0, 12, 10], dtype=torch.int32)), "cu_seqlens_k must ascend from 0"),
    (lambda a: a.update(cu_seqlens_k=torch.tensor([0, 10], dtype=torch.int32)), "cu_seqlens must have one length"),
    (lambda a: a.update(max_seqlen_q=4), "max_seqlen_q must be at least 6, the longest sequence, got 4"),
    (lambda a: a.update(q=a["q"][None]), r"q must be \[N, H, D\]"),
])
def test_bad_packed_input_is_named(change: Callable[[dict[str, Any]], None], rule: str) -> None:
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    arguments: dict[str, Any] = {**{name: torch.randn(10, 2, 64) for name in "qkv"}, "cu_seqlens_q": cu,
                                 "cu_seqlens_k": cu, "max_seqlen_q": 6}
    assert attention_varlen(**arguments).shape == (10, 2, 64)
    change(arguments)
    with pytest.raises(ValueError, match=f"attention_varlen: {rule}"):
        attention_varlen(**arguments)
