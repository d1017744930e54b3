import pytest
import torch

from kernels.attention import AttentionConfig
from kernels.block_sparse_attention import BlockSparseConfig
from kernels.gpu_case import Case, error_of
from kernels.gpu_cases import decode_case, dense_case, norm_case, nvfp4_case, select_case, sparse_case
from kernels.gpu_cases_rows import (
    gelu_case,
    head_norm_case,
    kv_store_case,
    layer_norm_case,
    rotary_3d_case,
    rotary_case,
    silu_mul_case,
    tile_case,
)
from kernels.gpu_cases_sampling import sampling_case, spec_accept_case
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
    rotary_3d_case("rotary_3d", (3, 4, 5), 2, 64),
    rotary_case("rotary", 40, 2, 64),
    kv_store_case("kv_store", 100, 2, 64, False),
    kv_store_case("kv_store float8", 100, 2, 64, True),
    layer_norm_case("layer_norm", 20, 100),
    silu_mul_case("silu_mul", 20, 100),
    gelu_case("gelu", 20, 100),
    head_norm_case("head norm", 20, 3, 64, False),
    head_norm_case("norm over heads", 20, 3, 64, True),
    tile_case("tiles", (5, 4, 6), (2, 4, 4), 2, 64),
    sampling_case("sampling", 2, 200, 20, 0.9),
    sampling_case("sampling, no cut", 2, 200, None, None),
    spec_accept_case("spec_accept", 3, 3, 200),
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
