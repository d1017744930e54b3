"""Acceptance of drafted tokens without loss: what comes out is distributed as the target model alone would draw it.

Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): token i is accepted with
probability min(1, p/q); at the first refusal a token is drawn from max(p - q, 0), after the last draft one from p.
A draft without probabilities (n-grams, greedy drafts) has q = 1 at its token. Draws are `philox`'s, by position, so a
row depends on itself alone, and a row without drafts draws what `sample` draws. fp32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dispatch import require, tl, triton, uses_triton
from kernels.philox import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    STREAM_SAMPLE,
    philox_words,
    race_all,
    race_of_block,
    uniform,
    uniform_of,
)
from kernels.sampling_params import MAX_VOCAB, check_tensor

MAX_DRAFTS = 64


@dataclass(frozen=True)
class SpecAcceptConfig:
    """Hold the tokens a step and the warps of the kernel."""

    block: int = 4096
    num_warps: int = 8


def spec_accept(
    draft_tokens: torch.Tensor,
    num_drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens and add one of the target's.

    draft_tokens: `[B, K]` int64, K up to 64, of which the first num_drafts `[B]` int32, 0..K, count; ids below V.
    target_probs: `[B, K + 1, V]` fp32, the target's distribution at each drafted place and after them (`sample` gives
    it; one-hot for greedy rows). draft_probs: `[B, K, V]` fp32, what the drafts were drawn from; None for certain ones.
    seeds, positions: `[B]` int64, positions of the first drafted token. Last strides 1.
    Returns tokens `[B, K + 1]` int64, 0 behind the last, and num_tokens `[B]` int32, accepted and one; the one is
    missing where the target has no mass. Raises ValueError for shapes, types, devices, or (on CPU) tokens or counts
    that do not fit.
    """
    _validate(draft_tokens, num_drafts, target_probs, draft_probs, seeds, positions)
    run = spec_accept_triton if uses_triton(target_probs) else spec_accept_reference
    return run(draft_tokens, num_drafts, target_probs.detach(), draft_probs, seeds, positions)


def spec_accept_greedy(
    draft_tokens: torch.Tensor, num_drafts: torch.Tensor, target_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens while they are the target's own: `[B, K]` drafts, `[B, K + 1]` int64 target tokens.

    num_drafts: `[B]` int32, 0..K. Returns and raises as `spec_accept` does.
    """
    op = "spec_accept_greedy"
    require(draft_tokens.ndim == 2 and draft_tokens.dtype == torch.int64, op, "draft_tokens must be [B, K] int64",
            (list(draft_tokens.shape), draft_tokens.dtype))
    batch, num_places = draft_tokens.shape
    check_tensor(op, "num_drafts", num_drafts, (batch,), torch.int32, draft_tokens.device)
    check_tensor(op, "target_tokens", target_tokens, (batch, num_places + 1), torch.int64, draft_tokens.device)
    _check_range(op, "num_drafts", num_drafts, num_places)
    places = torch.arange(num_places, device=draft_tokens.device)
    is_same = (draft_tokens == target_tokens[:, :-1]) & (places < num_drafts[:, None])
    num_tokens = is_same.int().cumprod(1).sum(1, dtype=torch.int32) + 1
    is_given = torch.arange(num_places + 1, device=draft_tokens.device) < num_tokens[:, None]
    return torch.where(is_given, target_tokens, 0), num_tokens


@triton.jit
def _spec_accept_kernel(
    draft_tokens, num_drafts, target_probs, draft_probs, seeds, positions, tokens_out, num_tokens,
    stride_db, stride_tb, stride_tk, stride_qb, stride_qk, vocab, num_places,
    HAS_DRAFT_PROBS: tl.constexpr, BLOCK: tl.constexpr, ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    count = tl.load(num_drafts + row)
    out = tokens_out + row * (num_places + 1)
    target = target_probs + row * stride_tb
    accepted = 0
    refused = 0
    for i in tl.range(0, count):
        if refused == 0:
            token = tl.load(draft_tokens + row * stride_db + i)
            p = tl.load(target + i * stride_tk + token)
            q = 1.0
            if HAS_DRAFT_PROBS:
                q = tl.load(draft_probs + row * stride_qb + i * stride_qk + token)
            word, _, _, _ = philox_words(seed, position + i, tl.arange(0, 1), ACCEPT)
            u = tl.max(uniform_of(word), 0)
            if u * q < p:
                tl.store(out + i, token)
                accepted += 1
            else:
                refused = 1
    stream = tl.where(refused == 1, RESIDUAL, SAMPLE)
    refused_token = -1
    num_drafted = 0  # a row of the draft is read where it was refused
    if refused == 1:
        refused_token = tl.load(draft_tokens + row * stride_db + accepted).to(tl.int32)
        num_drafted = vocab
    best = float("-inf")
    best_any = float("-inf")
    chosen = 0
    chosen_any = 0
    for start in tl.range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_token = tokens < vocab
        p = tl.load(target + accepted * stride_tk + tokens, mask=is_token, other=0.0)
        left = p
        if HAS_DRAFT_PROBS:
            q = tl.load(draft_probs + row * stride_qb + accepted * stride_qk + tokens, mask=tokens < num_drafted,
                        other=0.0)
            left = p - q
        else:
            left = tl.where(tokens == refused_token, 0.0, p)
        noise = race_of_block(seed, position + accepted, start, stream, BLOCK)
        raced = tl.where(left > 0.0, tl.log(left) - noise, float("-inf"))
        top = tl.max(raced, 0)
        first = tl.min(tl.where((raced == top) & is_token, tokens, 2147483647), 0)
        chosen = tl.where(top > best, first, chosen)
        best = tl.maximum(best, top)
        # rounding may leave no residual at all: then the target's own distribution stands in
        raced = tl.where(p > 0.0, tl.log(p) - noise, float("-inf"))
        top = tl.max(raced, 0)
        first = tl.min(tl.where((raced == top) & is_token, tokens, 2147483647), 0)
        chosen_any = tl.where(top > best_any, first, chosen_any)
        best_any = tl.maximum(best_any, top)
    has_token = best_any > float("-inf")
    chosen = tl.where(best > float("-inf"), chosen, chosen_any)
    tl.store(out + accepted, tl.where(has_token, chosen, 0).to(tl.int64))
    for i in tl.range(accepted + 1, num_places + 1):
        tl.store(out + i, chosen.to(tl.int64) * 0)
    tl.store(num_tokens + row, accepted + tl.where(has_token, 1, 0))


def spec_accept_triton(
    draft_tokens: torch.Tensor,
    num_drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    config: SpecAcceptConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on validated tensors, one program a row."""
    batch, num_places = draft_tokens.shape
    config = config or SpecAcceptConfig()
    tokens = torch.empty(batch, num_places + 1, dtype=torch.int64, device=target_probs.device)
    num_tokens = torch.empty(batch, dtype=torch.int32, device=target_probs.device)
    if batch:
        drafts = target_probs if draft_probs is None else draft_probs
        _spec_accept_kernel[(batch,)](
            draft_tokens, num_drafts, target_probs, drafts, seeds, positions, tokens, num_tokens,
            draft_tokens.stride(0), *target_probs.stride()[:2], *drafts.stride()[:2], target_probs.shape[2], num_places,
            HAS_DRAFT_PROBS=draft_probs is not None, BLOCK=config.block, ACCEPT=STREAM_ACCEPT, RESIDUAL=STREAM_RESIDUAL,
            SAMPLE=STREAM_SAMPLE, num_warps=config.num_warps)
    return tokens, num_tokens


def spec_accept_reference(
    draft_tokens: torch.Tensor,
    num_drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `spec_accept` in plain torch, all rows at once; only the last token's distribution is read whole."""
    num_places = draft_tokens.shape[1]
    rows, device = torch.arange(len(draft_tokens), device=target_probs.device), target_probs.device
    places = torch.arange(num_places, device=device)
    p = target_probs[:, :num_places].gather(2, draft_tokens[..., None]).squeeze(2)
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)
    u = uniform(seeds[:, None], positions[:, None] + places, torch.zeros_like(places), STREAM_ACCEPT)
    is_accepted = (u * q < p) & (places < num_drafts[:, None])
    accepted = is_accepted.int().cumprod(1).sum(1)
    is_refused = accepted < num_drafts
    target = target_probs[rows, accepted]
    weights = target
    if num_places:
        at = accepted.clamp(max=num_places - 1)
        refused = F.one_hot(draft_tokens[rows, at], target.shape[1]).to(target.dtype) if draft_probs is None else (
            draft_probs[rows, at])
        left = (target - refused).clamp(min=0)
        # rounding may leave no residual at all: then the target's own distribution stands in
        weights = torch.where((is_refused & (left > 0).any(1))[:, None], left, target)
    stream = torch.where(is_refused, STREAM_RESIDUAL, STREAM_SAMPLE)
    noise = race_all(seeds[:, None], (positions + accepted)[:, None], target.shape[1], stream[:, None], device)
    last = (weights.log() - noise).argmax(1)
    tokens = torch.cat([draft_tokens, torch.zeros_like(draft_tokens[:, :1]) if num_places else last[:, None]], 1)
    has_token = (target > 0).any(1)
    tokens[rows, accepted] = torch.where(has_token, last, 0)
    num_tokens = (accepted + has_token).int()
    return torch.where(torch.arange(num_places + 1, device=device) < num_tokens[:, None], tokens, 0), num_tokens


def _validate(
    draft_tokens: torch.Tensor,
    num_drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    op = "spec_accept"
    require(draft_tokens.ndim == 2 and draft_tokens.shape[1] <= MAX_DRAFTS, op,
            f"draft_tokens must be [B, K] with K up to {MAX_DRAFTS}", list(draft_tokens.shape))
    batch, num_places = draft_tokens.shape
    require(target_probs.ndim == 3 and 0 < target_probs.shape[2] <= MAX_VOCAB, op,
            f"target_probs must be [B, K + 1, V] with V in 1..{MAX_VOCAB}", list(target_probs.shape))
    vocab, device = target_probs.shape[2], target_probs.device
    check_tensor(op, "draft_tokens", draft_tokens, (batch, num_places), torch.int64, device)
    check_tensor(op, "target_probs", target_probs, (batch, num_places + 1, vocab), torch.float32, device)
    check_tensor(op, "draft_probs", draft_probs, (batch, num_places, vocab), torch.float32, device)
    check_tensor(op, "num_drafts", num_drafts, (batch,), torch.int32, device)
    check_tensor(op, "seeds", seeds, (batch,), torch.int64, device)
    check_tensor(op, "positions", positions, (batch,), torch.int64, device)
    _check_range(op, "num_drafts", num_drafts, num_places)
    _check_range(op, "draft_tokens", draft_tokens, vocab - 1)


def _check_range(op: str, name: str, x: torch.Tensor, largest: int) -> None:
    """On CPU only: elsewhere the host would wait for the card."""
    if x.device.type == "cpu":
        bad = x[(x < 0) | (x > largest)]
        require(bad.numel() == 0, op, f"{name} must be in 0..{largest}", bad[:4].tolist())
