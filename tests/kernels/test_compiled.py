from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention import AttentionConfig, attention_triton
from kernels.block_sparse_attention import BlockSparseConfig, block_sparse_attention_triton
from kernels.dry_launch import SHARED_LIMIT_BYTES, dry_launches
from kernels.paged_attention import PagedConfig, paged_attention_triton
from kernels.quantization.nvfp4 import GemmConfig, NVFP4Tensor, nvfp4_linear_triton


def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.empty(1, 2, 1000, 128, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def dense() -> None:
    attention_triton(*heads(), causal=False, scale=0.1, config=AttentionConfig(128, 128, 8, 2, True))


def sparse() -> None:
    indices, counts = torch.empty(1, 2, 8, 4, dtype=torch.int32), torch.empty(1, 2, 8, dtype=torch.int32)
    block_sparse_attention_triton(*heads(), indices, counts, block_q=128, block_k=128, scale=0.1,
                                  config=BlockSparseConfig(128, 8, 2, True))


def decode() -> None:
    cache = torch.empty(16, 64, 2, 128, dtype=torch.bfloat16)
    paged_attention_triton(torch.empty(2, 8, 128, dtype=torch.bfloat16), cache, cache,
                           torch.empty(2, 16, dtype=torch.int32), torch.empty(2, dtype=torch.int32), scale=0.1,
                           window=None, config=PagedConfig(64, 4, 5, 4))


def nvfp4() -> None:
    weight = NVFP4Tensor(torch.empty(256, 128, dtype=torch.uint8), torch.empty(256, 16).to(torch.float8_e4m3fn),
                         torch.ones(()))
    nvfp4_linear_triton(torch.empty(1, 256, dtype=torch.bfloat16), weight)
    nvfp4_linear_triton(torch.empty(128, 256, dtype=torch.bfloat16), weight, gemm=GemmConfig(128, 128, 64, 8, 3))


@pytest.mark.parametrize(("launch", "expected"), [
    (dense, ({"wgmma", "tma"},)), (sparse, ({"wgmma", "tma"},)), (decode, ({"mma", "cp.async"}, set())),
    (nvfp4, (set(), {"wgmma", "cp.async"})),
])
def test_sm90_has_its_instructions_and_no_spills(
    launch: Callable[[], None], expected: tuple[set[str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with dry_launches(90) as compiled:
        launch()
    assert len(compiled) == len(expected)
    for kernel, kinds in zip(compiled, expected, strict=True):
        assert kinds <= set(kernel.instructions)
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[90]
