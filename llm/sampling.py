"""One token for each row of logits, the whole batch in one go, by `kernels.sampling`.

Draws are counter-based on seed and position, so a request draws the same in any batch, on any replica. What is drawn
stays on the device, where the next step takes it from, and is read on the host when it is collected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels import sampling as kernel
from kernels.sampling_params import Sampled, SamplingContext, count_tokens
from kernels.sampling_params import SamplingParams as KernelParams
from kernels.sampling_torch import adjust
from llm.near_ties import near_ties
from llm.request import SamplingParams, TokenLogprob

_MASK = 2**64 - 1
_ALL_BITS = -1


@dataclass(frozen=True)
class Draw:
    """What sampling must know of one sequence beside its logits."""

    params: SamplingParams
    seed: int
    # index of the token that is drawn, counted from the first of the answer
    position: int
    output_token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    # the grammar's mask of tokens that may be drawn, one bit each, the lowest first; None: all
    allowed: bytes | None = None
    # tokens that may not, such as the end before min_tokens
    forbidden: Sequence[int] = ()


class Drawn:
    """The tokens of a step: `token_ids` [B] int64 on the device at once, on the host when they are read."""

    def __init__(self, sampled: Sampled, num_top: Sequence[int | None], is_near_tie: Tensor | None = None) -> None:
        self.token_ids = sampled.token_ids
        # greedy choices that were looked at, and how many of them were near-ties, known when they are read
        self.num_greedy = 0 if is_near_tie is None else len(is_near_tie)
        self.num_near_ties = 0
        self._num_top = num_top
        parts = (
            sampled.token_ids,
            sampled.is_valid,
            sampled.logprobs,
            sampled.top_token_ids,
            sampled.top_logprobs,
            is_near_tie,
        )
        self._host = [None if part is None else _to_host(part) for part in parts]
        self._copied: torch.cuda.Event | None = None
        if self.token_ids.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[tuple[int, TokenLogprob | None] | None]:
        """Wait for the tokens; gives each, with its logprob if asked for, or None where no finite logit is left."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, is_valid, logprobs, top_ids, top_logprobs, is_near_tie = (
            None if part is None else part.tolist() for part in self._host
        )
        self.num_near_ties = sum(is_near_tie or ())
        assert token_ids is not None and is_valid is not None
        results: list[tuple[int, TokenLogprob | None] | None] = []
        for row, token_id in enumerate(token_ids):
            count = self._num_top[row]
            logprob = None
            if count is not None:
                assert logprobs is not None and top_ids is not None and top_logprobs is not None
                top = tuple(zip(top_ids[row][:count], top_logprobs[row][:count], strict=True))
                logprob = TokenLogprob(token_id, logprobs[row], top)
            results.append((token_id, logprob) if is_valid[row] else None)
        return results


def sample(logits: Tensor, draws: Sequence[Draw], *, near_ties_of: torch.dtype | None = None) -> Drawn:
    """Draw a token for each row.

    Args:
        logits: [B, V] fp32.
        draws: B of them.
        near_ties_of: the model's dtype, to count near-ties among the greedy choices; None: they are not counted.
    """
    batch, vocab = logits.shape
    params = [draw.params for draw in draws]

    def column(
        values: Sequence[float], dtype: torch.dtype = torch.float32, neutral: float | None = None
    ) -> Tensor | None:
        if neutral is not None and all(value == neutral for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=logits.device)

    temperature = column([item.temperature for item in params])
    seeds = column([_signed(draw.seed) for draw in draws], torch.int64)
    positions = column([draw.position for draw in draws], torch.int64)
    assert temperature is not None and seeds is not None and positions is not None
    repetition = column([item.repetition_penalty for item in params], neutral=1.0)
    presence = column([item.presence_penalty for item in params], neutral=0.0)
    frequency = column([item.frequency_penalty for item in params], neutral=0.0)
    num_top = [item.logprobs for item in params]
    has_output = any(x is not None for x in (repetition, presence, frequency))
    kernel_params = KernelParams(
        temperature=temperature,
        seeds=seeds,
        positions=positions,
        top_k=column([min(item.top_k or vocab, vocab) for item in params], torch.int32, neutral=vocab),
        top_p=column([item.top_p for item in params], neutral=1.0),
        min_p=column([item.min_p for item in params], neutral=0.0),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    context = SamplingContext(
        prompt_counts=None
        if repetition is None
        else _counts(draws, lambda draw: draw.prompt_token_ids, vocab, logits.device),
        output_counts=_counts(draws, lambda draw: draw.output_token_ids, vocab, logits.device) if has_output else None,
        bias=_bias(draws, batch, vocab, logits.device),
        allowed=_allowed(draws, vocab, logits.device),
    )
    greedy = [] if near_ties_of is None else [row for row, item in enumerate(params) if item.temperature == 0]
    typical = [row for row, item in enumerate(params) if item.typical_p < 1 and item.temperature > 0]
    is_near_tie = None
    if greedy or typical:
        scores = adjust(logits, kernel_params, context)
        if greedy:
            assert near_ties_of is not None
            is_near_tie = near_ties(scores if len(greedy) == batch else scores[greedy], near_ties_of)
        if typical:
            masses = torch.tensor([params[row].typical_p for row in typical], device=logits.device)
            is_typical = typical_tokens(scores[typical] / temperature[typical].unsqueeze(1), masses)
            bias = torch.zeros_like(logits) if context.bias is None else context.bias
            bias[typical] = bias[typical].masked_fill(~is_typical, float("-inf"))
            context = replace(context, bias=bias)
    sampled = kernel.sample(
        logits,
        kernel_params,
        context,
        num_logprobs=max((count for count in num_top if count is not None), default=None),
    )
    return Drawn(sampled, num_top, is_near_tie)


def typical_tokens(scores: Tensor, masses: Tensor) -> Tensor:
    """Say which tokens are locally typical (arXiv 2202.00666): [B, V] scores, [B] masses in (0, 1); gives [B, V] bool.

    Those whose surprise is nearest to the entropy, as few as reach the mass; equally near ones stay together.
    """
    logprobs = torch.log_softmax(scores, -1)
    probabilities = logprobs.exp()
    # what cannot be drawn adds nothing
    entropy = -(probabilities * logprobs).nan_to_num(0.0).sum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs().nan_to_num(float("inf"))
    ordered, order = distance.sort(-1)
    before = probabilities.gather(-1, order).cumsum(-1)
    # rounding may leave the mass just out of reach: then everything stays
    last = (before < masses.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    typical: Tensor = distance <= ordered.gather(-1, last)
    return typical


def mix(value: int) -> int:
    """Mix 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(seed: int) -> int:
    """Read 64 bits as a signed number."""
    return seed - 2**64 if seed >= 2**63 else seed


def _counts(
    draws: Sequence[Draw], tokens_of: Callable[[Draw], Sequence[int]], vocab: int, device: torch.device
) -> Tensor:
    """Count each row's tokens, [B, V] int32."""
    rows = [list(tokens_of(draw)) for draw in draws]
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64, device=device)
    return count_tokens(padded.view(len(rows), longest), torch.tensor([len(row) for row in rows], device=device), vocab)


def _bias(draws: Sequence[Draw], batch: int, vocab: int, device: torch.device) -> Tensor | None:
    """What is added to logits, [B, V] fp32; minus infinity for what is forbidden."""
    if not any(draw.params.logit_bias or draw.forbidden for draw in draws):
        return None
    bias = torch.zeros(batch, vocab)
    for row, draw in enumerate(draws):
        for token, value in draw.params.logit_bias.items():
            bias[row, token] = value
        bias[row, list(draw.forbidden)] = float("-inf")
    return bias.to(device)


def _allowed(draws: Sequence[Draw], vocab: int, device: torch.device) -> Tensor | None:
    """The masks of all rows, [B, ceil(V / 32)] int32."""
    if all(draw.allowed is None for draw in draws):
        return None
    words = -(-vocab // 32)
    mask = np.full((len(draws), words), _ALL_BITS, dtype=np.int32)
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            padded = draw.allowed[: words * 4].ljust(words * 4, b"\x00")
            mask[row] = np.frombuffer(padded, dtype="<i4")
    return torch.from_numpy(mask).to(device)


def _to_host(x: Tensor) -> Tensor:
    """Begin to copy to the host, without waiting for it."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
