"""The one capability test that decides between a Triton kernel and torch, and what the launchers share of it.

CPU tensors always take the torch path, also where Triton's interpreter is on: tests call `<op>_triton()` themselves.
"""

import functools
import importlib.util
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None


class _MissingLanguage:
    """Stand in for `triton.language` in signatures where Triton is not installed."""

    constexpr = object


class _MissingTriton:
    """Stand in for `triton` where it is not installed: kernels can be defined, not launched."""

    @staticmethod
    def jit(function: Any) -> Any:
        return function

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()


triton: Any
tl: Any
if HAS_TRITON:
    import triton as _triton
    import triton.language as _tl

    triton, tl = _triton, _tl
else:
    triton, tl = _MissingTriton(), _MissingLanguage()


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of `device`, or None for anything that is no CUDA device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


@functools.cache
def can_run_triton(device: torch.device) -> bool:
    """Say whether kernels run on `device`: Triton installed and compute capability 8.0 or later."""
    sm = capability(device)
    can = HAS_TRITON and sm is not None and sm >= (8, 0)
    logger.info("kernels on %s: %s (triton installed: %s, capability: %s)",
                device, "triton" if can else "torch", HAS_TRITON, sm)
    return can


def takes_gradients(*inputs: torch.Tensor | None) -> bool:
    """Say whether autograd will ask an op for the gradient of one of its inputs; None are left out."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def uses_triton(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Say whether an op launches its Triton kernel.

    x is the input whose device counts, others are its further inputs that may require gradients: where one does, the op
    goes through torch, whose autograd is its backward.
    """
    return can_run_triton(x.device) and not takes_gradients(x, *others)


def refuse_gradients(op: str, *inputs: torch.Tensor | None) -> None:
    """Raise ValueError where a gradient would be asked of a Triton forward, which would lose it in silence."""
    if takes_gradients(*inputs):
        raise ValueError(f"{op}: the Triton forward has no backward, so that no input may require gradients, got "
                         f"{[x.requires_grad for x in inputs if x is not None]} for its inputs")


def require_scales(x: torch.Tensor, op: str, name: str) -> None:
    """Raise ValueError unless scales are finite and above 0; on CPU only: a card would be waited for."""
    if x.device.type == "cpu":
        bad = x.detach()[~((x > 0) & x.isfinite())]
        require(bad.numel() == 0, op, f"{name} must be finite and above 0", bad[:4].tolist())


def require(condition: bool, op: str, rule: str, got: object) -> None:
    """Raise ValueError naming operation, rule and value unless `condition` holds."""
    if not condition:
        raise ValueError(f"{op}: {rule}, got {got}")
