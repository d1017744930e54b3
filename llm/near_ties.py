"""Where the default mode may choose another token at temperature 0: the two best scores are as close as rounding.

The default mode sums in an order that depends on the batch (`llm.invariant` says why), so that a score moves by a few
roundings. The rule, the only one: a greedy choice is a near-tie if best - second <= NEAR_TIE[dtype] * max(1, |best|),
on the scores that are compared, after bias, penalties and grammar. Up to its first near-tie an answer does not depend
on the batch. Near-ties are counted (`Engine.num_greedy`, `Engine.num_near_ties`).
"""

import torch
from torch import Tensor

# 2026-12, SmolLM2-135M, fp32, AMD EPYC (AVX2), one thread: 32 rows of logits alone and in a batch of six differ by at
# most 7e-6 of the best, so two scores may move 1.4e-5 apart; twice that. Of the 16-bit types, whose activations are
# rounded after each layer, nothing is measured yet: a few of their roundings.
NEAR_TIE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def near_ties(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Say for each row of scores [B, V] whether its best two are a near-tie; dtype is the model's. Gives [B] bool."""
    best, second = torch.topk(scores, min(2, scores.shape[1])).values.expand(-1, 2).unbind(1)
    near: Tensor = best - second <= NEAR_TIE[dtype] * best.abs().clamp(min=1.0)
    return near
