"""What `gpu_check` runs of gradients: attention's by torch's autograd, block-sparse attention's by its own kernels.

References are FlashAttention-2's formulas (arXiv 2307.08691) in fp64, block by block, with no log-sum-exp or output of
ours in them.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention
from kernels.block_sparse_backward import block_sparse_backward_triton
from kernels.block_sparse_torch import block_sparse_attention_torch
from kernels.gpu_case import Case, Inputs, randn
from kernels.gpu_cases_attention import sparse_inputs

NAMES = ("q", "k", "v")


def gradients_of_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor,
    seen: Iterable[tuple[slice, torch.Tensor | slice]], *, is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of softmax(q kᵀ / sqrt(D)) v for `[N, D]` fp64 tensors.

    seen: rows and the keys that they see, each row once.
    """
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    scale = q.shape[1] ** -0.5
    for rows, keys in seen:
        scores = q[rows] @ k[keys].t() * scale
        if is_causal:
            places = torch.arange(len(k), device=q.device)
            scores.masked_fill_(places[keys] > places[rows][:, None], float("-inf"))
        weights = torch.softmax(scores, -1)
        grad_weights = grad_out[rows] @ v[keys].t()
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * scale
        grad_q[rows] = grad_scores @ k[keys]
        grad_k[keys] += grad_scores.t() @ q[rows]
        grad_v[keys] += weights.t() @ grad_out[rows]
    return grad_q, grad_k, grad_v


def dense_backward_case(name: str, heads: int, kv_heads: int, n: int, head_dim: int, causal: bool) -> Case:
    """Check what `attention` gives where gradients are asked for; the first key head's group is compared."""
    group = heads // kv_heads

    def make(device: torch.device, filled: bool) -> Inputs:
        if not filled:  # torch's own: nothing to compile ahead
            return {}
        x = {part: randn(1, heads if part == "q" else kv_heads, n, head_dim, device=device, filled=True)
             for part in NAMES}
        return {**{part: tensor.requires_grad_() for part, tensor in x.items()},
                "grad": randn(1, heads, n, head_dim, device=device, filled=True)}

    def backward(x: Inputs, key: str, forward: Any) -> tuple[torch.Tensor, ...]:
        # the forward is done once, what is timed is the backward
        if key not in x:
            x[key] = forward()
        return torch.autograd.grad(x[key], [x[part] for part in NAMES], x["grad"], retain_graph=True)

    def launch(x: Inputs, c: Any) -> tuple[torch.Tensor, ...] | None:
        return backward(x, "ours", lambda: attention(x["q"], x["k"], x["v"], causal=causal)) if x else None

    def sdpa(backend: SDPBackend) -> Any:
        def forward(x: Inputs) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal,
                                                      enable_gqa=heads != kv_heads)

        return lambda x: backward(x, backend.name, lambda: forward(x))

    def reference(x: Inputs) -> tuple[torch.Tensor, ...]:
        parts = {part: x[part].detach()[0].double() for part in NAMES}
        blocks = [(slice(a, a + 2048), slice(0, n)) for a in range(0, n, 2048)]
        found = [gradients_of_head(parts["q"][head], parts["k"][0], parts["v"][0], x["grad"][0, head].double(), blocks,
                                   is_causal=causal) for head in range(group)]
        grad_q, grad_k, grad_v = (torch.stack(part) for part in zip(*found, strict=True))
        return grad_q, grad_k.sum(0), grad_v.sum(0)

    def sample(x: Inputs, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return out[0][0, :group], out[1][0, 0], out[2][0, 0]

    return Case(
        name, f"H{heads}/{kv_heads} N{n} D{head_dim}{' causal' if causal else ''}, gradients", make, launch, (None,),
        reference, sample, {"flash": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)},
        10.0 * heads * n * n * head_dim * (0.5 if causal else 1.0), 2.0 * n * head_dim * (4 * heads + 4 * kv_heads),
        is_repeatable=False)  # torch's flash backward sums the gradient of q by atomics


def sparse_backward_case(
    name: str, heads: int, n: int, block: int, density: float, head_dim: int, configs: tuple[Any, ...], *,
    peers_of: str | None = None,
) -> Case:
    """Check both kernels; every token of the last head is compared."""
    blocks = -(-n // block)
    chosen = max(1, round(blocks * density))
    scale = head_dim**-0.5

    def make(device: torch.device, filled: bool) -> Inputs:
        x = sparse_inputs(heads, n, head_dim, block, chosen, device, filled)
        if filled:
            x["out"], x["lse"] = block_sparse_attention_torch(
                x["q"], x["k"], x["v"], x["indices"], x["counts"], block_q=block, block_k=block, scale=scale)
        else:
            x["out"], x["lse"] = torch.empty_like(x["q"]), torch.empty(1, heads, n, device=device)
        return {**x, "grad": randn(1, heads, n, head_dim, device=device, filled=filled),
                "grad_lse": torch.zeros(1, heads, n, device=device)}

    def launch(x: Inputs, c: Any) -> tuple[torch.Tensor, ...]:
        return block_sparse_backward_triton(
            x["q"], x["k"], x["v"], x["out"], x["lse"], x["grad"], x["grad_lse"], x["indices"], x["counts"],
            block_q=block, block_k=block, scale=scale, config=c)

    def seen(x: Inputs) -> list[tuple[slice, torch.Tensor | slice]]:
        keys = (x["indices"][0, -1].long()[..., None] * block + torch.arange(block, device=x["q"].device)).flatten(1)
        return [(slice(b * block, (b + 1) * block), keys[b][keys[b] < n]) for b in range(blocks)]

    def reference(x: Inputs) -> tuple[torch.Tensor, ...]:
        q, k, v, grad = (x[part][0, -1].double() for part in (*NAMES, "grad"))
        return gradients_of_head(q, k, v, grad, seen(x))

    def by_torch(x: Inputs) -> tuple[torch.Tensor, ...]:
        """Attend a block at a time by torch's own attention in bf16, the last head alone: a bound for the error."""
        leaves = [x[part][:, -1:].detach().clone().requires_grad_() for part in NAMES]
        q, k, v = leaves
        out = torch.cat([F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
                         for rows, keys in seen(x)], 2)
        return torch.autograd.grad(out, leaves, x["grad"][:, -1:])

    return Case(
        name, f"H{heads} N{n} D{head_dim}, {chosen} of {blocks} blocks of {block}, gradients", make, launch, configs,
        reference, lambda x, out: tuple(part[0, -1] for part in out), {"by block, one head": by_torch},
        10.0 * heads * n * chosen * block * head_dim, 2.0 * n * head_dim * 8 * heads, peers_of=peers_of)
