import pytest
import torch

from kernels.gpu_case import Case, error_of
from kernels.gpu_cases_decode import (
    BLACKWELL_CASES,
    DECODE_CASES,
    fp8_case,
    paged_case,
    quantize_case,
)
from kernels.paged_attention import PagedConfig

SMALL = [
    paged_case("fp8", 2, 1, 100, (PagedConfig(64, 4, 2, 2, 16),), heads=4, kv_heads=2, d=64, dv=64, fp8=True),
    paged_case("chunk", 1, 9, 70, (PagedConfig(64, 4, 2, 1, 16),), heads=4, kv_heads=2, d=64, dv=64),
    paged_case("latents", 3, 1, 64, (PagedConfig(32, 4, 2, 1, 16),), heads=4, kv_heads=1, d=576, dv=512),
    paged_case("tree", 3, 5, 70, (PagedConfig(64, 4, 2, 1, 16),), heads=4, kv_heads=2, d=64, dv=64, tree=True),
    paged_case("all", 2, 1, 128, (PagedConfig(64, 4, 2, 1, 16),), heads=2, kv_heads=2, d=64, dv=64, window=40,
               sinks=True, soft_cap=5.0),
    fp8_case("fp8 linear", 16, 32, 64, "channel"),
    quantize_case("activations", 5, 128),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_what_runs_on_a_card_agrees_with_its_reference(case: Case) -> None:
    inputs = case.make(torch.device("cpu"), True)
    want = case.reference(inputs)
    for config in case.configs:
        assert error_of(case.sample(inputs, case.launch(inputs, config)), want) < 1e-2
    assert len(case.rotate(inputs)) >= 1


def test_names_are_not_used_twice() -> None:
    names = [case.name for case in (*DECODE_CASES, *BLACKWELL_CASES)]
    assert len(set(names)) == len(names)
