"""What one check of `gpu_check` is made of, and how its error is measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Hold one check; `make(device, filled)` gives tensors, without contents where filled is False, for compilation."""

    name: str
    shape: str
    make: Callable[[torch.device, bool], Inputs]
    launch: Callable[[Inputs, Any], Any]
    configs: tuple[Any, ...]
    reference: Callable[[Inputs], torch.Tensor]
    sample: Callable[[Inputs, Any], torch.Tensor]
    peers: dict[str, Callable[[Inputs], Any]]
    flops: float
    bytes: float
    rotate: Callable[[Inputs], list[Inputs]] = field(default=lambda inputs: [inputs])
    peers_of: str | None = None  # the check whose peers this op replaces


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ||got - want|| / ||want||, infinite where got is not finite."""
    got = got.double()
    return float((got - want).norm() / want.norm()) if bool(got.isfinite().all()) else float("inf")


def randn(*shape: int, device: torch.device, filled: bool) -> torch.Tensor:
    """Return normal bf16 numbers, without contents where filled is False."""
    if not filled:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, device=device).to(torch.bfloat16)
