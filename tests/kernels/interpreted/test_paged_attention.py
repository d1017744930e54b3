import pytest
import torch

from kernels.paged_attention import PagedConfig, paged_attention_reference, paged_attention_triton

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def cache(
    batch: int, longest: int, page: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = -(-longest // page)
    table = torch.randperm(batch * pages + 3)[: batch * pages].view(batch, pages).int()
    shape = (batch * pages + 3, page, kv_heads, head_dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), table


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page", [16, 64])
def test_matches_fp64_over_pages_spans_and_windows(page: int, num_splits: int, window: int | None) -> None:
    lengths = torch.tensor([0, 1, 63, 200], dtype=torch.int32)
    k, v, table = cache(4, 200, page, 2, 64, torch.float32)
    q = torch.randn(4, 6, 64)
    config = PagedConfig(64, 4, 2, num_splits)
    out = paged_attention_triton(q, k, v, table, lengths, scale=0.125, window=window, config=config)
    want = paged_attention_reference(q.double(), k.double(), v.double(), table, lengths, scale=0.125, window=window)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_sixteen_bit_types_and_head_major_pages(head_dim: int, dtype: torch.dtype) -> None:
    k, v, table = cache(1, 300, 32, 2, head_dim, dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q, lengths = torch.randn(1, 4, head_dim).to(dtype), torch.tensor([300], dtype=torch.int32)
    out = paged_attention_triton(q, k, v, table, lengths, scale=0.1, window=None, config=PagedConfig(64, 4, 2, 2))
    want = paged_attention_reference(q.double(), k.double(), v.double(), table, lengths, scale=0.1, window=None)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
