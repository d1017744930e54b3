"""Attention in torch: the path of machines without Triton, the reference, and what inputs must be."""

import itertools

import torch
import torch.nn.functional as F

from kernels.dispatch import require

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention_with_lse` in plain torch, in fp32 (fp64 for fp64 inputs), with the whole score matrix."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ expand_kv(q, k).to(wide).transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.to(wide)
    if causal:
        scores = scores.masked_fill(~_causal_mask(q.shape[2], k.shape[2], q.device), float("-inf"))
    weights, lse = softmax_with_lse(scores)
    return (weights @ expand_kv(q, v).to(wide)).to(q.dtype), lse


def softmax_with_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax over the last axis and its log-sum-exp; a row of -inf gives zeros, -inf, and no gradient."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    has_keys = total > 0
    total = torch.where(has_keys, total, 1.0)
    return weights / total, torch.where(has_keys, total.log() + top, float("-inf")).squeeze(-1)


def attention_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Attend by torch's own attention, or by the reference where that one's causal mask is another."""
    n_q, n_k = q.shape[2], k.shape[2]
    if n_k == 0 or (causal and n_q > n_k):
        return attention_reference(q, k, v, causal=causal, scale=scale)[0]
    mask = _causal_mask(n_q, n_k, q.device) if causal and n_q != n_k else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and n_q == n_k, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1])


def _causal_mask(n_q: int, n_k: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril(n_k - n_q)


def expand_kv(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Repeat the heads of keys or values so that each head of q has its own."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def validate_bias(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> None:
    """Raise ValueError unless bias broadcasts to the scores of q and k."""
    scores = (*q.shape[:3], k.shape[2])
    require(bias.ndim == 4 and all(a in (1, b) for a, b in zip(bias.shape, scores, strict=True)), "attention",
            f"bias must broadcast to {list(scores)}", list(bias.shape))
    require(bias.is_floating_point(), "attention", "bias must be floating point", bias.dtype)
    require(bias.device == q.device, "attention", f"bias must be on {q.device} like q", bias.device)


def validate_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
) -> None:
    """Raise ValueError unless packed tensors fit `attention_varlen`; starts are read where they lie on the host."""
    op = "attention_varlen"
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.ndim == 3, op, f"{name} must be [N, H, D]", list(x.shape))
    require(max_seqlen_q >= 0, op, "max_seqlen_q must be at least 0", max_seqlen_q)
    for name, cu, tokens in (("cu_seqlens_q", cu_seqlens_q, q.shape[0]), ("cu_seqlens_k", cu_seqlens_k, k.shape[0])):
        require(cu.ndim == 1 and cu.shape[0] > 0 and cu.dtype == torch.int32 and cu.is_contiguous(), op,
                f"{name} must be contiguous [B + 1] int32", (list(cu.shape), cu.dtype))
        require(cu.device == q.device, op, f"{name} must be on {q.device} like q", cu.device)
        if cu.device.type == "cpu":
            starts = cu.tolist()
            require(starts[0] == 0 and starts[-1] == tokens and starts == sorted(starts), op,
                    f"{name} must ascend from 0 to {tokens}", starts)
            longest = max((b - a for a, b in itertools.pairwise(starts)), default=0)
            require(name != "cu_seqlens_q" or longest <= max_seqlen_q, op,
                    f"max_seqlen_q must be at least {longest}, the longest sequence", max_seqlen_q)
    require(cu_seqlens_q.shape == cu_seqlens_k.shape, op, "cu_seqlens must have one length",
            (list(cu_seqlens_q.shape), list(cu_seqlens_k.shape)))


def validate_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, op: str = "attention"
) -> float:
    """Raise ValueError that names op unless `[B, H, N, D]` tensors fit `attention`; return the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.ndim == 4, op, f"{name} must be [B, H, N, D]", list(x.shape))
        require(x.dtype in DTYPES and x.dtype == q.dtype, op, f"{name} must be fp16, bf16 or fp32 like q", x.dtype)
        require(x.device == q.device, op, f"{name} must be on {q.device} like q", x.device)
        require(x.stride(-1) == 1 or x.shape[-1] == 1, op, f"{name}'s last stride must be 1", x.stride())
    require(q.shape[-1] in HEAD_DIMS, op, f"head dim must be one of {HEAD_DIMS}", q.shape[-1])
    require(k.shape == v.shape and k.shape[0] == q.shape[0] and k.shape[-1] == q.shape[-1], op,
            f"k and v must be [B, Hkv, Nk, D] to match q {list(q.shape)}", (list(k.shape), list(v.shape)))
    require(k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, op, "heads must be a multiple of k's heads",
            (q.shape[1], k.shape[1]))
    require(scale is None or scale > 0, op, "scale must be above 0", scale)
    return q.shape[-1] ** -0.5 if scale is None else scale
