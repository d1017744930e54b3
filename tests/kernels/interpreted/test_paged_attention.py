"""Paged attention's kernels against fp64, over batches that decode, prefill and verify at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import attention_reference
from kernels.paged_attention import (
    PagedConfig,
    invariant_config,
    paged_attention_reference,
    paged_attention_triton,
)

# fp32 differs by summation order; 16-bit weights and outputs are rounded once each, 2^-8 (bf16) or 2^-11 (fp16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SMALL = PagedConfig(64, 4, 2, 1)


def cache(
    batch: int, longest: int, page: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = -(-longest // page)
    table = torch.randperm(batch * pages + 3)[: batch * pages].view(batch, pages).int()
    shape = (batch * pages + 3, page, kv_heads, head_dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), table


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: list[int],
    config: PagedConfig = SMALL, scale: float = 0.125, window: int | None = None, **options: Any,
) -> torch.Tensor:
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    out = paged_attention_triton(q, k, v, table, context_lens, scale=scale, window=window, config=config, **options)
    if k.dtype != torch.float8_e4m3fn:
        k, v = k.double(), v.double()
    want = paged_attention_reference(q.double(), k, v, table, context_lens, scale=scale, window=window, **options)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    return out


def starts(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page", [16, 64])
def test_matches_fp64_over_pages_spans_and_windows(page: int, num_splits: int, window: int | None) -> None:
    k, v, table = cache(4, 200, page, 2, 64, torch.float32)
    check(torch.randn(4, 6, 64), k, v, table, [0, 1, 63, 200], PagedConfig(64, 4, 2, num_splits), window=window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_sixteen_bit_types_and_head_major_pages(head_dim: int, dtype: torch.dtype) -> None:
    k, v, table = cache(1, 300, 32, 2, head_dim, dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check(torch.randn(1, 4, head_dim).to(dtype), k, v, table, [300], PagedConfig(64, 4, 2, 2), 0.1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_thousand_tokens(dtype: torch.dtype) -> None:
    k, v, table = cache(1, 1000, 128, 1, 64, dtype)
    check(torch.randn(1, 2, 64).to(dtype), k, v, table, [1000], PagedConfig(128, 4, 2, 4))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("block_m", [16, 64])
def test_chunks_of_prefill_beside_decode(block_m: int, num_splits: int, window: int | None) -> None:
    k, v, table = cache(4, 128, 32, 1, 64, torch.float32)
    cu = starts(1, 17, 0, 3)  # a decoding sequence, a whole prompt, an idle one, a later chunk
    check(torch.randn(21, 2, 64), k, v, table, [100, 17, 30, 128], PagedConfig(64, 4, 2, num_splits, block_m),
          window=window, cu_seqlens_q=cu)


def test_a_whole_prompt_is_causal_attention() -> None:
    k, v, table = cache(1, 63, 16, 1, 64, torch.float32)
    q = torch.randn(63, 2, 64)
    out = paged_attention_triton(q, k, v, table, torch.tensor([63], dtype=torch.int32), scale=0.125, window=None,
                                 cu_seqlens_q=starts(63), config=SMALL)
    k, v = (x[table[0].long()].flatten(0, 1)[:63].transpose(0, 1)[None].double() for x in (k, v))
    want, _ = attention_reference(q.transpose(0, 1)[None].double(), k, v, causal=True)
    torch.testing.assert_close(out.double(), want[0].transpose(0, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 24])
def test_a_draft_tree_is_verified_branch_by_branch(window: int | None, num_splits: int) -> None:
    # root 0 with children 1 and 2; 1 has children 3 and 4; 4 has child 5
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 4, 5]]
    tree = torch.zeros(7, 8, dtype=torch.bool)
    for i, path in enumerate(paths):
        tree[i, path] = True
    tree[6] = True  # a sequence of one token, with what it must not read set
    k, v, table = cache(2, 100, 16, 1, 64, torch.float32)
    q = torch.randn(7, 2, 64)
    out = check(q, k, v, table, [70, 33], PagedConfig(64, 4, 2, num_splits), window=window, cu_seqlens_q=starts(6, 1),
                tree_mask=tree)
    flat_k, flat_v = (x[table[0].long()].flatten(0, 1).double() for x in (k, v))
    for i, path in enumerate(paths):  # as if the branch alone had been decoded
        seen = [*range(64), *(64 + j for j in path)][-(window or 1000):]
        scores = torch.softmax(q[i].double() @ flat_k[seen, 0].t() * 0.125, -1)
        torch.testing.assert_close(out[i].double(), scores @ flat_v[seen, 0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_latents_are_keys_and_values_at_once(num_splits: int, dtype: torch.dtype) -> None:
    latents, _, table = cache(2, 64, 16, 1, 576, dtype)
    check(torch.randn(2, 20, 576).to(dtype), latents, latents[..., :512], table, [64, 40],
          PagedConfig(16, 4, 2, num_splits, 16), 192**-0.5)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (128, 64), (64, 256), (256, 256)])
def test_keys_and_values_of_different_widths(d: int, dv: int, page: int) -> None:
    k, _, table = cache(1, 70, page, 1, d, torch.float16)
    v = torch.randn(*k.shape[:3], dv).half()
    check(torch.randn(5, 2, d).half(), k, v, table, [70], cu_seqlens_q=starts(5))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks_and_soft_cap(num_splits: int) -> None:
    k, v, table = cache(3, 200, 64, 2, 64, torch.float32)
    q = torch.randn(3, 4, 64) * 20  # scores that the cap bends
    options: dict[str, Any] = {"sinks": torch.tensor([29.0, -40.0, float("-inf"), 60.0]), "soft_cap": 30.0}
    out = check(q, k, v, table, [200, 1, 0], PagedConfig(64, 4, 2, num_splits), **options)
    assert not out[2].any()
    assert not torch.allclose(out, check(q, k, v, table, [200, 1, 0], PagedConfig(64, 4, 2, num_splits)), atol=1e-3)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_cache_with_scales(per_head: bool, dtype: torch.dtype) -> None:
    k, v, table = cache(2, 100, 16, 2, 64, torch.float32)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    k_scale, v_scale = (torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])) if per_head else (
        torch.tensor(0.5), torch.tensor(2.0))
    check(torch.randn(2, 4, 64).to(dtype), k, v, table, [100, 17], PagedConfig(64, 4, 2, 2), k_scale=k_scale,
          v_scale=v_scale)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_fp8_byte_decodes_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(torch.float8_e4m3fn).float().isfinite()]  # 254 values, four keys of 64
    v = torch.zeros(4, 16, 1, 64, dtype=torch.uint8)
    v[:, 0, 0] = torch.cat([codes, codes[:2]]).view(4, 64)
    v = v.view(torch.float8_e4m3fn)
    one = torch.ones(())
    # a sequence of one key gets this key's value
    out = paged_attention_triton(torch.randn(4, 1, 64).to(dtype), v, v, torch.arange(4).int()[:, None],
                                 torch.ones(4, dtype=torch.int32), scale=1e-4, window=None, k_scale=one, v_scale=one,
                                 config=SMALL)
    assert torch.equal(out[:, 0].float(), v[:, 0, 0].float())
    # and as keys: the weight of the second of two, whose first scores zero
    k = torch.zeros(254, 16, 1, 64, dtype=torch.uint8)
    k[:, 1, 0, 0] = codes
    ids, lengths = torch.arange(254).int()[:, None], torch.full((254,), 2, dtype=torch.int32)
    values = torch.zeros(254, 16, 1, 64)
    values[:, 1] = 1.0
    k, values = k.view(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    q = torch.zeros(254, 1, 64).to(dtype)
    q[..., 0] = 1.0
    rows = torch.arange(0, 254, 4)  # the same decode for every byte above; here the product, within the tests' budget
    out = paged_attention_triton(q[rows], k, values, ids[rows], lengths[rows], scale=0.01, window=None, k_scale=one,
                                 v_scale=one, config=PagedConfig(16, 4, 2, 1))
    want = torch.sigmoid(codes[rows].view(torch.float8_e4m3fn).float() * 0.01)
    torch.testing.assert_close(out[:, 0, 0].float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_invariant_mode_gives_a_sequence_the_same_bits_in_any_batch() -> None:
    k, v, table = cache(3, 400, 16, 1, 64, torch.float16)
    q = torch.randn(8, 1, 64).half()
    config = replace(invariant_config(q), span=128, num_warps=4)
    lengths = torch.tensor([400, 7, 300], dtype=torch.int32)

    def run(which: list[int], cu: torch.Tensor | None, rows: list[int], columns: int) -> torch.Tensor:
        return paged_attention_triton(q[rows], k, v, table[which, :columns], lengths[which], scale=0.125, window=None,
                                      cu_seqlens_q=cu, config=config)

    together = run([0, 1, 2], starts(1, 3, 4), list(range(8)), 25)
    want = paged_attention_reference(q.double(), k.double(), v.double(), table, lengths, scale=0.125, window=None,
                                     cu_seqlens_q=starts(1, 3, 4))
    torch.testing.assert_close(together.double(), want, atol=2e-3, rtol=2e-3)
    assert torch.equal(run([0], None, [0], 25)[0], together[0])
    assert torch.equal(run([2, 0], starts(4, 1), [4, 5, 6, 7, 0], 25), together[[4, 5, 6, 7, 0]])
    assert torch.equal(run([2], starts(4), [4, 5, 6, 7], 19), together[4:])  # a shorter table, fewer spans
    assert torch.equal(run([2], starts(1), [7], 25)[0], together[7])  # the last token alone, as if decoded


def test_more_spans_than_one_step_of_the_join() -> None:
    k, v, table = cache(1, 300, 16, 1, 64, torch.float32)
    q = torch.randn(1, 1, 64) * 2
    k[int(table[0, -1])] = q[0, 0]  # the last span is far above those that were joined before it
    check(q, k, v, table, [300], PagedConfig(16, 4, 2, None, 16, 16))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    page, kv_heads, group = data.draw(st.sampled_from([16, 32, 64])), data.draw(st.integers(1, 2)), \
        data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, min(length, 9))) for length in lengths]
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    k, v, table = cache(len(lengths), 70, page, kv_heads, 64, dtype)
    if data.draw(st.booleans()):  # keys and values side by side in one pool
        pool = torch.stack([k, v], 1)
        k, v = pool[:, 0], pool[:, 1]
    if data.draw(st.booleans()):  # every sequence begins with the same page
        table[:] = table[:1].clone() if data.draw(st.booleans()) else torch.cat([table[:1, :1].expand(len(table), 1),
                                                                                table[:, 1:]], 1)
    table[torch.arange(table.shape[1]) * page >= torch.tensor(lengths)[:, None]] = -1  # never read
    q = torch.randn(kv_heads * group, max(1, sum(counts)), 64).to(dtype).transpose(0, 1)[: sum(counts)]
    options: dict[str, Any] = {"cu_seqlens_q": starts(*counts)}
    widest = max([1, *counts])
    if data.draw(st.booleans()):
        options["tree_mask"] = torch.rand(len(q), widest + 2) < 0.6
    if data.draw(st.booleans()):
        options["window"] = data.draw(st.integers(widest + 2, 90))
    if data.draw(st.booleans()):
        options["sinks"] = torch.randn(kv_heads * group)
    check(q, k, v, table, lengths, PagedConfig(32, 4, 2, data.draw(st.integers(1, 3)), 16), **options)
