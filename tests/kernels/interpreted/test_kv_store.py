from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_store import kv_store_reference, kv_store_triton


def slots_for(n: int, num_slots: int) -> torch.Tensor:
    slots = torch.randperm(num_slots)[:n]
    slots[torch.rand(n) < 0.2] = -1
    return slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "heads", "k_dim", "v_dim"), [(1, 1, 64, 64), (63, 3, 80, 48), (128, 2, 128, 128),
                                                            (1000, 1, 33, 64)])
def test_writes_exactly_the_slots(n: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(n, heads, k_dim + v_dim).to(dtype)
    k, v = qkv.split([k_dim, v_dim], -1)
    caches = [torch.randn(70, 16, heads, width).to(dtype) for width in (k_dim, v_dim)]
    want = [cache.clone() for cache in caches]
    slots = slots_for(n, 70 * 16).int()
    kv_store_triton(k, v, caches[0], caches[1], slots, k_scale=None, v_scale=None)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0][slot // 16, slot % 16], want[1][slot // 16, slot % 16] = k[token], v[token]
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_rounds_as_torch_does_and_saturates(dtype: torch.dtype) -> None:
    # every bf16 in turn: zeros, subnormals, halfway values, what is too large, infinities
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    k = x[~x.isnan()].view(-1, 1, 1)
    k = torch.cat([k, torch.zeros(-len(k) % 512, 1, 1, dtype=dtype)]).view(-1, 2, 256)
    cache = torch.zeros(len(k), 1, 2, 256).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, 0.37])
    kv_store_triton(k, None, cache, None, torch.arange(len(k)), k_scale=scale, v_scale=None)
    want = (k.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(cache[:, 0].view(torch.uint8), want.view(torch.uint8))


def test_float8_keeps_a_nan() -> None:
    cache = torch.zeros(1, 1, 1, 1).to(torch.float8_e4m3fn)
    kv_store_triton(torch.full((1, 1, 1), float("nan")), None, cache, None, torch.zeros(1, dtype=torch.int64),
                    k_scale=torch.ones(()), v_scale=None)
    assert bool(cache.float().isnan().all())


@settings(max_examples=12, deadline=None)
@given(n=st.integers(0, 50), heads=st.integers(1, 5), width=st.integers(1, 70), page=st.integers(1, 40),
       head_major=st.booleans(), fp8=st.booleans())
def test_any_pages_and_strides(n: int, heads: int, width: int, page: int, head_major: bool, fp8: bool) -> None:
    pages = -(-n // page) + 1
    k, v = torch.randn(heads, n, width + 5)[..., 2 : width + 2].transpose(0, 1), torch.randn(n, heads, width)
    dtype = torch.float8_e4m3fn if fp8 else torch.float32
    shape = (pages, heads, page, width) if head_major else (pages, page, heads, width)
    caches = [torch.zeros(shape).to(dtype).transpose(1, 2 if head_major else 1) for _ in range(2)]
    want = [cache.clone() for cache in caches]
    scales: dict[str, Any] = {"k_scale": None, "v_scale": None}
    if fp8:
        scales = {"k_scale": torch.rand(heads) + 0.1, "v_scale": torch.tensor(0.3)}
    slots = slots_for(n, pages * page)
    kv_store_triton(k, v, caches[0], caches[1], slots, **scales)
    kv_store_reference(k, v, want[0], want[1], slots, **scales)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(caches, want, strict=True))
