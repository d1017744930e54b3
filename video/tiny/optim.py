"""Optimisers for the tiny models: Muon for hidden matrices, AdamW for the rest, an average of the weights.

Source: Muon (Jordan et al. 2024) with the update scaled to AdamW's size, 0.2 * sqrt(larger side) (arXiv 2502.16982).
Newton-Schulz runs in bf16 where the device multiplies in it, else in fp32.

Invariants: matrices of one shape are orthogonalised in one batched product; no step reads a value back to the host;
`state_dict` and `load_state_dict` continue bit for bit.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny.forward import training_dtype

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass
class Budget:
    """How long a stage trains: a number of steps, or seconds of wall clock from `start`.

    The learning rate follows `progress`, so that its decay completes however fast the machine is.
    """

    steps: int | None = None
    seconds: float | None = None
    started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"Budget: give steps or seconds, got steps={self.steps} and seconds={self.seconds}")

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def progress(self, step: int) -> float:
        """Return the share that is used up before this step, 0 to 1 and beyond."""
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None
        return self.elapsed_s / self.seconds


def learning_rate_scale(progress: float, step: int, warm_up_steps: int = 100, hold_until: float = 0.35) -> float:
    """Warm up over steps, hold, then fall evenly to a hundredth; progress and result are shares of 0 to 1."""
    warm_up = min((step + 1) / warm_up_steps, 1.0)
    return warm_up * max(min(1.0, 1.0 - (progress - hold_until) / (1.0 - hold_until)), 0.01)


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Replace each matrix by an approximation of its nearest orthogonal one.

    Args:
        matrices: `[B, M, N]` float.
        iterations: of the quintic Newton-Schulz iteration.

    Returns:
        `[B, M, N]` in the dtype given; singular values lie between about 0.7 and 1.2.
    """
    a, b, c = _NEWTON_SCHULZ
    x: Tensor = matrices.to(training_dtype(matrices.device))
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon:
    """Momentum, orthogonalised; parameters of more than two axes are taken as matrices `[first, rest]`."""

    def __init__(self, params: Iterable[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        self.params = list(params)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = [torch.zeros_like(param) for param in self.params]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, param in enumerate(self.params):
            groups[param.size(0), param[0].numel()].append(index)
        self.groups = dict(groups)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient; the learning rate is AdamW's kind."""
        grads = [param.grad if param.grad is not None else torch.zeros_like(param) for param in self.params]
        torch._foreach_lerp_(self.buffers, grads, 1 - self.momentum)
        ahead = torch._foreach_lerp(grads, self.buffers, self.momentum)
        for (rows, columns), indices in self.groups.items():
            update = orthogonalize(torch.stack([ahead[i].reshape(rows, columns) for i in indices]))
            params: list[Tensor] = [self.params[i] for i in indices]
            torch._foreach_mul_(params, 1 - learning_rate * self.weight_decay)
            scale = -learning_rate * 0.2 * math.sqrt(max(rows, columns))
            shaped = [u.view_as(param) for u, param in zip(update.unbind(0), params, strict=True)]
            torch._foreach_add_(params, shaped, alpha=scale)


class Optimizer:
    """Muon on the matrices named hidden, AdamW on everything else, one clip of the gradient's norm, one average.

    Args:
        model: the module to train.
        hidden: parameters whose name contains one of these, and that have two axes or more, go to Muon.
        learning_rate: peak, of both.
        max_norm: of the gradient.
        ema_decay: of the average of the weights; it is shorter at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: tuple[str, ...],
        learning_rate: float,
        max_norm: float = 1.0,
        ema_decay: float = 0.999,
        adam_share: float = 0.5,
    ) -> None:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        matrices = [param for name, param in named if param.ndim > 1 and any(part in name for part in hidden)]
        chosen = {id(param) for param in matrices}
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [param for _, param in named]
        self.muon = Muon(matrices)
        others = [param for param in self.params if id(param) not in chosen]
        is_cuda = self.params[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=is_cuda)
        self.learning_rate, self.max_norm, self.adam_share = learning_rate, max_norm, adam_share
        self.ema_decay, self.steps = ema_decay, 0
        self.ema = [param.detach().clone() for param in self.params]
        self._good: list[Tensor] = [param.detach().clone() for param in self.params]

    def step(self, scale: float) -> None:
        """Clip, update, average, and drop the gradients; scale is the schedule's share of the peak rate."""
        nn.utils.clip_grad_norm_(self.params, self.max_norm, foreach=True)
        self.muon.step(self.learning_rate * scale)
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate * self.adam_share * scale
        self.adam.step()
        for param in self.params:
            param.grad = None
        self.steps += 1
        decay = min(self.ema_decay, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.params, 1 - decay)

    @torch.no_grad()
    def keep_or_restore(self, is_finite: bool) -> None:
        """Remember the weights while the loss is finite; go back to the remembered ones, without momentum, when not."""
        if is_finite:
            torch._foreach_copy_(self._good, self.params)
            return
        torch._foreach_copy_(self.params, self._good)
        torch._foreach_copy_(self.ema, self._good)
        torch._foreach_zero_(self.muon.buffers)
        for state in self.adam.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].nan_to_num_(nan=1.0, posinf=1.0)

    def ema_state(self) -> dict[str, Tensor]:
        """Return the averaged weights by name (views, not copies)."""
        return dict(zip(self.names, self.ema, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs beside the model's weights."""
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict(), "ema": self.ema, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of `state_dict`, on this model's device."""
        with torch.no_grad():
            torch._foreach_copy_(self.muon.buffers, state["muon"])
            torch._foreach_copy_(self.ema, state["ema"])
            torch._foreach_copy_(self._good, self.params)
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]
