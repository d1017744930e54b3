"""Launches of the row-wise kernels for `compile_check`, at the widths of Wan and of an 8B language model."""

from collections.abc import Callable

import torch

from kernels.gelu import gelu_triton
from kernels.head_rms_norm import head_rms_norm_triton
from kernels.kv_store import kv_store_triton
from kernels.layer_norm_modulate import layer_norm_modulate_triton
from kernels.rms_norm import rms_norm_triton
from kernels.rotary import rotary_triton
from kernels.sampling import sample_triton
from kernels.sampling_params import SamplingContext, SamplingParams
from kernels.silu_mul import silu_mul_triton
from kernels.spec_accept import spec_accept_triton
from kernels.tile_order import tile_order_triton

BATCH, VOCAB = 4, 128_256


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _rotary() -> None:
    x, table = _half(2, 512, 12, 128), torch.empty(1024, 64)
    positions = torch.empty(2, 512, dtype=torch.int32)
    rotary_triton(x, table, table, positions=positions, interleaved=False, out=x)
    rotary_triton(x, table, table, positions=None, interleaved=True, out=None, grid=(2, 16, 16))


def _kv_store() -> None:
    k, slots = _half(64, 8, 128), torch.empty(64, dtype=torch.int32)
    cache = _half(32, 64, 8, 128)
    kv_store_triton(k, k, cache, cache, slots, k_scale=None, v_scale=None)
    fp8 = cache.to(torch.float8_e4m3fn)
    kv_store_triton(k, k, fp8, fp8, slots, k_scale=torch.ones(()), v_scale=torch.ones(8))


def _rms_norm() -> None:
    x, weight = _half(64, 4096), _half(4096)
    rms_norm_triton(x, weight, None, 1e-6)
    rms_norm_triton(x, weight, x, 1e-6)


def _head_rms_norm() -> None:
    x = _half(2, 512, 3, 12, 128)[:, :, 1]
    head_rms_norm_triton(x, _half(128), 1e-6)
    head_rms_norm_triton(x, _half(12, 128), 1e-6)


def _layer_norm_modulate() -> None:
    x, table = _half(1, 512, 1536), torch.empty(1, 1, 6, 1536).unbind(2)
    layer_norm_modulate_triton(x, x, table[0], table[1], table[2], None, None, eps=1e-6)
    x, weight = _half(1, 64, 5120), torch.empty(5120)
    layer_norm_modulate_triton(x, None, None, None, None, weight, weight, eps=1e-6)


def _activations() -> None:
    silu_mul_triton(*_half(64, 2 * 14336).chunk(2, -1))
    gelu_triton(_half(64, 8960), "tanh")
    gelu_triton(_half(64, 8960), "none")


def _tile_order() -> None:
    tile_order_triton(_half(1, 12, 2000, 128), (10, 10, 20), (4, 4, 8), inverse=False)
    tile_order_triton(_half(1, 12, 2304, 128), (10, 10, 20), (4, 4, 8), inverse=True)


def _sampling() -> None:
    row, counts = torch.empty(BATCH), torch.empty(BATCH, VOCAB, dtype=torch.int32)
    seeds = torch.empty(BATCH, dtype=torch.int64)
    params = SamplingParams(row, seeds, seeds, torch.empty(BATCH, dtype=torch.int32), row, row, row, row, row)
    context = SamplingContext(counts, counts, torch.empty(BATCH, VOCAB),
                              torch.empty(BATCH, VOCAB // 32, dtype=torch.int32))
    sample_triton(_half(BATCH, VOCAB), params, context, num_logprobs=5, with_probabilities=True)


def _spec_accept() -> None:
    drafts, seeds = torch.empty(BATCH, 4, dtype=torch.int64), torch.empty(BATCH, dtype=torch.int64)
    counts, target = torch.empty(BATCH, dtype=torch.int32), torch.empty(BATCH, 5, VOCAB)
    spec_accept_triton(drafts, counts, target, target[:, :4], seeds, seeds)
    spec_accept_triton(drafts, counts, target, None, seeds, seeds)


# name, launch, how many kernels it compiles
ROW_CASES: tuple[tuple[str, Callable[[], None], int], ...] = (
    ("rotary", _rotary, 2), ("kv_store", _kv_store, 2), ("rms_norm", _rms_norm, 2),
    ("head_rms_norm", _head_rms_norm, 2), ("layer_norm_modulate", _layer_norm_modulate, 2),
    ("silu_mul and gelu", _activations, 3), ("tile_order", _tile_order, 2), ("sampling", _sampling, 2),
    ("spec_accept", _spec_accept, 2))
