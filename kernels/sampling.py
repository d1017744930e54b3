"""One token for each row of logits: adjusted, cut off and drawn, the whole batch at once.

Order: repetition penalty (CTRL, arXiv 1909.05858), presence and frequency penalty, bias, mask, temperature, top-k,
top-p (arXiv 1904.09751), min-p (arXiv 2407.01082), draw. Each cut keeps the scores at or above a threshold, so equal
scores stay or go together; top-p is the smallest set whose mass, among what top-k left, reaches it.
Thresholds are found by counting over the bits of fp32, without a sort. Draws are `philox`'s: one program owns a row and
sums in a fixed order, so a row's token depends on the row alone. Sums are fp32.
"""

from dataclasses import dataclass

import torch

from kernels.dispatch import tl, triton, uses_triton
from kernels.philox import STREAM_SAMPLE, race_of_block
from kernels.sampling_params import Sampled, SamplingContext, SamplingParams, check_params, validate
from kernels.sampling_torch import sample_torch


@dataclass(frozen=True)
class SampleConfig:
    """Hold the tokens a step and the warps of each kernel; which are right is known by nobody before a sweep."""

    block: int = 4096
    adjust_warps: int = 8
    choose_warps: int = 16


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    context: SamplingContext | None = None,
    *,
    num_logprobs: int | None = None,
    with_probabilities: bool = False,
) -> Sampled:
    """Draw a token for each row.

    logits: `[B, V]` fp16, bf16 or fp32, last stride 1. num_logprobs: alternatives beside each token, 0 to 32; None for
    no logprobs at all. with_probabilities: give the distribution too, which `spec_accept` needs.
    An invalid row has token 0 and no probabilities (zeros). Values of params are read on a CPU alone; for a card
    `check_params` does that. Raises ValueError for shapes, types or devices, or (on CPU) values that do not fit.
    """
    context = context or SamplingContext()
    validate(logits, params, context, num_logprobs)
    if logits.device.type == "cpu":
        check_params(params)
    run = sample_triton if uses_triton(logits) else sample_torch
    return run(logits.detach(), params, context, num_logprobs=num_logprobs, with_probabilities=with_probabilities)


@triton.jit
def _adjust_kernel(
    logits, scores, block_max, block_sum, block_bad, temperature, repetition, presence, frequency,
    prompt_counts, output_counts, bias, allowed, stride_l, stride_p, stride_o, stride_b, stride_a, vocab, num_blocks,
    HAS_REPETITION: tl.constexpr, HAS_PRESENCE: tl.constexpr, HAS_FREQUENCY: tl.constexpr, HAS_PROMPT: tl.constexpr,
    HAS_OUTPUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab
    raw = tl.load(logits + row * stride_l + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    largest = tl.max(raw, 0)
    is_bad = is_token & ((raw != raw) | (tl.abs(raw) == float("inf")))
    partial = row * num_blocks + block
    tl.store(block_bad + partial, tl.max(is_bad.to(tl.int32), 0))
    tl.store(block_max + partial, largest)
    tl.store(block_sum + partial, tl.sum(tl.where(is_token, tl.exp(raw - largest), 0.0), 0))
    score = raw
    if HAS_OUTPUT:
        output = tl.load(output_counts + row * stride_o + tokens, mask=is_token, other=0)
    if HAS_REPETITION:
        seen = tokens < 0
        if HAS_PROMPT:
            seen = seen | (tl.load(prompt_counts + row * stride_p + tokens, mask=is_token, other=0) > 0)
        if HAS_OUTPUT:
            seen = seen | (output > 0)
        factor = tl.load(repetition + row)
        score = tl.where(seen, tl.where(score > 0, tl.div_rn(score, factor + score * 0.0), score * factor), score)
    if HAS_OUTPUT:
        if HAS_PRESENCE:
            score = tl.where(output > 0, score - tl.load(presence + row), score)
        if HAS_FREQUENCY:
            score = score - tl.load(frequency + row) * output.to(tl.float32)
    if HAS_BIAS:
        score += tl.load(bias + row * stride_b + tokens, mask=is_token, other=0.0)
    if HAS_ALLOWED:
        bits = tl.load(allowed + row * stride_a + tokens // 32, mask=is_token, other=0)
        score = tl.where(((bits >> (tokens % 32)) & 1) != 0, score, float("-inf"))
    degree = tl.load(temperature + row)
    score = tl.div_rn(score, tl.where(degree == 0.0, 1.0, degree) + tl.zeros([BLOCK], dtype=tl.float32))
    # without the sign of zero, so that equal scores have equal bits
    tl.store(scores + row * vocab + tokens, score + 0.0, mask=is_token)


@triton.jit
def _key(x):
    """Map fp32 to int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _threshold(scores, vocab, floor, top, shift, goal, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """Return the highest key at or above which `goal` tokens lie, or `goal` of exp(score - shift): floor..top.

    Each pass over the row tries three keys and keeps a quarter of the range: sixteen passes at most.
    """
    low = floor.to(tl.int64)
    high = top.to(tl.int64)
    # invariant: enough lies at or above low, not enough above high
    while low < high:
        step = (high - low + 3) // 4
        key1 = low + step
        key2 = tl.minimum(key1 + step, high)
        key3 = tl.minimum(key2 + step, high)
        above1 = tl.zeros([BLOCK], dtype=tl.float32)
        above2 = tl.zeros([BLOCK], dtype=tl.float32)
        above3 = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            score = tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf"))
            keys = _key(score)
            weight = tl.where(tokens < vocab, tl.exp(score - shift) if BY_MASS else 1.0, 0.0)
            above1 += tl.where(keys >= key1, weight, 0.0)
            above2 += tl.where(keys >= key2, weight, 0.0)
            above3 += tl.where(keys >= key3, weight, 0.0)
        enough1 = tl.sum(above1, 0) >= goal
        enough2 = tl.sum(above2, 0) >= goal
        enough3 = tl.sum(above3, 0) >= goal
        high = tl.where(enough3, high, tl.where(enough2, key3 - 1, tl.where(enough1, key2 - 1, key1 - 1)))
        low = tl.where(enough3, key3, tl.where(enough2, key2, tl.where(enough1, key1, low)))
        high = tl.maximum(high, low)
    return low.to(tl.int32)


@triton.jit
def _choose_kernel(
    logits, scores, block_max, block_sum, block_bad, temperature, seeds, positions, top_k, top_p, min_p,
    token_ids, is_valid, logprobs, top_token_ids, top_logprobs, probabilities,
    stride_l, vocab, num_blocks, num_top,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_LOGPROBS: tl.constexpr,
    HAS_PROBABILITIES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTIALS: tl.constexpr, STREAM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_scores = scores + row * vocab
    offs = tl.arange(0, BLOCK_PARTIALS)
    is_partial = offs < num_blocks
    bad = tl.max(tl.load(block_bad + row * num_blocks + offs, mask=is_partial, other=0), 0)
    best_score = float("-inf")
    smallest = float("inf")
    best_token = 0
    for start in tl.range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        score = tl.load(row_scores + tokens, mask=tokens < vocab, other=float("-inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where((score == top) & (tokens < vocab), tokens, 2147483647), 0)
        best_token = tl.where(top > best_score, first, best_token)
        best_score = tl.maximum(best_score, top)
        smallest = tl.minimum(smallest, tl.min(tl.where(score > float("-inf"), score, float("inf")), 0))
    valid = (bad == 0) & (best_score > float("-inf")) & (best_score < float("inf"))
    tl.store(is_valid + row, valid.to(tl.int8))
    degree = tl.load(temperature + row)
    chosen = best_token
    floor = _key(smallest)
    top_key = _key(best_score)
    is_drawn = valid & (degree > 0.0)
    if is_drawn:
        if HAS_TOP_K:
            k = tl.load(top_k + row)
            if k < vocab:
                floor = _threshold(row_scores, vocab, floor, top_key, best_score, k.to(tl.float32), BLOCK, False)
        if HAS_TOP_P:
            p = tl.load(top_p + row)
            if p < 1.0:
                mass = tl.zeros([BLOCK], dtype=tl.float32)
                for start in tl.range(0, vocab, BLOCK):
                    tokens = start + tl.arange(0, BLOCK)
                    score = tl.load(row_scores + tokens, mask=tokens < vocab, other=float("-inf"))
                    kept = (tokens < vocab) & (_key(score) >= floor)
                    mass += tl.where(kept, tl.exp(score - best_score), 0.0)
                floor = _threshold(row_scores, vocab, floor, top_key, best_score, p * tl.sum(mass, 0), BLOCK, True)
        if HAS_MIN_P:
            least = tl.load(min_p + row)
            if least > 0.0:
                floor = tl.minimum(tl.maximum(floor, _key(best_score + tl.log(least))), top_key)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        best_race = float("-inf")
        for start in tl.range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            score = tl.load(row_scores + tokens, mask=tokens < vocab, other=float("-inf"))
            kept = (tokens < vocab) & (_key(score) >= floor)
            if tl.max(kept.to(tl.int32), 0) > 0:
                raced = tl.where(kept, score - race_of_block(seed, position, start, STREAM, BLOCK), float("-inf"))
                top = tl.max(raced, 0)
                first = tl.min(tl.where((raced == top) & kept, tokens, 2147483647), 0)
                chosen = tl.where(top > best_race, first, chosen)
                best_race = tl.maximum(best_race, top)
    chosen = tl.where(valid, chosen, 0)
    tl.store(token_ids + row, chosen.to(tl.int64))
    if HAS_LOGPROBS:
        largest = tl.load(block_max + row * num_blocks + offs, mask=is_partial, other=float("-inf"))
        sums = tl.load(block_sum + row * num_blocks + offs, mask=is_partial, other=0.0)
        raw_max = tl.max(largest, 0)
        lse = raw_max + tl.log(tl.sum(tl.where(is_partial, sums * tl.exp(largest - raw_max), 0.0), 0))
        raw = logits + row * stride_l
        tl.store(logprobs + row, tl.load(raw + chosen).to(tl.float32) - lse)
        last_value = float("inf")
        last_token = -1
        for i in tl.range(0, num_top):
            value = float("-inf")
            token = 0
            for start in tl.range(0, vocab, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                x = tl.load(raw + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
                # what comes after the last one: lower, or equal with a higher id
                x = tl.where((x < last_value) | ((x == last_value) & (tokens > last_token)), x, float("-inf"))
                top = tl.max(x, 0)
                first = tl.min(tl.where((x == top) & (tokens < vocab), tokens, 2147483647), 0)
                token = tl.where(top > value, first, token)
                value = tl.maximum(value, top)
            tl.store(top_token_ids + row * num_top + i, tl.where(valid, token, 0).to(tl.int64))
            tl.store(top_logprobs + row * num_top + i, value - lse)
            last_value = value
            last_token = token
    if HAS_PROBABILITIES:
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        # a greedy row is certain of its token, an invalid one has none
        floor = tl.where(is_drawn, floor, 2147483647)
        only = tl.where(valid, tl.where(degree > 0.0, -1, chosen), -1)
        for start in tl.range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            score = tl.load(row_scores + tokens, mask=tokens < vocab, other=float("-inf"))
            kept = (tokens < vocab) & ((_key(score) >= floor) | (tokens == only))
            mass += tl.where(kept, tl.exp(score - best_score), 0.0)
        total = tl.sum(mass, 0)
        for start in tl.range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            score = tl.load(row_scores + tokens, mask=tokens < vocab, other=float("-inf"))
            kept = (tokens < vocab) & ((_key(score) >= floor) | (tokens == only))
            weight = tl.where(kept, tl.exp(score - best_score) / total, 0.0)
            tl.store(probabilities + row * vocab + tokens, weight, mask=tokens < vocab)


def sample_triton(
    logits: torch.Tensor,
    params: SamplingParams,
    context: SamplingContext,
    *,
    num_logprobs: int | None,
    with_probabilities: bool,
    config: SampleConfig | None = None,
) -> Sampled:
    """Launch on validated arguments: one kernel adjusts every block of every row, one cuts off and draws each row."""
    batch, vocab = logits.shape
    device = logits.device
    config = config or SampleConfig()
    block = config.block
    num_blocks = triton.cdiv(vocab, block)
    scores = torch.empty(batch, vocab, dtype=torch.float32, device=device)
    block_max, block_sum = (torch.empty(batch, num_blocks, dtype=torch.float32, device=device) for _ in range(2))
    block_bad = torch.empty(batch, num_blocks, dtype=torch.int32, device=device)
    token_ids = torch.empty(batch, dtype=torch.int64, device=device)
    is_valid = torch.empty(batch, dtype=torch.int8, device=device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=device)
    num_top = num_logprobs or 0
    top_ids = torch.empty(batch, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(batch, num_top, dtype=torch.float32, device=device)
    probabilities = torch.empty(batch, vocab, dtype=torch.float32, device=device) if with_probabilities else scores
    if batch:
        p, c = params, context
        given = [scores if x is None else x for x in (
            p.repetition_penalty, p.presence_penalty, p.frequency_penalty, c.prompt_counts, c.output_counts, c.bias,
            c.allowed)]
        _adjust_kernel[(num_blocks, batch)](
            logits, scores, block_max, block_sum, block_bad, p.temperature, *given, logits.stride(0),
            *(x.stride(0) for x in given[3:]), vocab, num_blocks,
            HAS_REPETITION=p.repetition_penalty is not None, HAS_PRESENCE=p.presence_penalty is not None,
            HAS_FREQUENCY=p.frequency_penalty is not None, HAS_PROMPT=c.prompt_counts is not None,
            HAS_OUTPUT=c.output_counts is not None, HAS_BIAS=c.bias is not None, HAS_ALLOWED=c.allowed is not None,
            BLOCK=block, num_warps=config.adjust_warps)
        cuts = [scores if x is None else x for x in (p.top_k, p.top_p, p.min_p)]
        _choose_kernel[(batch,)](
            logits, scores, block_max, block_sum, block_bad, p.temperature, p.seeds, p.positions, *cuts,
            token_ids, is_valid, logprobs, top_ids, top_logprobs, probabilities, logits.stride(0), vocab, num_blocks,
            num_top, HAS_TOP_K=p.top_k is not None, HAS_TOP_P=p.top_p is not None, HAS_MIN_P=p.min_p is not None,
            HAS_LOGPROBS=num_logprobs is not None, HAS_PROBABILITIES=with_probabilities, BLOCK=block,
            BLOCK_PARTIALS=triton.next_power_of_2(num_blocks), STREAM=STREAM_SAMPLE, num_warps=config.choose_warps,
            maxnreg=128)
    has_logprobs = num_logprobs is not None
    return Sampled(token_ids, is_valid.bool(), logprobs if has_logprobs else None, top_ids if has_logprobs else None,
                   top_logprobs if has_logprobs else None, probabilities if with_probabilities else None)
