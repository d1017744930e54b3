"""What one check of `gpu_check` is made of, and how its error is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]
Parts = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Hold one check; `make(device, filled)` gives tensors, without contents where filled is False, for compilation.

    reference: fp64 results (several: a tuple) of what `sample` takes of an output. peers: torch's own ways, whose error
    against the same reference bounds ours. rotate: inputs that take turns where a call is short, so that none is found
    in the L2. peers_of: the check whose peers this op replaces. is_exact: not a bit may differ
    from the reference. is_repeatable: nor between launches.
    """

    name: str
    shape: str
    make: Callable[[torch.device, bool], Inputs]
    launch: Callable[[Inputs, Any], Any]
    configs: tuple[Any, ...]
    reference: Callable[[Inputs], Parts]
    sample: Callable[[Inputs, Any], Parts]
    peers: dict[str, Callable[[Inputs], Any]]
    flops: float
    bytes: float
    rotate: Callable[[Inputs], list[Inputs]] = field(default=lambda inputs: [inputs])
    peers_of: str | None = None
    is_exact: bool = False
    is_repeatable: bool = True


def error_of(got: Parts, want: Parts) -> float:
    """Return ||got - want|| / ||want||, the largest of several parts, infinite where got is not finite.

    A peer may give fewer parts than the reference has: those in front are compared.
    """
    return max(_error(*pair) for pair in zip(_parts(got), _parts(want), strict=False))


def _parts(x: Parts) -> Sequence[torch.Tensor]:
    return x if isinstance(x, tuple) else (x,)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        raise ValueError(f"gpu_check: an output must be {list(want.shape)} like its reference, got {list(got.shape)}")
    got, want = got.double(), want.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    difference, size = float((got - want).norm()), float(want.norm())
    return difference / size if size > 0 else difference


def with_default(default: Any, *others: Any) -> tuple[Any, ...]:
    """Put the launch that the card takes by itself in front of those to compare it with."""
    return (default, *(config for config in others if config != default))


def randn(*shape: int, device: torch.device, filled: bool) -> torch.Tensor:
    """Return normal bf16 numbers, without contents where filled is False."""
    if not filled:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, device=device).to(torch.bfloat16)
