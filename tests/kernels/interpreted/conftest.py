"""Run kernels in Triton's interpreter, mended where it is wrong; this folder is a pytest process of its own.

Triton's interpreter computes bf16 on raw bits, truncates fp32 to bf16 and reads any address. Here bf16 operands are
widened to fp32 and results rounded to nearest even, an access outside every argument is an error, and bf16 reductions
are refused, since they stay wrong.
"""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("tests/kernels/interpreted needs its own process: run `pytest tests/kernels/interpreted` alone")
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

_intervals: list[tuple[int, int]] = []


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _is_bf16(handle: TensorHandle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16)


def _as_fp32(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _mend_arithmetic() -> None:
    def mend(name: str) -> None:
        original = getattr(InterpreterBuilder, name)

        def mended(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(a, TensorHandle) and _is_bf16(a) for a in args):
                return original(self, *args, **kwargs)
            result = original(self, *[_as_fp32(a) if isinstance(a, TensorHandle) else a for a in args], **kwargs)
            if result.data.dtype == np.bool_:
                return result
            return TensorHandle(_round(result.data), tl.bfloat16)

        setattr(InterpreterBuilder, name, mended)

    for name in dir(InterpreterBuilder):
        if name.startswith(("create_f", "create_precise", "create_approx", "create_min", "create_max", "create_exp",
                            "create_log", "create_sqrt", "create_rsqrt", "create_sin", "create_cos", "create_floor",
                            "create_ceil", "create_erf", "create_clampf")) and not name.startswith("create_fp_"):
            mend(name)

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    fp_to_fp = InterpreterBuilder.create_fp_to_fp

    def mended_cast(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        src = _as_fp32(src)
        if dst_type.scalar != tl.bfloat16:
            return src if src.dtype.scalar == dst_type.scalar else cast(self, src, dst_type)
        return TensorHandle(_round(src.data.astype(np.float32)), tl.bfloat16)

    def mended_fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if _is_bf16(src) or dst_type.scalar == tl.bfloat16:
            return mended_cast(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def mended_dot(self: Any, a: TensorHandle, b: TensorHandle, *args: Any) -> TensorHandle:
        return dot(self, _as_fp32(a), _as_fp32(b), *args)

    InterpreterBuilder.cast_impl = mended_cast
    InterpreterBuilder.create_fp_to_fp = mended_fp_to_fp
    InterpreterBuilder.create_dot = mended_dot


def _refuse_bf16_reductions() -> None:
    for ops in (ReduceOps, ScanOps):
        original = ops.apply

        def refusing(self: Any, input: Any, original: Any = original) -> Any:
            tensors = input if isinstance(input, tuple) else (input,)
            if any(t.dtype == tl.bfloat16 for t in tensors):
                raise TypeError("a bf16 reduction is wrong in the interpreter: widen to fp32 before it")
            return original(self, input)

        ops.apply = refusing


def _check_bounds() -> None:
    def check(ptrs: TensorHandle, mask: np.ndarray | None) -> None:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(ptrs.data, np.broadcast(ptrs.data, True if mask is None else mask).shape)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in _intervals:
            inside |= (addresses >= start) & (addresses + size <= end)
        if not inside.all():
            raise IndexError(f"{int((~inside).sum())} of {inside.size} unmasked addresses outside every argument")

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, run, to_host = InterpreterBuilder.create_atomic_rmw, GridExecutor.__call__, GridExecutor._init_args_hst

    def checked_load(self: Any, ptrs: TensorHandle, mask: TensorHandle, *args: Any, **kwargs: Any) -> TensorHandle:
        check(ptrs, mask.data)
        return load(self, ptrs, mask, *args, **kwargs)

    def checked_store(self: Any, ptrs: TensorHandle, value: Any, mask: TensorHandle, *args: Any, **kwargs: Any) -> Any:
        check(ptrs, mask.data)
        return store(self, ptrs, value, mask, *args, **kwargs)

    def checked_rmw(self: Any, op: Any, ptr: TensorHandle, value: Any, mask: TensorHandle, *args: Any) -> Any:
        check(ptr, mask.data)
        return rmw(self, op, ptr, value, mask, *args)

    def recording(self: Any, args: Any, kwargs: Any) -> Any:
        args_host, kwargs_host = to_host(self, args, kwargs)
        for arg in [*args_host, *kwargs_host.values()]:
            tensor = getattr(arg, "base", arg) if not isinstance(arg, torch.Tensor) else arg
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                _intervals.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()))
        return args_host, kwargs_host

    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        _intervals.clear()
        return run(self, *args, **kwargs)

    InterpreterBuilder.create_masked_load = checked_load
    InterpreterBuilder.create_masked_store = checked_store
    InterpreterBuilder.create_atomic_rmw = checked_rmw
    GridExecutor._init_args_hst = recording
    GridExecutor.__call__ = scoped


_mend_arithmetic()
_refuse_bf16_reductions()
_check_bounds()
interpreter.np.seterr(all="ignore")  # masked lanes compute inf - inf, as they do on a card


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` and `torch.empty_like` give with NaN, so that an element nobody wrote is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(100)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    yield
