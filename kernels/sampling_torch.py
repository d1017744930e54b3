"""Sampling without Triton, a row at a time: the fast way sorts no more than it must, the plain one is fp64."""

import math
from typing import Any

import torch

from kernels.philox import STREAM_SAMPLE, race, race_all
from kernels.sampling_params import Sampled, SamplingContext, SamplingParams

# the nucleus of top-p is nearly always within the best of a row: of 128,256 scores the best 1024 take 1.0 ms, 8192
# of them 2.3 ms, a sort 13 ms (one core of an EPYC, November 2026)
HEAD = 1024
_NEUTRAL = {"top_p": 1.0, "min_p": 0.0}


def sample_torch(
    logits: torch.Tensor,
    params: SamplingParams,
    context: SamplingContext,
    *,
    num_logprobs: int | None,
    with_probabilities: bool,
) -> Sampled:
    """Draw from validated logits, in fp32."""
    # rows with few tokens left are drawn together, whole vocabularies one by one
    cut_rows, rows = [], []
    logits = logits.float()
    adjusted = adjust(logits, params, context)
    for row, values in enumerate(_values(params, logits)):
        raw = logits[row]
        low, high = raw.aminmax()
        scores = _tempered(adjusted[row], values["temperature"])
        best = scores.max()
        is_valid = bool(low.isfinite() & high.isfinite() & best.isfinite())
        is_greedy = values["temperature"] == 0
        floor = _floor(scores, float(best), values) if is_valid and not is_greedy else None
        token = int(scores.argmax()) if is_valid and is_greedy else 0
        if is_valid and not is_greedy and (floor is not None or len(scores) <= HEAD):
            kept = scores >= (float("-inf") if floor is None else floor)
            cut_rows.append((row, scores, kept.nonzero().squeeze(1)))
        elif is_valid and not is_greedy:
            noise = race_all(values["seeds"], values["positions"], len(scores), STREAM_SAMPLE, scores.device)
            token = int((scores - noise).argmax())
        rows.append((raw, scores, floor, is_valid, is_greedy, token))
    drawn = _race(cut_rows, params)
    results = []
    for row, (raw, scores, floor, is_valid, is_greedy, token) in enumerate(rows):
        token = drawn.get(row, token)
        result = _row(raw, token, is_valid, num_logprobs)
        if with_probabilities:
            result["probabilities"] = _probabilities(scores, token, floor, is_valid, is_greedy)
        results.append(result)
    return _gather(results, logits, num_logprobs, with_probabilities)


def sample_reference(
    logits: torch.Tensor,
    params: SamplingParams,
    context: SamplingContext,
    *,
    num_logprobs: int | None = None,
    with_probabilities: bool = False,
) -> Sampled:
    """Draw in plain torch, in fp64, from whole sorted rows."""
    rows = []
    logits = logits.double()
    adjusted = adjust(logits, params, context)
    for row, values in enumerate(_values(params, logits)):
        raw = logits[row]
        scores = _tempered(adjusted[row], values["temperature"])
        is_valid = bool(raw.isfinite().all() & scores.max().isfinite())
        probabilities = torch.softmax(scores, 0)
        if values["temperature"] == 0:
            probabilities = torch.zeros_like(scores)
            probabilities[scores.argmax()] = 1
        elif is_valid:
            kept = scores >= scores.sort(descending=True).values[min(values["top_k"], len(scores)) - 1]
            probabilities = torch.softmax(scores.masked_fill(~kept, float("-inf")), 0)
            ordered = probabilities.sort(descending=True).values
            before = ordered.cumsum(0) - ordered
            if values["top_p"] < 1:
                last = ordered[(before < values["top_p"]).nonzero()[-1]]
                kept &= probabilities >= last
            kept &= probabilities >= values["min_p"] * probabilities.max()
            probabilities = probabilities.masked_fill(~kept, 0)
            probabilities /= probabilities.sum()
        noise = race_all(values["seeds"], values["positions"], len(scores), STREAM_SAMPLE, scores.device).double()
        token = int((probabilities.log() - noise).argmax()) if is_valid else 0
        one = _row(raw, token, is_valid, num_logprobs)
        rows.append({**one, "probabilities": probabilities if is_valid else torch.zeros_like(scores)})
    return _gather(rows, logits, num_logprobs, with_probabilities)


def _values(params: SamplingParams, logits: torch.Tensor) -> list[dict[str, Any]]:
    """Read the parameters of each row on the host."""
    batch, vocab = logits.shape
    columns = {name: x.tolist() for name, x in vars(params).items() if x is not None}
    return [{**_NEUTRAL, "top_k": vocab, **{name: column[row] for name, column in columns.items()}}
            for row in range(batch)]


def adjust(scores: torch.Tensor, params: SamplingParams, context: SamplingContext) -> torch.Tensor:
    """Apply penalties, bias and mask to scores `[B, V]` fp32 or fp64; temperature, cuts and the draw come behind.

    The one place of these rules in torch; whatever must know the scores before the draw asks here.
    """
    prompt, output = context.prompt_counts, context.output_counts

    def column(x: torch.Tensor) -> torch.Tensor:
        return x.to(scores.dtype).unsqueeze(1)

    if params.repetition_penalty is not None:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for counts in (prompt, output):
            seen = seen if counts is None else seen | (counts > 0)
        factor = column(params.repetition_penalty)
        scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    if output is not None and params.presence_penalty is not None:
        scores = torch.where(output > 0, scores - column(params.presence_penalty), scores)
    if output is not None and params.frequency_penalty is not None:
        scores = scores - column(params.frequency_penalty) * output.to(scores.dtype)
    if context.bias is not None:
        scores = scores + context.bias
    if context.allowed is not None:
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        is_allowed = (context.allowed[:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]] != 0
        scores = scores.masked_fill(~is_allowed, float("-inf"))
    return scores


def _tempered(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    return scores if temperature in (0, 1) else scores / temperature


def _floor(scores: torch.Tensor, best: float, values: dict[str, Any]) -> float | None:
    """Return the least score that may be drawn, or None for all."""
    floor = None
    if values["top_k"] < len(scores):
        floor = float(torch.topk(scores, values["top_k"]).values[-1])
    if values["top_p"] < 1:
        kept = scores if floor is None else scores[scores >= floor]
        goal = values["top_p"] * float(torch.exp(kept - best).sum(dtype=torch.float64))
        reached = None
        for head in (HEAD, 8 * HEAD):
            if reached is None and len(kept) > 2 * head:
                reached = _reached(torch.topk(kept, head).values, best, goal)
        reached = reached if reached is not None else _reached(kept.sort(descending=True).values, best, goal)
        # rounding may leave the goal just out of reach: then everything stays
        floor = reached if reached is not None else floor
    if values["min_p"] > 0:
        least = min(best + math.log(values["min_p"]), best)
        floor = least if floor is None else max(floor, least)
    return floor


def _reached(ordered: torch.Tensor, best: float, goal: float) -> float | None:
    """Return the score at which the mass of descending scores reaches the goal."""
    mass = torch.exp(ordered - best).cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(mass, goal))
    return float(ordered[index]) if index < len(ordered) else None


def _race(rows: list[tuple[int, torch.Tensor, torch.Tensor]], params: SamplingParams) -> dict[int, int]:
    """Draw from the kept tokens of each row, (row, scores, tokens): one call of the generator for all."""
    if not rows:
        return {}
    sizes = [len(tokens) for _, _, tokens in rows]
    numbers = torch.tensor([row for row, _, _ in rows], device=params.seeds.device)
    owners = numbers.repeat_interleave(torch.tensor(sizes, device=numbers.device))
    tokens = torch.cat([tokens for _, _, tokens in rows])
    noise = race(params.seeds[owners], params.positions[owners], tokens, STREAM_SAMPLE).split(sizes)
    return {row: int(kept[(scores[kept] - race_times).argmax()])
            for (row, scores, kept), race_times in zip(rows, noise, strict=True)}


def _probabilities(
    scores: torch.Tensor, token: int, floor: float | None, is_valid: bool, is_greedy: bool
) -> torch.Tensor:
    if not is_valid or is_greedy:
        weights = torch.zeros_like(scores)
        weights[token] = float(is_valid)
        return weights
    return torch.softmax(scores if floor is None else scores.masked_fill(scores < floor, float("-inf")), 0)


def _row(raw: torch.Tensor, token: int, is_valid: bool, num_logprobs: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"token": token, "is_valid": is_valid}
    if num_logprobs is not None:
        lse = torch.logsumexp(raw, 0)
        row["logprob"] = raw[token] - lse
        tokens = torch.zeros(num_logprobs, dtype=torch.int64, device=raw.device)
        if num_logprobs and is_valid:
            # of equals the lower id: a stable sort of all that reach the last one
            tokens = (raw >= torch.topk(raw, num_logprobs).values[-1]).nonzero().squeeze(1)
            tokens = tokens[raw[tokens].sort(descending=True, stable=True).indices[:num_logprobs]]
        row["top"] = tokens, raw[tokens] - lse
    return row


def _gather(
    rows: list[dict[str, Any]], logits: torch.Tensor, num_logprobs: int | None, with_probabilities: bool
) -> Sampled:
    def stack(parts: list[torch.Tensor], *shape: int) -> torch.Tensor:
        return torch.stack(parts) if parts else torch.empty(0, *shape, device=logits.device)

    device = logits.device
    tokens = torch.tensor([row["token"] for row in rows], dtype=torch.int64, device=device)
    is_valid = torch.tensor([row["is_valid"] for row in rows], dtype=torch.bool, device=device)
    has_logprobs = num_logprobs is not None
    return Sampled(
        tokens, is_valid,
        stack([row["logprob"] for row in rows]) if has_logprobs else None,
        stack([row["top"][0] for row in rows], num_logprobs or 0).long() if has_logprobs else None,
        stack([row["top"][1] for row in rows], num_logprobs or 0) if has_logprobs else None,
        stack([row["probabilities"] for row in rows], logits.shape[1]) if with_probabilities else None)
