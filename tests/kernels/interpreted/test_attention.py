import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionConfig, attention_reference, attention_triton
from tests.kernels.interpreted.layouts import laid_out, layouts

# fp32 differs by summation order; 16-bit weights and outputs are rounded once each, 2^-8 (bf16) or 2^-11 (fp16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
POINTERS = AttentionConfig(64, 64, 4, 2, False)
DESCRIPTORS = AttentionConfig(64, 64, 4, 2, True)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, config: AttentionConfig) -> None:
    out, lse = attention_triton(q, k, v, causal=causal, scale=q.shape[-1] ** -0.5, config=config)
    want, want_lse = attention_reference(q.double(), k.double(), v.double(), causal=causal)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (63, 128), (130, 63), (128, 200)])
def test_matches_fp64_at_odd_sizes(n_q: int, n_k: int, causal: bool, config: AttentionConfig) -> None:
    q, k, v = torch.randn(1, 2, n_q, 64), torch.randn(1, 1, n_k, 64), torch.randn(1, 1, n_k, 64)
    check(q, k, v, causal, config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_types(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 1, 100, head_dim).to(dtype) for _ in range(3))
    check(q, k, v, True, DESCRIPTORS if head_dim == 80 else POINTERS)


def test_a_thousand_tokens() -> None:
    q, k, v = (torch.randn(1, 1, 1000, 64, dtype=torch.float16) for _ in range(3))
    check(q, k, v, True, AttentionConfig(128, 128, 4, 2, False))


def test_strides_of_a_token_major_view() -> None:
    q, k, v = (torch.randn(2, 70, 2, 64).transpose(1, 2) for _ in range(3))
    check(q, k, v, False, POINTERS)


def test_packed_sequences_with_an_empty_one() -> None:
    # more keys than queries, as where a part of each sequence is cached
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 5, 70], [0, 9, 20, 90]))
    q, k, v = (torch.randn(n, 2, 64).transpose(0, 1)[None] for n in (70, 90, 90))
    out, lse = attention_triton(q, k, v, causal=True, scale=0.125, varlen=(cu_q, cu_k, 65), config=POINTERS)
    for (a, b), (c, d) in zip(((0, 5), (5, 70)), ((0, 9), (20, 90)), strict=True):
        want, want_lse = attention_reference(q[:, :, a:b].double(), *(x[:, :, c:d].double() for x in (k, v)),
                                             causal=True)
        torch.testing.assert_close(out[:, :, a:b].double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[:, :, a:b].double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_groups_of_heads_and_a_layout_for_each_input(config: AttentionConfig) -> None:
    q = torch.randn(2, 70, 6, 64).transpose(1, 2)
    k, v = torch.randn(2, 3, 80, 64), torch.randn(2, 80, 3, 128).transpose(1, 2)[..., :64]
    check(q, k, v, True, config)


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(0, 2), kv_heads=st.integers(1, 2), group_size=st.integers(1, 2), n_q=st.integers(0, 40),
       n_k=st.integers(0, 70), head_dim=st.sampled_from([64, 80]), causal=st.booleans(), use_tma=st.booleans(),
       places=st.tuples(layouts, layouts, layouts))
def test_any_sizes_and_layouts(
    batch: int, kv_heads: int, group_size: int, n_q: int, n_k: int, head_dim: int, causal: bool, use_tma: bool,
    places: tuple[str, str, str],
) -> None:
    shapes = ((batch, kv_heads * group_size, n_q, head_dim), *[(batch, kv_heads, n_k, head_dim)] * 2)
    q, k, v = (laid_out(torch.randn(shape), place) for shape, place in zip(shapes, places, strict=True))
    check(q, k, v, causal, AttentionConfig(32, 64, 4, 2, use_tma))


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), max_size=3), kv_heads=st.integers(1, 2),
       causal=st.booleans(), places=st.tuples(layouts, layouts, layouts))
def test_any_packed_sequences(
    lengths: list[tuple[int, int]], kv_heads: int, causal: bool, places: tuple[str, str, str]
) -> None:
    starts_q, starts_k = (list(itertools.accumulate(sizes, initial=0))
                          for sizes in ([n for n, _ in lengths], [n for _, n in lengths]))
    shapes = ((1, 2, starts_q[-1], 64), *[(1, kv_heads, starts_k[-1], 64)] * 2)
    q, k, v = (laid_out(torch.randn(shape), place) for shape, place in zip(shapes, places, strict=True))
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k))
    longest = max((n for n, _ in lengths), default=0)
    out, lse = attention_triton(q, k, v, causal=causal, scale=0.125, varlen=(cu_q, cu_k, longest),
                                config=AttentionConfig(32, 64, 4, 2, False))
    for (a, b), (c, d) in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True):
        want, want_lse = attention_reference(q[:, :, a:b].double(), *(x[:, :, c:d].double() for x in (k, v)),
                                             causal=causal)
        torch.testing.assert_close(out[:, :, a:b].double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[:, :, a:b].double(), want_lse, atol=1e-4, rtol=1e-4)
