import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.philox import STREAM_SAMPLE, philox, race_all, uniform
from kernels.sampling import sample
from kernels.sampling_params import Sampled, SamplingContext, SamplingParams, check_params, count_tokens
from kernels.sampling_torch import HEAD, sample_reference


def params(batch: int, **given: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seeds": 7, "positions": 0, **given}
    types = {"seeds": torch.int64, "positions": torch.int64, "top_k": torch.int32}
    return SamplingParams(**{name: torch.as_tensor(value, dtype=types.get(name, torch.float32)).expand(batch).clone()
                             for name, value in values.items()})


def least_chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of Pearson's test (Wilson and Hilferty's normal form), tokens below five expected as one."""
    expected = probabilities.double() * counts.sum()
    is_rare = expected < 5
    groups = [(counts[~is_rare].double(), expected[~is_rare])]
    if bool(is_rare.any()) and float(expected[is_rare].sum()) > 0:
        groups.append((counts[is_rare].sum()[None].double(), expected[is_rare].sum()[None]))
    seen, due = (torch.cat(parts) for parts in zip(*groups, strict=True))
    freedom = len(due) - 1
    statistic = float(((seen - due) ** 2 / due).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


# Random123's known answers for philox4x32 with ten rounds: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    words = philox(key[0] | key[1] << 32, counter[1] | counter[2] << 32, torch.tensor([counter[0]]), counter[3])
    assert words[0].tolist() == list(result)


def test_uniforms_and_exponentials_have_their_moments() -> None:
    tokens = torch.arange(200_000)
    u = uniform(5, 1, tokens, STREAM_SAMPLE).double()
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / 2e5) ** 0.5
    exponential = race_all(5, 1, 200_000, STREAM_SAMPLE, torch.device("cpu")).double().exp()
    assert abs(float(exponential.mean()) - 1) < 5 * 2e5**-0.5
    assert abs(float(exponential.var()) - 1) < 5 * (8 / 2e5) ** 0.5
    torch.testing.assert_close(exponential, -torch.log1p(-u), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("cuts", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2},
                                  {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}], ids=str)
def test_draws_are_distributed_as_they_should(cuts: dict[str, Any]) -> None:
    draws, vocab = 3000, 12
    logits = torch.randn(vocab) * 1.5
    p = params(draws, positions=torch.arange(draws), seeds=123, **cuts)
    tokens = sample(logits.expand(draws, -1), p).token_ids
    exact = sample_reference(logits[None], params(1, **cuts), SamplingContext(), with_probabilities=True)
    assert exact.probabilities is not None
    counts = torch.bincount(tokens, minlength=vocab)
    assert not counts[exact.probabilities[0] == 0].any()
    assert least_chi_square_p(counts, exact.probabilities[0]) > 1e-4


def test_the_statistic_sees_a_wrong_distribution() -> None:
    draws, logits = 4000, torch.randn(12) * 1.5
    tokens = sample(logits.expand(draws, -1), params(draws, positions=torch.arange(draws))).token_ids
    assert least_chi_square_p(torch.bincount(tokens, minlength=12), torch.softmax(logits / 1.2, 0)) < 1e-6


def test_seeds_draw_apart_from_each_other() -> None:
    draws, logits = 4000, torch.randn(12)
    tokens = sample(logits.expand(draws, -1), params(draws, seeds=torch.arange(draws) * 2**33 - 2**40)).token_ids
    assert least_chi_square_p(torch.bincount(tokens, minlength=12), torch.softmax(logits, 0)) > 1e-4


@pytest.mark.parametrize(("cut", "processor"), [
    ({"temperature": 0.7}, lambda: TemperatureLogitsWarper(0.7)), ({"top_k": 9}, lambda: TopKLogitsWarper(9)),
    ({"top_p": 0.8}, lambda: TopPLogitsWarper(0.8)), ({"top_p": 0.999}, lambda: TopPLogitsWarper(0.999)),
    ({"min_p": 0.1}, lambda: MinPLogitsWarper(0.1))], ids=["temperature", "top_k", "top_p", "top_p near 1", "min_p"])
@pytest.mark.parametrize("vocab", [1, 63, 128, 1000, 4 * HEAD])
def test_distributions_equal_transformers(
    vocab: int, cut: dict[str, Any], processor: Callable[[], LogitsProcessor]
) -> None:
    logits = torch.randn(2, vocab) * 2
    got = sample(logits, params(2, **cut), with_probabilities=True).probabilities
    assert got is not None
    processed: Any = processor()(torch.zeros(2, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(got, torch.softmax(processed, -1), atol=1e-6, rtol=1e-4)


def test_penalties_equal_transformers_and_openais_formula() -> None:
    logits, ids = torch.randn(2, 50) * 3, torch.randint(0, 50, (2, 20))
    counts = count_tokens(ids, torch.tensor([20, 12]), 50)
    assert counts.sum(1).tolist() == [20, 12] and int(counts[0, ids[0, 3]]) == int((ids[0] == ids[0, 3]).sum())
    counts = count_tokens(ids, torch.tensor([20, 20]), 50)
    p = params(2, repetition_penalty=1.4)
    want: Any = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())
    for context in (SamplingContext(prompt_counts=counts), SamplingContext(output_counts=counts)):
        got = sample(logits, p, context, with_probabilities=True).probabilities
        torch.testing.assert_close(got, torch.softmax(want, -1))
    p = params(2, presence_penalty=0.6, frequency_penalty=0.3)
    context = SamplingContext(prompt_counts=torch.ones_like(counts), output_counts=counts)
    got = sample(logits, p, context, with_probabilities=True).probabilities
    torch.testing.assert_close(got, torch.softmax(logits - 0.6 * (counts > 0) - 0.3 * counts, -1))


def test_bias_and_mask_hold() -> None:
    logits, bias = torch.zeros(2, 70), torch.zeros(2, 70)
    bias[0, 69], bias[1, 5] = 100, float("-inf")
    allowed = torch.zeros(2, 3, dtype=torch.int32)
    allowed[0], allowed[1, 0] = -1, 0b100011 | -(2**31)
    got = sample(logits, params(2, temperature=[0.0, 1.0]), SamplingContext(bias=bias, allowed=allowed),
                 with_probabilities=True)
    assert got.token_ids[0] == 69 and got.probabilities is not None
    assert got.probabilities[1].nonzero().flatten().tolist() == [0, 1, 31]


def test_greedy_takes_the_first_of_the_best_and_logprobs_are_the_models() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 2.0]])
    got = sample(logits, params(1, temperature=0.0, top_k=1), num_logprobs=4, with_probabilities=True)
    want = torch.log_softmax(logits, -1)[0]
    assert got.token_ids.tolist() == [1] and got.top_token_ids is not None and got.top_logprobs is not None
    assert got.top_token_ids.tolist() == [[1, 3, 2, 4]]
    torch.testing.assert_close(got.top_logprobs[0], want[[1, 3, 2, 4]])
    torch.testing.assert_close(got.logprobs, want[1:2])
    assert got.probabilities is not None and got.probabilities.tolist() == [[0, 1, 0, 0, 0]]


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(6, 3 * HEAD)
    p = params(6, seeds=torch.arange(6), top_p=[0.5, 1.0, 0.9, 0.7, 0.999, 1.0],
               temperature=[1.0, 0.0, 2.0, 0.5, 9.0, 1.0])
    both = sample(logits, p, num_logprobs=2, with_probabilities=True)
    for row in range(6):
        alone = SamplingParams(**{n: x[row : row + 1] for n, x in vars(p).items() if x is not None})
        one = sample(logits[row : row + 1], alone, num_logprobs=2, with_probabilities=True)
        assert all(torch.equal(getattr(one, name)[0], getattr(both, name)[row]) for name in vars(one))


def test_rows_that_cannot_be_drawn_are_said_so() -> None:
    logits = torch.randn(4, 10)
    logits[0, 0], logits[1, 0] = float("nan"), float("inf")
    bias = torch.zeros(4, 10)
    bias[2] = float("-inf")
    for temperature in (0.0, 1.0):
        got = sample(logits, params(4, temperature=temperature, top_p=0.9), SamplingContext(bias=bias), num_logprobs=1,
                     with_probabilities=True)
        assert got.is_valid.tolist() == [False, False, False, True]
        assert got.probabilities is not None and not got.probabilities[:3].any()


def test_an_empty_batch() -> None:
    got: Sampled = sample(torch.empty(0, 10), params(0), num_logprobs=2, with_probabilities=True)
    assert got.top_token_ids is not None and got.top_token_ids.shape == (0, 2)
    assert got.probabilities is not None and got.probabilities.shape == (0, 10)


@pytest.mark.parametrize(("change", "rule"), [
    ({"logits": torch.randn(5)}, r"sample: logits must be \[B, V\] with V in 1..16777215, got \[5\]"),
    ({"logits": torch.randn(2, 5).double()}, "sample: logits must be fp16, bf16 or fp32, got torch.float64"),
    ({"logits": torch.randn(5, 2).t()}, r"sample: logits' last stride must be 1, got \(1, 2\)"),
    ({"params": params(3)}, r"sample: temperature must be \[2\] torch.float32, got \(\[3\], torch.float32\)"),
    ({"params": params(2, repetition_penalty=1.1)}, "sample: repetition_penalty must come with counts, got none"),
    ({"params": params(2, presence_penalty=1.1)}, "frequency_penalty must come with output_counts, got none"),
    ({"context": SamplingContext(bias=torch.zeros(2, 4))}, r"sample: bias must be \[2, 5\] torch.float32, got"),
    ({"context": SamplingContext(allowed=torch.zeros(2, 1))}, r"sample: allowed must be \[2, 1\] torch.int32, got"),
    ({"num_logprobs": 6}, "sample: num_logprobs must be in 0..5 or None, got 6"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        sample(**{"logits": torch.randn(2, 5), "params": params(2), **change})


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("temperature", -0.5, "at least 0"), ("top_k", 0, "at least 1"), ("top_p", 0.0, "above 0, at most 1"),
    ("top_p", 1.5, "above 0, at most 1"), ("min_p", 1.0, "0 to below 1"), ("repetition_penalty", 0.0, "above 0"),
    ("presence_penalty", float("nan"), "finite")])
def test_bad_values_are_named_when_checked(name: str, value: float, rule: str) -> None:
    check_params(params(2, top_k=5, top_p=0.5))
    with pytest.raises(ValueError, match=rf"sample: {name} must be {rule}.*, got \["):
        check_params(params(2, **{name: value}))


def test_bad_counts_are_named() -> None:
    with pytest.raises(ValueError, match=r"count_tokens: token_ids must be \[B, L\] and lengths \[B\], got"):
        count_tokens(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3), 10)
