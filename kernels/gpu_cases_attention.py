"""What `gpu_check` runs of attention over whole sequences: dense, packed, block-sparse, and the choice of blocks."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention_reference, attention_triton
from kernels.block_selection import (
    pool_blocks_triton,
    select_blocks,
    select_blocks_reference,
    select_blocks_triton,
)
from kernels.block_sparse_attention import block_sparse_attention_triton
from kernels.gpu_case import Case, Inputs, randn

SAMPLED_ROWS = 128


def _sdpa(backend: SDPBackend, causal: bool) -> Callable[[Inputs], torch.Tensor]:
    def run(x: Inputs) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal,
                                                  enable_gqa=x["q"].shape[1] != x["k"].shape[1])

    return run


def dense_case(
    name: str, batch: int, heads: int, kv_heads: int, n: int, head_dim: int, causal: bool, configs: tuple[Any, ...]
) -> Case:
    """Check sampled rows of each head, full or causal, against fp64; the peers are the backends of torch's SDPA."""
    def make(device: torch.device, filled: bool) -> Inputs:
        q = randn(batch, heads, n, head_dim, device=device, filled=filled)
        k, v = (randn(batch, kv_heads, n, head_dim, device=device, filled=filled) for _ in range(2))
        rows = torch.randint(0, n, (SAMPLED_ROWS,), device=device).sort().values
        rows[0], rows[-1] = 0, n - 1
        return {"q": q, "k": k, "v": v, "rows": rows}

    def reference(x: Inputs) -> tuple[torch.Tensor, ...]:
        if not causal:
            return attention_reference(x["q"][:1, :, x["rows"]].double(), x["k"][:1].double(), x["v"][:1].double())
        seen = [attention_reference(x["q"][:1, :, r : r + 1].double(), x["k"][:1, :, : r + 1].double(),
                                    x["v"][:1, :, : r + 1].double()) for r in x["rows"].tolist()]
        return tuple(torch.cat(parts, 2) for parts in zip(*seen, strict=True))

    def sample(x: Inputs, out: Any) -> tuple[torch.Tensor, ...]:
        # torch's own give no log-sum-exp
        return tuple(part[:1, :, x["rows"]] for part in (out if isinstance(out, tuple) else (out,)))

    peers = {"flash": _sdpa(SDPBackend.FLASH_ATTENTION, causal), "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, causal)}
    return Case(
        name, f"B{batch} H{heads}/{kv_heads} N{n} D{head_dim}{' causal' if causal else ''}", make,
        lambda x, c: attention_triton(x["q"], x["k"], x["v"], causal=causal, scale=head_dim**-0.5, config=c),
        configs, reference, sample, peers,
        4.0 * batch * heads * n * n * head_dim * (0.5 if causal else 1.0),
        2.0 * batch * n * head_dim * (2 * heads + 2 * kv_heads))


def packed_case(
    name: str, lengths: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, configs: tuple[Any, ...]
) -> Case:
    """Check causal attention within each of several sequences in one tensor, a row of each end of each sequence."""
    starts = (0, *itertools.accumulate(lengths))
    n = starts[-1]
    sampled = [(start, row) for start, length in zip(starts, lengths, strict=False) if length
               for row in sorted({0, length // 2, length - 1})]

    def make(device: torch.device, filled: bool) -> Inputs:
        q = randn(n, heads, head_dim, device=device, filled=filled)
        k, v = (randn(n, kv_heads, head_dim, device=device, filled=filled) for _ in range(2))
        return {**{name: x.transpose(0, 1)[None] for name, x in (("q", q), ("k", k), ("v", v))},
                "cu": torch.tensor(starts, dtype=torch.int32, device=device)}

    def reference(x: Inputs) -> tuple[torch.Tensor, ...]:
        q, k, v = x["q"], x["k"], x["v"]
        seen = [attention_reference(q[:, :, a + r : a + r + 1].double(), k[:, :, a : a + r + 1].double(),
                                    v[:, :, a : a + r + 1].double()) for a, r in sampled]
        return tuple(torch.cat(parts, 2) for parts in zip(*seen, strict=True))

    return Case(
        name, f"{len(lengths)} sequences, N{n} H{heads}/{kv_heads} D{head_dim} causal", make,
        lambda x, c: attention_triton(x["q"], x["k"], x["v"], causal=True, scale=head_dim**-0.5,
                                      varlen=(x["cu"], x["cu"], max(lengths)), config=c),
        configs, reference, lambda x, out: tuple(part[:, :, [a + r for a, r in sampled]] for part in out), {},
        2.0 * heads * sum(length**2 for length in lengths) * head_dim,
        2.0 * n * head_dim * (2 * heads + 2 * kv_heads))


def sparse_inputs(
    heads: int, n: int, head_dim: int, block: int, chosen: int, device: torch.device, filled: bool
) -> Inputs:
    """Return random queries, keys and values and lists of random blocks, the ragged last block in each of them."""
    blocks = -(-n // block)
    q, k, v = (randn(1, heads, n, head_dim, device=device, filled=filled) for _ in range(3))
    if not filled:
        indices = torch.zeros(1, heads, blocks, chosen, dtype=torch.int32, device=device)
        counts = torch.zeros(1, heads, blocks, dtype=torch.int32, device=device)
    else:
        forced = torch.zeros(blocks, dtype=torch.bool, device=device)
        forced[-1] = True
        indices, counts = select_blocks(torch.rand(1, heads, blocks, blocks, device=device), chosen, forced=forced)
    return {"q": q, "k": k, "v": v, "indices": indices, "counts": counts}


def sparse_case(
    name: str, heads: int, n: int, block: int, density: float, configs: tuple[Any, ...], *, peers_of: str | None = None
) -> Case:
    """Check the forward in the first, a middle and the last block of queries."""
    head_dim = 128
    blocks = -(-n // block)
    chosen = round(blocks * density)

    def make(device: torch.device, filled: bool) -> Inputs:
        return sparse_inputs(heads, n, head_dim, block, chosen, device, filled)

    def picked(x: Inputs, out: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([part[:, :, b * block : min((b + 1) * block, n)]
                                for b in (0, blocks // 2, blocks - 1)], 2) for part in out)

    def reference(x: Inputs) -> tuple[torch.Tensor, ...]:
        parts, sums = [], []
        for b in (0, blocks // 2, blocks - 1):
            ids = x["indices"][0, :, b].long()
            tokens = (ids[..., None] * block + torch.arange(block, device=ids.device)).flatten(1)
            is_key = (tokens < n)[:, None, :]
            tokens = tokens.clamp(max=n - 1)[..., None].expand(-1, -1, head_dim)
            k, v = (x[name][0].gather(1, tokens).double() for name in ("k", "v"))
            q = x["q"][0, :, b * block : min((b + 1) * block, n)].double()
            scores = (q @ k.transpose(1, 2) * head_dim**-0.5).masked_fill(~is_key, float("-inf"))
            parts.append(torch.softmax(scores, -1) @ v)
            sums.append(torch.logsumexp(scores, -1))
        return torch.cat(parts, 1)[None], torch.cat(sums, 1)[None]

    return Case(
        name, f"H{heads} N{n} D{head_dim}, {chosen} of {blocks} blocks of {block}", make,
        lambda x, c: block_sparse_attention_triton(x["q"], x["k"], x["v"], x["indices"], x["counts"], block_q=block,
                                                   block_k=block, scale=head_dim**-0.5, config=c),
        configs, reference, picked, {}, 4.0 * heads * n * chosen * block * head_dim, 2.0 * n * head_dim * 4 * heads,
        peers_of=peers_of)


def choice_case(name: str, heads: int, blocks: int, chosen: int) -> Case:
    """Check the choice among given scores, many of them equal, to the last id: torch's top-k leaves ties open."""
    def make(device: torch.device, filled: bool) -> Inputs:
        scores = torch.empty(1, heads, blocks, blocks, device=device)
        if filled:
            scores = torch.randn(scores.shape, device=device)
            scores[:, :, ::2] = scores[:, :, ::2].mul(4).round()
        return {"scores": scores, "forced": torch.arange(blocks, device=device) % 50 == 3}

    def by_torch(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return select_blocks_reference(x["scores"], chosen, x["forced"])

    return Case(
        name, f"H{heads}, {chosen} of {blocks} blocks", make,
        lambda x, c: select_blocks_triton(x["scores"], chosen, x["forced"]), (None,), lambda x: by_torch(x)[0].double(),
        lambda x, out: out[0], {"topk": by_torch}, 0.0, 4.0 * heads * blocks * (blocks + chosen + 1), is_exact=True)


def select_case(name: str, heads: int, n: int, block: int) -> Case:
    """Check mean-pooled scores and the choice among them together, from queries and keys."""
    def make(device: torch.device, filled: bool) -> Inputs:
        return {name: randn(1, heads, n, 128, device=device, filled=filled) for name in ("q", "k")}

    def launch(x: Inputs, c: Any) -> Any:
        scores = pool_blocks_triton(x["q"], block) @ pool_blocks_triton(x["k"], block).transpose(-1, -2)
        return scores, *select_blocks_triton(scores, scores.shape[-1] // 8, None)

    def reference(x: Inputs) -> torch.Tensor:
        blocks = -(-n // block)
        sizes = (n - torch.arange(blocks, device=x["q"].device) * block).clamp(max=block)[:, None]
        q, k = (F.pad(x[t], (0, 0, 0, blocks * block - n)).unflatten(2, (blocks, block)).sum(3, dtype=torch.float64)
                / sizes for t in ("q", "k"))
        scores: torch.Tensor = q @ k.transpose(-1, -2)
        return scores

    return Case(name, f"H{heads} N{n} D128 blocks of {block}", make, launch, (None,), reference,
                lambda x, out: out[0], {}, 0.0, 2.0 * 2 * heads * n * 128)
