"""One token for each row of logits: biased, masked, cut off and drawn.

Draws are counter-based (SplitMix64, Steele, Lea and Flood 2014, on seed and position), so a request draws the same in
any batch, on any replica. The draw inverts the cumulative distribution in the order of token ids, in fp64.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.request import SamplingParams, TokenLogprob

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """What sampling must know of one sequence beside its logits."""

    params: SamplingParams
    seed: int
    # index of the token that is drawn, counted from the first of the answer
    position: int
    output_token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    # tokens that may be drawn, ascending, from the grammar; None: all
    allowed: Tensor | None = None
    # tokens that may not, such as the end before min_tokens
    forbidden: Sequence[int] = ()


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[tuple[int, TokenLogprob | None] | None]:
    """Draw a token for each row.

    Args:
        logits: [B, V] fp32.
        draws: B of them.

    Returns: for each row the token id and, if asked for, its logprob; None where no finite logit is left.
    """
    return [_sample_row(logits[row], draw) for row, draw in enumerate(draws)]


def uniform(seed: int, position: int) -> float:
    """Draw from [0, 1) by (seed, position): the output of SplitMix64 at that counter, of 53 bits."""
    value = (mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (mix(value) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """Mix 64 bits: the finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _sample_row(logits: Tensor, draw: Draw) -> tuple[int, TokenLogprob | None] | None:
    params = draw.params
    if not bool(torch.isfinite(logits).all()):
        return None
    adjusted = _adjust(logits, draw)
    token_ids = draw.allowed
    scores = adjusted if token_ids is None else adjusted[token_ids]
    if not bool((scores > float("-inf")).any()):
        return None
    chosen = int(scores.argmax()) if params.temperature == 0 else _draw(scores / params.temperature, draw)
    token_id = chosen if token_ids is None else int(token_ids[chosen])
    logprob = None if params.logprobs is None else _logprob(logits, token_id, params.logprobs)
    return token_id, logprob


def _adjust(logits: Tensor, draw: Draw) -> Tensor:
    """Apply bias, penalties and forbidden tokens: OpenAI's formulas, and CTRL's for the repetition penalty."""
    params = draw.params
    has_penalty = params.frequency_penalty or params.presence_penalty
    if not (params.logit_bias or has_penalty or params.repetition_penalty != 1 or draw.forbidden):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*draw.prompt_token_ids, *draw.output_token_ids}), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if has_penalty:
        for token, count in Counter(draw.output_token_ids).items():
            logits[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if draw.forbidden:
        logits[list(draw.forbidden)] = float("-inf")
    return logits


def _draw(scores: Tensor, draw: Draw) -> int:
    """Cut off the tail by top-k, top-p and min-p, then draw an index. `scores` is [n], divided by the temperature."""
    params = draw.params
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_k is not None and params.top_k < scores.shape[0]:
        least = torch.topk(scores, params.top_k).values[-1]
        probabilities = probabilities.masked_fill(scores < least, 0)
        probabilities /= probabilities.sum()
    if params.top_p < 1:
        ordered, _ = probabilities.sort(descending=True)
        # the smallest set whose mass reaches top_p: a token stays while the mass before it is below
        num_kept = int((ordered.cumsum(0) - ordered < params.top_p).sum())
        probabilities = probabilities.masked_fill(probabilities < ordered[max(num_kept, 1) - 1], 0)
    if params.min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0)
    cumulative = probabilities.double().cumsum(0)
    target = uniform(draw.seed, draw.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    # rounding may carry the target to the very end, behind which tokens have no probability
    return index if index < scores.shape[0] else int(probabilities.nonzero()[-1])


def _logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, num_top) if num_top else None
    best = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), best)


def allowed_tokens(bitmask: bytes, vocab_size: int, device: torch.device) -> Tensor:
    """Turn a mask of one bit a token, the lowest first, into ascending token ids [n] int64."""
    bits = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), bitorder="little", count=vocab_size)
    return torch.from_numpy(np.flatnonzero(bits)).to(device)
