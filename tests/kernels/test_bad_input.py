"""Every op of the library with one argument spoilt at a time: it works, or a ValueError names op, rule and value.

What is tested elsewhere are the rules' texts; here that no argument slips past them into an error of torch's.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels.attention import attention, attention_varlen, attention_with_lse
from kernels.block_selection import block_scores, select_blocks
from kernels.block_sparse_attention import block_sparse_attention
from kernels.gated_sparse_attention import gated_sparse_attention
from kernels.gelu import gelu
from kernels.head_rms_norm import head_rms_norm
from kernels.kv_store import kv_store
from kernels.layer_norm_modulate import add_layer_norm_modulate, layer_norm_modulate
from kernels.paged_attention import paged_attention
from kernels.quantization.fp8 import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.quantization.nvfp4 import dequantize_nvfp4, nvfp4_linear, quantize_nvfp4
from kernels.quantization.nvfp4_scales import swizzle_scales, unswizzle_scales
from kernels.quantization.nvfp4_w4a4 import nvfp4_w4a4_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary, rotary_3d, rotary_3d_tables
from kernels.sampling import sample
from kernels.sampling_params import SamplingContext, SamplingParams, count_tokens
from kernels.silu_mul import silu_mul
from kernels.spec_accept import spec_accept, spec_accept_greedy
from kernels.tile_order import tile_order, untile_order

FP8 = torch.float8_e4m3fn
TYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
Arguments = dict[str, Any]


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.1


def _ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def _paged(is_fp8: bool) -> Arguments:
    cache = _rand(5, 16, 2, 64)
    given: Arguments = {
        "q": _rand(4, 4, 64), "k_cache": cache, "v_cache": cache.clone(), "block_table": _ints([[0, 1], [2, 3]]),
        "context_lens": _ints([17, 18]), "cu_seqlens_q": _ints([0, 2, 4]), "sinks": _rand(4), "scale": 0.1, "window": 5,
        "soft_cap": 2.0}
    if is_fp8:
        given |= {"k_cache": cache.to(FP8), "v_cache": cache.to(FP8), "k_scale": _rand(2), "v_scale": _rand(2),
                  "tree_mask": torch.ones(4, 2).tril().bool()}
    return given


def _sampling() -> Arguments:
    row, seeds, counts = torch.full((2,), 0.5), _ints([1, 2], torch.int64), torch.ones(2, 64, dtype=torch.int32)
    params = SamplingParams(row, seeds, seeds, _ints([3, 70]), row, row, row, row, row)
    return {"logits": _rand(2, 64), "params": params,
            "context": SamplingContext(counts, counts, _rand(2, 64), -torch.ones(2, 2, dtype=torch.int32)),
            "num_logprobs": 3}


def _ops() -> Iterator[tuple[Callable[..., Any], Arguments]]:
    q, kv, packed = _rand(1, 4, 8, 64), _rand(1, 2, 9, 64), _rand(9, 2, 64)
    yield attention, {"q": q, "k": kv, "v": kv, "scale": 0.1}
    yield attention, {"q": q, "k": kv, "v": kv, "bias": _rand(1, 4, 8, 9)}
    yield attention_with_lse, {"q": q, "k": kv, "v": kv, "scale": 0.1}
    yield attention_varlen, {"q": _rand(8, 4, 64), "k": packed, "v": packed, "cu_seqlens_q": _ints([0, 3, 8]),
                             "cu_seqlens_k": _ints([0, 4, 9]), "max_seqlen_q": 5, "scale": 0.1}
    x, y = _rand(1, 2, 100, 64), _rand(1, 2, 130, 64)
    yield block_scores, {"q": x, "k": y, "block_q": 64, "block_k": 64}
    yield select_blocks, {"scores": _rand(1, 2, 3, 4), "num_blocks": 2, "forced": torch.zeros(3, 4, dtype=torch.bool)}
    yield block_sparse_attention, {
        "q": x, "k": y, "v": y, "block_indices": _ints([0, 1, 2]).expand(1, 2, 2, 3).contiguous(),
        "block_counts": torch.full((1, 2, 2), 2, dtype=torch.int32), "key_lengths": _ints([64, 64, 2]), "scale": 0.1,
        "block_q": 64, "block_k": 64}
    yield gated_sparse_attention, {
        "q": x, "k": x, "v": x, "gate_coarse": _rand(1, 2, 100, 1), "num_blocks": 1, "gate_fine": _rand(1, 2, 100, 1),
        "block": 64, "lengths": _ints([64, 36]), "scale": 0.1}
    yield paged_attention, _paged(is_fp8=False)
    yield paged_attention, _paged(is_fp8=True) | {"sinks": None, "window": None}
    k, cache, slots = _rand(3, 2, 64), _rand(5, 16, 2, 64), _ints([1, 2, 79])
    yield kv_store, {"k": k, "v": k, "k_cache": cache, "v_cache": cache.clone(), "slot_mapping": slots}
    yield kv_store, {"k": k, "v": k, "k_cache": cache.to(FP8), "v_cache": cache.to(FP8), "slot_mapping": slots,
                     "k_scale": _rand(2), "v_scale": _rand(2)}
    cos, sin = rotary_3d_tables(64, 8)
    x = _rand(2, 12, 3, 64)
    yield rotary, {"x": x, "cos": cos, "sin": sin, "positions": torch.randint(0, 8, (2, 12)), "out": _rand(*x.shape)}
    yield rotary_3d, {"x": x, "cos": cos, "sin": sin, "grid": (1, 3, 4), "origin": (0, 1, 2),
                      "positions": torch.randint(0, 12, (2, 12)), "out": _rand(*x.shape)}
    x, scale = _rand(2, 6, 8), _rand(2, 3, 8)
    yield rms_norm, {"x": x, "weight": _rand(8), "eps": 1e-6}
    yield add_rms_norm, {"x": x, "residual": x.clone(), "weight": _rand(8), "eps": 1e-6}
    yield head_rms_norm, {"x": _rand(1, 3, 2, 8), "weight": _rand(2, 8), "eps": 1e-6}
    yield layer_norm_modulate, {"x": x, "scale": scale, "shift": scale, "eps": 1e-6}
    yield layer_norm_modulate, {"x": x, "weight": _rand(8), "bias": _rand(8), "eps": 1e-6}
    yield add_layer_norm_modulate, {"x": x, "branch": x, "gate": scale, "scale": scale, "shift": scale}
    yield silu_mul, {"gate": x, "up": x}
    yield gelu, {"x": x, "approximate": "tanh"}
    yield tile_order, {"x": _rand(1, 2, 24, 8), "grid": (2, 3, 4), "tile": (2, 2, 2)}
    yield untile_order, {"x": _rand(1, 2, 32, 8), "grid": (2, 3, 4), "tile": (2, 2, 2)}
    w4, w8 = quantize_nvfp4(_rand(4, 64)), quantize_fp8(_rand(16, 32))
    yield quantize_nvfp4, {"weight": _rand(4, 64), "global_scale": torch.tensor(0.1)}
    yield dequantize_nvfp4, {"weight": w4}
    yield nvfp4_linear, {"x": _rand(2, 64), "weight": w4}
    yield nvfp4_w4a4_linear, {"x": _rand(2, 64), "weight": w4, "input_scale": torch.tensor(0.1),
                              "swizzled": swizzle_scales(w4.scales)}
    yield swizzle_scales, {"scales": w4.scales}
    yield unswizzle_scales, {"swizzled": swizzle_scales(w4.scales), "num_rows": 4, "num_scales": 4}
    yield quantize_fp8, {"x": _rand(4, 64), "scale": _rand(4)}
    yield dequantize_fp8, {"x": w8}
    yield fp8_linear, {"x": _rand(2, 32), "weight": w8, "input_scale": torch.tensor(0.1)}
    yield sample, _sampling()
    yield count_tokens, {"token_ids": _ints([[1, 8], [0, 3]]), "lengths": _ints([2, 1]), "vocab_size": 9}
    drafts, num_drafts, seeds = _ints([[3, 1], [63, 0]], torch.int64), _ints([1, 2]), _ints([1, 2], torch.int64)
    yield spec_accept, {"draft_tokens": drafts, "num_drafts": num_drafts, "target_probs": _rand(2, 3, 64),
                        "draft_probs": _rand(2, 2, 64), "seeds": seeds, "positions": seeds}
    yield spec_accept_greedy, {"draft_tokens": drafts, "num_drafts": num_drafts, "target_tokens": drafts.new_ones(2, 3)}


def _spoilt(x: torch.Tensor, has_others: bool) -> Iterator[tuple[str, torch.Tensor]]:
    def through_bytes(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return change(x.view(torch.uint8)).view(FP8) if x.dtype == FP8 else change(x)

    yield "an axis more", x[None]
    if x.ndim:
        yield "an axis less", x[0]
        yield "a last stride of 2", through_bytes(lambda t: torch.stack([t, t], -1))[..., 0]
    for axis in range(x.ndim):
        yield f"axis {axis} empty", x.narrow(axis, 0, 0)
        yield f"axis {axis} shorter", x.narrow(axis, 0, x.shape[axis] - 1).contiguous()
        yield f"axis {axis} longer", through_bytes(lambda t, axis=axis: torch.cat(  # type: ignore[misc]
            [t, t.narrow(axis, 0, 1)], axis))
    for dtype in TYPES:
        if dtype != x.dtype:
            yield str(dtype), x.to(dtype)
    if has_others:
        yield "another device", x.to("meta")
    if x.dtype in (torch.int32, torch.int64):
        yield "values below 0", x - 7
        yield "values far too large", x + 1_000_000
    elif x.dtype == torch.float32:
        yield "not a number", torch.full_like(x, float("nan"))


def _changes(arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Give what is spoilt and all arguments with it."""
    parts = [x for a in arguments.values() for x in (vars(a).values() if dataclasses.is_dataclass(a) else (a,))]
    has_others = sum(isinstance(x, torch.Tensor) for x in parts) > 1
    for name, given in arguments.items():
        if isinstance(given, torch.Tensor):
            for what, x in _spoilt(given, has_others):
                yield f"{name}: {what}", {**arguments, name: x}
        elif dataclasses.is_dataclass(given) and not isinstance(given, type):
            for field, part in vars(given).items():
                if isinstance(part, torch.Tensor):
                    for what, x in _spoilt(part, has_others):
                        yield f"{name}.{field}: {what}", {**arguments, name: dataclasses.replace(given, **{field: x})}
        elif isinstance(given, tuple):
            for sizes in ((0, 0, 0), (-1, 1, 1), (9, 9, 9), (1, 2)):
                yield f"{name}: {sizes}", {**arguments, name: sizes}
        elif isinstance(given, (int, float)):
            for number in (0, -1, float("nan"), 10**9):
                yield f"{name}: {number}", {**arguments, name: number}
        elif isinstance(given, str):
            yield f"{name}: another", {**arguments, name: "another"}


OPS = list(_ops())


@pytest.mark.parametrize(("op", "arguments"), OPS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_spoilt_argument_works_or_is_named(op: Callable[..., Any], arguments: Arguments) -> None:
    op(**arguments)
    refused = 0
    named = re.compile(rf"{op.__name__}: .*, got .", re.DOTALL)
    for what, spoilt in _changes(arguments):
        try:
            op(**spoilt)
        except ValueError as error:
            assert named.match(str(error)), f"{what}: {error}"
            refused += 1
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert refused >= 4


def test_every_op_of_the_library_is_tried() -> None:
    names = {op.__name__ for op, _ in OPS}
    assert len(names) == len({op.__name__: op for op, _ in OPS}) and len(names) >= 33
