import pytest
import torch

from kernels.attention import AttentionConfig, attention_reference, attention_triton

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
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
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
    cu = torch.tensor([0, 5, 5, 70], dtype=torch.int32)
    q, k, v = (torch.randn(70, 2, 64).transpose(0, 1)[None] for _ in range(3))
    out, _ = attention_triton(q, k, v, causal=True, scale=0.125, varlen=(cu, cu, 65), config=POINTERS)
    for a, b in ((0, 5), (5, 70)):
        want, _ = attention_reference(*(x[:, :, a:b].double() for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[:, :, a:b].double(), want, atol=2e-5, rtol=2e-5)
