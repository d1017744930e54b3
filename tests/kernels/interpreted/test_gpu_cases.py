import pytest
import torch

from kernels.attention import AttentionConfig
from kernels.block_sparse_attention import BlockSparseConfig
from kernels.gpu_cases import Case, decode_case, dense_case, error_of, norm_case, nvfp4_case, select_case, sparse_case
from kernels.paged_attention import PagedConfig
from kernels.quantization.nvfp4 import GemmConfig, GemvConfig

SMALL = [
    dense_case("dense", 1, 2, 1, 200, 64, False, (AttentionConfig(128, 128, 4, 2, True),)),
    dense_case("causal", 1, 2, 1, 200, 64, True, (AttentionConfig(128, 128, 4, 2, False),)),
    sparse_case("sparse", 1, 900, 128, 0.25, (BlockSparseConfig(128, 4, 2, True),)),
    select_case("select", 1, 1100, 128),
    decode_case("decode", 2, 128, 64, (PagedConfig(64, 4, 2, 2),)),
    nvfp4_case("nvfp4", 1, 32, 128, 2, (GemvConfig(16, 64, 4, 2), GemmConfig(16, 32, 64, 4, 2))),
    norm_case("norm", 20, 100),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_what_runs_on_a_card_agrees_with_its_reference(case: Case) -> None:
    inputs = case.make(torch.device("cpu"), True)
    want = case.reference(inputs)
    for config in case.configs:
        out = case.launch(inputs, config)
        assert error_of(case.sample(inputs, out), want) < 1e-2
    assert len(case.rotate(inputs)) >= 1
    for name, peer in case.peers.items():
        if name not in ("flash", "cudnn"):
            assert error_of(case.sample(inputs, peer(inputs)), want) < 1e-2
