"""Row-wise kernels compile for each card: no spills, shared memory within the card."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from kernels.dry_launch import SHARED_LIMIT_BYTES, dry_launches
from kernels.gelu import gelu_triton
from kernels.head_rms_norm import head_rms_norm_triton
from kernels.kv_store import kv_store_triton
from kernels.layer_norm_modulate import layer_norm_modulate_triton
from kernels.rotary import rotary_triton
from kernels.sampling import sample_triton
from kernels.sampling_params import SamplingContext, SamplingParams
from kernels.silu_mul import silu_mul_triton
from kernels.spec_accept import spec_accept_triton
from kernels.tile_order import tile_order_triton

BATCH, VOCAB = 4, 128_256


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def rotary() -> None:
    x, table = half(2, 512, 12, 128), torch.empty(1024, 64)
    positions = torch.empty(2, 512, dtype=torch.int32)
    rotary_triton(x, table, table, positions=positions, interleaved=False, out=x)
    rotary_triton(x, table, table, positions=None, interleaved=True, out=None, grid=(2, 16, 16))


def kv_store() -> None:
    k, slots = half(64, 8, 128), torch.empty(64, dtype=torch.int32)
    cache = half(32, 64, 8, 128)
    kv_store_triton(k, k, cache, cache, slots, k_scale=None, v_scale=None)
    fp8 = cache.to(torch.float8_e4m3fn)
    kv_store_triton(k, k, fp8, fp8, slots, k_scale=torch.ones(()), v_scale=torch.ones(8))


def layer_norm_modulate() -> None:
    x, table = half(1, 512, 1536), torch.empty(1, 1, 6, 1536).unbind(2)
    layer_norm_modulate_triton(x, x, table[0], table[1], table[2], None, None, eps=1e-6)
    x, weight = half(1, 64, 5120), torch.empty(5120)
    layer_norm_modulate_triton(x, None, None, None, None, weight, weight, eps=1e-6)


def activations() -> None:
    silu_mul_triton(*half(64, 2 * 14336).chunk(2, -1))
    gelu_triton(half(64, 8960), "tanh")
    gelu_triton(half(64, 8960), "none")


def head_rms_norm() -> None:
    x = half(2, 512, 3, 12, 128)[:, :, 1]
    head_rms_norm_triton(x, half(128), 1e-6)
    head_rms_norm_triton(x, half(12, 128), 1e-6)


def tile_order() -> None:
    tile_order_triton(half(1, 12, 2000, 128), (10, 10, 20), (4, 4, 8), inverse=False)
    tile_order_triton(half(1, 12, 2304, 128), (10, 10, 20), (4, 4, 8), inverse=True)


def sampling() -> None:
    row, counts = torch.empty(BATCH), torch.empty(BATCH, VOCAB, dtype=torch.int32)
    seeds = torch.empty(BATCH, dtype=torch.int64)
    params = SamplingParams(row, seeds, seeds, torch.empty(BATCH, dtype=torch.int32), row, row, row, row, row)
    context = SamplingContext(counts, counts, torch.empty(BATCH, VOCAB),
                              torch.empty(BATCH, VOCAB // 32, dtype=torch.int32))
    sample_triton(half(BATCH, VOCAB), params, context, num_logprobs=5, with_probabilities=True)


def spec_accept() -> None:
    drafts, seeds = torch.empty(BATCH, 4, dtype=torch.int64), torch.empty(BATCH, dtype=torch.int64)
    counts, target = torch.empty(BATCH, dtype=torch.int32), torch.empty(BATCH, 5, VOCAB)
    spec_accept_triton(drafts, counts, target, target[:, :4], seeds, seeds)
    spec_accept_triton(drafts, counts, target, None, seeds, seeds)


LAUNCHES: tuple[tuple[Callable[[], None], int], ...] = (
    (rotary, 2), (kv_store, 2), (layer_norm_modulate, 2), (activations, 3), (head_rms_norm, 2), (tile_order, 2),
    (sampling, 2), (spec_accept, 2))


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(("launch", "count"), LAUNCHES, ids=[launch.__name__ for launch, _ in LAUNCHES])
def test_compiles_without_spills(
    launch: Callable[[], None], count: int, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with dry_launches(arch) as compiled:
        launch()
    assert len(compiled) == count
    for kernel in compiled:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[arch], kernel
