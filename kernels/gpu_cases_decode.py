"""What `gpu_check` runs of paged attention: decode, chunks of prefill, draft trees, latents, mixed batches."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu_case import Case, Inputs, randn
from kernels.paged_attention import paged_attention_reference, paged_attention_triton

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
REFERENCED = 2


def decode_case(name: str, batch: int, context: int, page: int, configs: tuple[Any, ...]) -> Case:
    """Check one new token a sequence over its paged keys and values, every sequence and head."""
    heads, kv_heads, head_dim = 32, 8, 128
    pages = context // page

    def make(device: torch.device, filled: bool) -> Inputs:
        k, v = (randn(batch * pages, page, kv_heads, head_dim, device=device, filled=filled) for _ in range(2))
        table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = randn(batch, heads, head_dim, device=device, filled=filled)
        # the same keys in the order that torch wants, no pages: a bound for what torch could do
        dense_k, dense_v = (x[table].view(batch, context, kv_heads, head_dim).transpose(1, 2) if filled else x
                            for x in (k, v))
        return {"q": q, "k": k, "v": v, "table": table, "lengths": lengths, "dense_k": dense_k, "dense_v": dense_v}

    def reference(x: Inputs) -> torch.Tensor:
        return paged_attention_reference(x["q"][:2].double(), x["k"], x["v"], x["table"][:2], x["lengths"][:2],
                                         scale=head_dim**-0.5, window=None)

    def contiguous_sdpa(x: Inputs) -> torch.Tensor:
        q = x["q"][:, :, None]
        return F.scaled_dot_product_attention(q, x["dense_k"], x["dense_v"], enable_gqa=True).squeeze(2)

    return Case(
        name, f"B{batch} H{heads}/{kv_heads} D{head_dim} context {context} page {page}", make,
        lambda x, c: paged_attention_triton(x["q"], x["k"], x["v"], x["table"], x["lengths"], scale=head_dim**-0.5,
                                            window=None, config=c),
        configs, reference, lambda x, out: out[:2], {"sdpa contiguous": contiguous_sdpa},
        4.0 * batch * heads * context * head_dim,
        4.0 * batch * context * kv_heads * head_dim,
        lambda x: [x, {**x, **{part: x[part].clone() for part in ("k", "v", "dense_k", "dense_v")}}])


def mixed_case(name: str, tokens: tuple[int, ...], contexts: tuple[int, ...], configs: tuple[Any, ...]) -> Case:
    """Check chunks of prefill and decoding sequences in one batch: tokens and cached keys of each, none among them."""
    heads, kv_heads, head_dim, page = 32, 8, 128, 64
    n, pages = sum(tokens), -(-max(contexts) // page)
    pairs = sum(new * (context - new / 2) for new, context in zip(tokens, contexts, strict=True))

    def make(device: torch.device, filled: bool) -> Inputs:
        k, v = (randn(len(tokens) * pages, page, kv_heads, head_dim, device=device, filled=filled) for _ in range(2))
        return {"q": randn(n, heads, head_dim, device=device, filled=filled), "k": k, "v": v,
                "table": torch.randperm(len(tokens) * pages, device=device).view(-1, pages).int(),
                "lengths": torch.tensor(contexts, dtype=torch.int32, device=device),
                "cu": torch.tensor((0, *itertools.accumulate(tokens)), dtype=torch.int32, device=device)}

    def launch(x: Inputs, config: Any) -> torch.Tensor:
        return paged_attention_triton(x["q"], x["k"], x["v"], x["table"], x["lengths"], cu_seqlens_q=x["cu"],
                                      scale=head_dim**-0.5, window=None, config=config)

    def reference(x: Inputs) -> torch.Tensor:
        return paged_attention_reference(x["q"].double(), x["k"], x["v"], x["table"], x["lengths"],
                                         cu_seqlens_q=x["cu"], scale=head_dim**-0.5, window=None)

    return Case(
        name, f"{len(tokens)} sequences, {n} tokens, contexts to {max(contexts)}", make, launch, configs, reference,
        lambda x, out: out, {}, 4.0 * heads * head_dim * pairs,
        4.0 * sum(contexts) * kv_heads * head_dim + 4.0 * n * heads * head_dim)


def paged_case(
    name: str, batch: int, tokens: int, context: int, configs: tuple[Any, ...], *, heads: int = 32, kv_heads: int = 8,
    d: int = 128, dv: int = 128, page: int = 64, fp8: bool = False, tree: bool = False, window: int | None = None,
    sinks: bool = False, soft_cap: float | None = None,
) -> Case:
    """Check `tokens` query tokens for each of `batch` sequences of `context` tokens; d = 576 shares its latents."""
    pages = -(-context // page)

    def make(device: torch.device, filled: bool) -> Inputs:
        def values(*shape: int) -> torch.Tensor:
            if not filled:
                return torch.empty(shape, dtype=BF16, device=device)
            return torch.randn(shape, device=device).to(BF16)

        k = values(batch * pages, page, kv_heads, d)
        v = k[..., :dv] if d == 576 else values(batch * pages, page, kv_heads, dv)
        scale = torch.full((kv_heads,), 1.0, device=device) if fp8 else None
        k, v = (x.to(FP8) if fp8 else x for x in (k, v))
        mask = None
        if tree:
            # token i continues token (i - 1) // 2: a binary tree
            mask = torch.eye(tokens, dtype=torch.bool, device=device)
            for i in range(1, tokens):
                mask[i] |= mask[(i - 1) // 2]
            mask = mask.repeat(batch, 1)
        return {
            "q": values(batch * tokens, heads, d), "k": k, "v": v, "k_scale": scale, "v_scale": scale, "mask": mask,
            "table": torch.randperm(batch * pages, device=device).view(batch, pages).int(),
            "lengths": torch.full((batch,), context, dtype=torch.int32, device=device),
            "cu": None if tokens == 1 else torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens,
            "sinks": torch.zeros(heads, device=device) if sinks else None,
        }

    def options(x: Inputs) -> dict[str, Any]:
        return {"scale": d**-0.5, "window": window, "soft_cap": soft_cap, "sinks": x["sinks"], "k_scale": x["k_scale"],
                "v_scale": x["v_scale"]}

    def launch(x: Inputs, config: Any) -> torch.Tensor:
        return paged_attention_triton(x["q"], x["k"], x["v"], x["table"], x["lengths"], cu_seqlens_q=x["cu"],
                                      tree_mask=x["mask"], config=config, **options(x))

    def reference(x: Inputs) -> torch.Tensor:
        few = min(REFERENCED, batch)
        rows = few * tokens
        cu = None if x["cu"] is None else x["cu"][: few + 1]
        mask = None if x["mask"] is None else x["mask"][:rows]
        return paged_attention_reference(x["q"][:rows].double(), x["k"], x["v"], x["table"][:few], x["lengths"][:few],
                                         cu_seqlens_q=cu, tree_mask=mask, **options(x))

    what = " ".join(word for word, is_on in (("fp8", fp8), ("tree", tree), (f"window {window}", window is not None),
                                             ("sinks", sinks), ("soft cap", soft_cap is not None)) if is_on)
    seen = context if window is None else min(window, context)
    pairs = seen if tokens < context else (context + 1) / 2
    element = 1 if fp8 else 2
    width = d if d == 576 else d + dv
    return Case(
        name, f"B{batch} n{tokens} H{heads}/{kv_heads} D{d}/{dv} context {context} page {page} {what}".strip(), make,
        launch, configs, reference, lambda x, out: out[: min(REFERENCED, batch) * tokens], {},
        2.0 * batch * tokens * heads * pairs * (d + dv),
        element * batch * seen * kv_heads * width + 2.0 * batch * tokens * heads * (d + dv),
        lambda x: [x, {**x, "q": x["q"].clone()}])
