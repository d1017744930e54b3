from typing import Any

import pytest
import torch

from kernels.kv_store import kv_store
from kernels.paged_attention import paged_attention


@pytest.mark.parametrize("n", [1, 63, 128, 1000])
def test_what_is_stored_is_what_attention_reads(n: int) -> None:
    k, v = torch.randn(n, 2, 64), torch.randn(n, 2, 64)
    pages = -(-n // 16)
    table = torch.randperm(pages + 2)[:pages].int()
    caches = [torch.zeros(pages + 2, 16, 2, 64) for _ in range(2)]
    slots = table[torch.arange(n) // 16] * 16 + torch.arange(n) % 16
    kv_store(k, v, caches[0], caches[1], slots, check_slots=True)
    q = torch.randn(1, 4, 64)
    got = paged_attention(q, caches[0], caches[1], table[None], torch.tensor([n], dtype=torch.int32))
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k.transpose(0, 1)[None],
                                                            v.transpose(0, 1)[None], enable_gqa=True)
    torch.testing.assert_close(got, want.squeeze(2))


def test_negative_slots_are_skipped_and_one_latent_suffices() -> None:
    latent, cache = torch.randn(3, 1, 576), torch.zeros(2, 4, 1, 576)
    kv_store(latent, None, cache, None, torch.tensor([5, -1, 0]))
    assert torch.equal(cache[1, 1], latent[0]) and torch.equal(cache[0, 0], latent[2])
    assert int(cache.flatten(0, 1).any(-1).sum()) == 2


def test_float8_saturates() -> None:
    k = torch.tensor([1e6, -1e6, 3.0, 0.001]).view(1, 1, 4)
    cache = torch.zeros(1, 1, 1, 4).to(torch.float8_e4m3fn)
    kv_store(k, k, cache, cache.clone(), torch.tensor([0]), k_scale=torch.tensor(2.0), v_scale=torch.ones(1))
    assert cache.float().flatten().tolist() == [448.0, -448.0, 1.5, 0.0]


def arguments() -> dict[str, Any]:
    return {"k": torch.randn(3, 2, 8), "v": torch.randn(3, 2, 8), "k_cache": torch.zeros(4, 4, 2, 8),
            "v_cache": torch.zeros(4, 4, 2, 8), "slot_mapping": torch.tensor([0, 1, 2])}


@pytest.mark.parametrize(("change", "rule"), [
    ({"k": torch.randn(3, 8)}, r"kv_store: k must be \[N, Hkv, D\] with D in 1..1024, got \[3, 8\]"),
    ({"k": torch.randn(3, 2, 8).double()}, "kv_store: k must be fp16, bf16 or fp32, got torch.float64"),
    ({"v": None}, "kv_store: v and v_cache must be given together, got one of them"),
    ({"v": torch.randn(3, 2, 8).half()}, "kv_store: v must be torch.float32 like k, got torch.float16"),
    ({"v_cache": torch.zeros(4, 4, 2, 9)}, r"kv_store: v_cache must be \[P, page, 2, 8\] to match v, got \[4, 4,"),
    ({"k_cache": torch.zeros(4, 4, 2, 8).half()}, "kv_store: k_cache must be torch.float32 like k, or float8"),
    ({"slot_mapping": torch.tensor([0.0, 1, 2])}, r"kv_store: slot_mapping must be \[3\] int32 or int64, got"),
    ({"k_scale": torch.ones(())}, "kv_store: k_scale must be given for a float8 cache and for no other, got"),
    ({"k": torch.randn(3, 2, 16)[..., ::2]}, r"kv_store: k's last stride must be 1, got \(32, 16, 2\)"),
    ({"slot_mapping": torch.tensor([0, 16, 2]), "check_slots": True}, "kv_store: slots must be below 16, got 16"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        kv_store(**{**arguments(), **change})


def test_a_bad_scale_is_named() -> None:
    caches: dict[str, Any] = {f"{name}_cache": torch.zeros(4, 4, 2, 8).to(torch.float8_e4m3fn) for name in "kv"}
    with pytest.raises(ValueError, match=r"kv_store: v_scale must be \[\] or \[2\] fp32, got \(\[3\], torch.float32\)"):
        kv_store(**{**arguments(), **caches, "k_scale": torch.ones(()), "v_scale": torch.ones(3)})
