import dataclasses
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dispatch import triton
from kernels.philox import philox, philox_words, race_all, race_of_block
from kernels.sampling import SampleConfig, sample_triton
from kernels.sampling_params import Sampled, SamplingContext, SamplingParams
from kernels.sampling_torch import sample_reference


def params(batch: int, **given: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seeds": 7, "positions": 0, **given}
    types = {"seeds": torch.int64, "positions": torch.int64, "top_k": torch.int32}
    return SamplingParams(**{name: torch.as_tensor(value, dtype=types.get(name, torch.float32)).expand(batch).clone()
                             for name, value in values.items()})


def compare(logits: torch.Tensor, p: SamplingParams, context: SamplingContext | None = None, **options: Any) -> Sampled:
    context = context or SamplingContext()
    got = sample_triton(logits, p, context, num_logprobs=min(3, logits.shape[1]), with_probabilities=True, **options)
    want = sample_reference(logits, p, context, num_logprobs=min(3, logits.shape[1]), with_probabilities=True)
    for field in dataclasses.fields(Sampled):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        # sums of exponentials in fp32
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5, check_dtype=False, equal_nan=True,
                                   msg=f"{field.name}: {mine}, the reference {theirs}")
    return got


@triton.jit  # type: ignore[untyped-decorator]
def _words_kernel(words, races, seed, position, stream, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox_words(tl.load(seed), tl.load(position), offs, stream)
    tl.store(words + offs * 4, w0.to(tl.int64))
    tl.store(words + offs * 4 + 1, w1.to(tl.int64))
    tl.store(words + offs * 4 + 2, w2.to(tl.int64))
    tl.store(words + offs * 4 + 3, w3.to(tl.int64))
    races_offs = tl.arange(0, 4 * BLOCK)
    tl.store(races + races_offs, race_of_block(tl.load(seed), tl.load(position), 0, stream, 4 * BLOCK))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**40 + 5), (0x123456789ABCDEF, -3)])
def test_the_kernel_draws_what_torch_draws(seed: int, position: int) -> None:
    words, races = torch.empty(16, 4, dtype=torch.int64), torch.empty(64)
    _words_kernel[(1,)](words, races, torch.tensor([seed]), torch.tensor([position]), 2, BLOCK=16)
    assert torch.equal(words, philox(seed, position, torch.arange(16), 2))
    torch.testing.assert_close(races, race_all(seed, position, 64, 2, torch.device("cpu")), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 128, 1000])
def test_draws_what_the_reference_draws(vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(2, vocab + 5) * 4).to(dtype)[:, :vocab]
    got = compare(logits, params(2, temperature=[0.7, 0.0], seeds=[3, 4], positions=[9, 2**33]))
    assert bool(got.is_valid.all())


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 5}, {"top_k": 63}, {"top_k": 10**6}, {"top_p": 0.05},
                                 {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}],
                         ids=str)
def test_cuts(cut: dict[str, Any]) -> None:
    compare(torch.randn(2, 63) * 3, params(2, temperature=[1.3, 0.6], seeds=[1, 2], **cut))


def test_equal_scores_stay_together() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0, -0.0]])
    for cut, num_kept in (({"top_k": 2}, 4), ({"top_k": 6}, 7), ({"top_p": 0.6}, 4)):
        probabilities = compare(logits, params(1, **cut)).probabilities
        assert probabilities is not None and int(probabilities.count_nonzero()) == num_kept


def test_penalties_bias_and_mask() -> None:
    batch, vocab = 2, 100
    context = SamplingContext(
        torch.randint(0, 2, (batch, vocab), dtype=torch.int32), torch.randint(0, 4, (batch, vocab), dtype=torch.int32),
        torch.where(torch.rand(batch, vocab) < 0.2, float("-inf"), torch.randn(batch, vocab)),
        torch.randint(-(2**31), 2**31, (batch, 4)).int())
    p = params(batch, repetition_penalty=[1.3, 0.8], presence_penalty=[0.5, -1.0], frequency_penalty=[0.2, -0.3],
               top_p=0.95)
    compare(torch.randn(batch, vocab) * 3, p, context)


def test_blocks_join() -> None:
    logits = torch.randn(1, 1000) * 2
    p = params(1, seeds=5, temperature=1.7)
    got = compare(logits, p, config=SampleConfig(128))
    want = sample_triton(logits, p, SamplingContext(), num_logprobs=3, with_probabilities=True)
    assert torch.equal(got.token_ids, want.token_ids)
    compare(logits, params(1, top_k=30), config=SampleConfig(512))


def test_rows_that_cannot_be_drawn() -> None:
    logits = torch.randn(4, 40)
    logits[0, 3], logits[1, 3], logits[2, 3] = float("nan"), float("inf"), float("-inf")
    allowed = torch.full((4, 2), -1, dtype=torch.int32)
    allowed[3] = 0
    for temperature in (0.0, 1.0):
        got = sample_triton(logits, params(4, temperature=temperature, top_p=0.5), SamplingContext(allowed=allowed),
                            num_logprobs=2, with_probabilities=True)
        assert not got.is_valid.any() and not got.token_ids.any()
        assert got.probabilities is not None and not got.probabilities.any()
        assert got.top_token_ids is not None and bool((got.top_token_ids < 40).all())


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(4, 50)
    p = params(4, seeds=[1, 2, 3, 4], top_p=[0.5, 1.0, 0.9, 0.7], temperature=[1.0, 0.0, 2.0, 0.5])
    both = sample_triton(logits, p, SamplingContext(), num_logprobs=0, with_probabilities=True)
    for row in (0, 2):
        alone = SamplingParams(**{n: x[row : row + 1] for n, x in vars(p).items() if x is not None})
        one = sample_triton(logits[row : row + 1], alone, SamplingContext(), num_logprobs=0, with_probabilities=True)
        assert all(torch.equal(getattr(one, n)[0], getattr(both, n)[row])
                   for n in ("token_ids", "logprobs", "probabilities"))


@settings(max_examples=10, deadline=None)
@given(vocab=st.integers(1, 80), scale=st.floats(0.01, 30), top_k=st.integers(1, 90), top_p=st.floats(0.01, 1),
       min_p=st.floats(0, 0.99), temperature=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
       seed=st.integers(-(2**63), 2**63 - 1))
def test_any_parameters(
    vocab: int, scale: float, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed % 1000)) * scale
    compare(logits, params(1, seeds=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature))


def test_an_empty_batch() -> None:
    got = sample_triton(torch.empty(0, 10), params(0), SamplingContext(), num_logprobs=2, with_probabilities=True)
    assert got.token_ids.shape == (0,) and got.top_token_ids is not None and got.top_token_ids.shape == (0, 2)
