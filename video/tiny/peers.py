"""Processes that train one model together: each draws batches of its own, and gradients are averaged.

`torchrun --nproc-per-node 2 -m video.tiny.train_small transformer ...` starts two. Invariants: all hold the same
weights after every step; the first one's clock decides for all when training ends; only it writes files; one process
alone does what it did without this module.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Peers:
    """The processes of this run; `rank` is this one's number and `size` their count."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    @property
    def is_first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def agree(self, value: float) -> float:
        """Give the first process's value to all."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def mean(self, value: Tensor) -> Tensor:
        """Average a tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(value)
            value = value / self.size
        return value

    @torch.no_grad()
    def average_gradients(self, params: Iterable[Tensor]) -> None:
        """Average the gradients in one message; a parameter without one counts as zeros."""
        if self.size == 1:
            return
        held = list(params)
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in held]
        flat = self.mean(torch.cat([grad.flatten() for grad in grads]))
        for param, part in zip(held, flat.split([grad.numel() for grad in grads]), strict=True):
            param.grad = part.view_as(param)
