from typing import Any

import pytest
import torch

from kernels.paged_attention import paged_attention


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


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("window", 0, "window must be at least 1"),
    ("block_table", torch.zeros(1, 3, dtype=torch.int64), r"block_table must be \[1, max pages\] int32"),
    ("k_cache", torch.randn(8, 17, 2, 64), "page must be one of"),
    ("q", torch.randn(1, 3, 64), "multiple of the cache's"),
])
def test_bad_input_is_named(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        paged_attention(**{**arguments(), name: value})
