from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import PagedConfig, paged_attention, paged_attention_reference, paged_attention_triton


def arguments(length: int = 40) -> dict[str, Any]:
    cache = torch.randn(8, 16, 2, 64)
    return {"q": torch.randn(1, 4, 64), "k_cache": cache, "v_cache": torch.randn(8, 16, 2, 64),
            "block_table": torch.tensor([[5, 0, 3]], dtype=torch.int32),
            "context_lens": torch.tensor([length], dtype=torch.int32)}


@pytest.mark.parametrize("window", [None, 10])
def test_equals_attention_to_the_gathered_keys(window: int | None) -> None:
    a = arguments()
    k, v = (a[n][[5, 0, 3]].flatten(0, 1)[:40][-(window or 40):].transpose(0, 1)[None] for n in ("k_cache", "v_cache"))
    want = torch.nn.functional.scaled_dot_product_attention(a["q"][:, :, None], k, v, enable_gqa=True)
    torch.testing.assert_close(paged_attention(**a, window=window), want.squeeze(2))


def test_a_sequence_without_tokens_gives_zeros() -> None:
    assert not paged_attention(**arguments(0)).any()


def test_sinks_take_their_share() -> None:
    # a sink as strong as all keys together leaves half of the values
    a = arguments()
    a["q"] = torch.zeros(1, 4, 64)
    sinks = torch.full((4,), 40.0).log()
    torch.testing.assert_close(paged_attention(**a, sinks=sinks), paged_attention(**a) / 2)


def test_a_soft_cap_bounds_scores() -> None:
    a = arguments(2)
    a["q"][:] = 1e4 * a["k_cache"][5, 0, 0]  # the first key scores beyond any cap
    weights = torch.softmax(torch.tensor([3.0, float(torch.tanh(
        (a["q"][0, 0] @ a["k_cache"][5, 1, 0]) / 8 / 3)) * 3]), 0)
    want = weights @ a["v_cache"][5, :2, 0]
    torch.testing.assert_close(paged_attention(**a, soft_cap=3.0)[0, 0], want)


def test_latents_equal_expanded_keys_and_values() -> None:
    # MLA absorbed: scores from latent and rotary part, values are the latents
    latents = torch.randn(4, 16, 1, 576)
    q = torch.randn(1, 8, 576)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    out = paged_attention(q, latents, latents[..., :512], table, lengths, scale=192**-0.5)
    rows = latents[[2, 0]].flatten(0, 2)[:20]
    want = torch.softmax((q[0, :, :512] @ rows[:, :512].t() + q[0, :, 512:] @ rows[:, 512:].t()) * 192**-0.5, -1)
    torch.testing.assert_close(out[0], want @ rows[:, :512], atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_torch_path_matches_the_reference(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(0, 48), min_size=1, max_size=4))
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    k, v = torch.randn(8, 16, 2, 64), torch.randn(8, 16, 2, 128)
    table = torch.randint(0, 8, (len(lengths), 3), dtype=torch.int32)
    options: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, *counts]).cumsum(0).int(), "window": None}
    if data.draw(st.booleans()):
        options["tree_mask"] = torch.rand(sum(counts), max([1, *counts])) < 0.5
    if data.draw(st.booleans()):
        options["window"] = data.draw(st.integers(max([1, *counts]), 50))
    if data.draw(st.booleans()):
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        options |= {"k_scale": torch.rand(2), "v_scale": torch.rand(())}
    q, context_lens = torch.randn(sum(counts), 6, 64), torch.tensor(lengths, dtype=torch.int32)
    out = paged_attention(q, k, v, table, context_lens, **options)
    if k.dtype == torch.float32:
        k, v = k.double(), v.double()
    want = paged_attention_reference(q.double(), k, v, table, context_lens, scale=0.125, **options)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("change", "rule"), [
    ({"window": 0}, "window must be at least 1"),
    ({"scale": -1.0}, "scale must be above 0, got -1.0"),
    ({"soft_cap": 0.0}, "soft_cap must be above 0"),
    ({"block_table": torch.zeros(1, 3, dtype=torch.int64)}, r"block_table must be \[B, max pages\] int32"),
    ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, r"context_lens must be contiguous \[2\] int32"),
    ({"context_lens": torch.tensor([1.0])}, r"context_lens must be contiguous \[1\] int32"),
    ({"k_cache": torch.randn(8, 17, 2, 64)}, "page must be one of"),
    ({"k_cache": torch.randn(8, 16, 2, 80)}, r"k_cache must be \[P, page, Hkv, 64\]"),
    ({"v_cache": torch.randn(8, 16, 2, 72)}, "v_cache must be"),
    ({"v_cache": torch.randn(9, 16, 2, 64)}, "the same pages and heads"),
    ({"v_cache": torch.randn(8, 16, 2, 64).half()}, "v_cache must be torch.float32 like q"),
    ({"v_cache": torch.randn(8, 16, 64, 2).transpose(2, 3)}, "v_cache's last stride must be 1"),
    ({"q": torch.randn(1, 3, 64)}, "multiple of the cache's"),
    ({"q": torch.randn(1, 4, 64).double()}, "q must be fp16, bf16 or fp32"),
    ({"q": torch.randn(2, 4, 64)}, "q must have 1 tokens"),
    ({"q": torch.randn(1, 4, 63)}, r"q must be \[N, H, D\]"),
    ({"sinks": torch.zeros(3)}, r"sinks must be contiguous \[4\] fp32"),
    ({"k_scale": torch.ones(())}, "k_scale must be given exactly where the cache is float8_e4m3fn"),
    ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, r"cu_seqlens_q must be contiguous \[2\] int32"),
    ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_seqlens_q must ascend from 0 to 1"),
    ({"tree_mask": torch.ones(1, 1, dtype=torch.bool)}, "tree_mask needs cu_seqlens_q"),
    ({"tree_mask": torch.ones(1, 1), "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)},
     r"tree_mask must be \[1, W\] bool"),
    ({"tree_mask": torch.ones(1, 4, dtype=torch.bool), "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
      "window": 3}, "window must be at least the tree mask's width, got 3"),
    ({"tree_mask": torch.ones(2, 1, dtype=torch.bool), "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
      "q": torch.randn(2, 4, 64)}, "tree_mask must be as wide as the longest sequence, got 2 of 1 at 0"),
    ({"context_lens": torch.tensor([49], dtype=torch.int32)}, r"context_lens must be in 0..48, .* got 49 at 0"),
    ({"context_lens": torch.tensor([1], dtype=torch.int32), "q": torch.randn(2, 4, 64),
      "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "must be among its context_lens, got 2 of 1 at 0"),
    ({"block_table": torch.tensor([[5, 8, 3]], dtype=torch.int32)}, r"block ids must be in 0..7, got 8 at \[0, 1\]"),
    ({"block_table": torch.tensor([[5, 0, -1]], dtype=torch.int32)}, r"block ids must be in 0..7, got -1 at \[0, 2\]"),
    ({"invariant": True, "config": PagedConfig()}, "config must be None with invariant"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"paged_attention: .*{rule}"):
        paged_attention(**{**arguments(), **change})


def test_ids_past_the_length_are_not_read() -> None:
    a = arguments(16)
    a["block_table"] = torch.tensor([[5, 99, -1]], dtype=torch.int32)
    assert paged_attention(**a).isfinite().all()


@pytest.mark.parametrize(("config", "rule"), [(PagedConfig(128), "block_n must be at most 64 with a tree, got 128"),
                                              (PagedConfig(64, span=96), "span must be a multiple of block_n 64")])
def test_launches_that_cannot_be_right_are_refused(config: PagedConfig, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        paged_attention_triton(**arguments(), scale=1.0, window=None, config=config,
                               cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                               tree_mask=torch.ones(1, 1, dtype=torch.bool))
