"""Draws: against the distribution worked out by hand, whatever the batch; bias, penalties, logprobs, ends."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from kernels.sampling import sample as kernel_sample
from kernels.sampling_params import SamplingContext
from kernels.sampling_params import SamplingParams as KernelParams
from kernels.sampling_torch import adjust
from llm.engine import Engine
from llm.errors import RequestRefused
from llm.request import Grammar, Output, Request, SamplingParams
from llm.sampling import Draw, mix, sample, typical_tokens

Run = Callable[[Engine], dict[str, list[Output]]]
LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
PROBABILITIES = torch.softmax(LOGITS.double(), 0)


def frequencies(params: SamplingParams, count: int = 4000, **changes: object) -> np.ndarray:
    rows = LOGITS.expand(count, -1)
    draws = [Draw(params, seed, position=seed % 7, **changes) for seed in range(count)]  # type: ignore[arg-type]
    counts = Counter(result[0] for result in sample(rows, draws).read() if result is not None)
    return np.array([counts[token] / count for token in range(5)])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=2), [0, 1]),
        # cumulative: 0.598, 0.819, 0.952
        (SamplingParams(top_p=0.7), [0, 1]),
        (SamplingParams(top_p=0.1), [0]),
        # at least a fifth of 0.598: 0.220 and 0.133 stay
        (SamplingParams(min_p=0.2), [0, 1, 2]),
    ],
)
def test_draws_follow_the_cut_distribution(params: SamplingParams, kept: list[int]) -> None:
    wanted = np.zeros(5)
    wanted[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    got = frequencies(params)
    # four standard deviations of 4,000 draws
    assert np.all(np.abs(got - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-9)


def test_temperature_sharpens() -> None:
    wanted = torch.softmax(LOGITS.double() / 0.5, 0).numpy()
    assert np.all(np.abs(frequencies(SamplingParams(temperature=0.5)) - wanted) < 0.03)


@pytest.mark.parametrize(("mass", "temperature"), [(0.2, 1.0), (0.5, 1.0), (0.9, 0.7), (0.95, 2.0)])
def test_typical_tokens_are_those_of_transformers(mass: float, temperature: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 500) * 3
    kept = TypicalLogitsWarper(mass)(torch.empty(0, dtype=torch.int64), rows.double() / temperature).isfinite()
    got = typical_tokens(rows.double() / temperature, torch.full((6,), mass).double())
    assert torch.equal(got, kept)
    # rows of other rules beside them; whatever is drawn is typical
    params = SamplingParams(typical_p=mass, temperature=temperature)
    for seed in range(40):
        draws = [Draw(params if row != 3 else SamplingParams(temperature=0), seed, row) for row in range(6)]
        results = sample(rows, draws).read()
        for row, result in enumerate(results):
            assert result is not None
            assert kept[row, result[0]] if row != 3 else result[0] == int(rows[3].argmax())


def test_a_typical_draw_follows_bias_and_grammar() -> None:
    # 0.607, 0.223, 0.135, 0.030, 0.004: the entropy is 1.04 nats; surprises are 0.50, 1.50, 2.00, 3.50 and 5.50
    wanted = np.zeros(5)
    wanted[:2] = PROBABILITIES[:2] / PROBABILITIES[:2].sum()
    got = frequencies(SamplingParams(typical_p=0.7))
    assert np.all(np.abs(got - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-9)
    # the second is nearest, not the likeliest
    assert frequencies(SamplingParams(typical_p=0.2))[1] == 1
    # without the first two the entropy is 0.58, and the third, 0.23, is nearest
    assert frequencies(SamplingParams(typical_p=0.3, logit_bias={1: -100.0}), allowed=bytes([0b11110]))[2] == 1


def test_adjusted_scores_are_the_kernels() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 70)
    counts = torch.randint(0, 3, (2, 4, 70), dtype=torch.int32)
    params = KernelParams(
        temperature=torch.ones(4),
        seeds=torch.zeros(4, dtype=torch.int64),
        positions=torch.zeros(4, dtype=torch.int64),
        repetition_penalty=torch.tensor([1.0, 2.0, 0.5, 1.3]),
        presence_penalty=torch.tensor([0.0, 0.5, -1.0, 2.0]),
        frequency_penalty=torch.tensor([0.3, 0.0, -0.5, 1.0]),
    )
    context = SamplingContext(counts[0], counts[1], torch.randn(4, 70), torch.randint(1, 2**31, (4, 3)).int())
    drawn = kernel_sample(logits, params, context, with_probabilities=True)
    assert drawn.probabilities is not None
    torch.testing.assert_close(torch.softmax(adjust(logits, params, context), -1), drawn.probabilities)


def test_grammar_and_forbidden_tokens_are_never_drawn() -> None:
    got = frequencies(SamplingParams(), allowed=bytes([0b11010]), forbidden=(3,))
    assert got[0] == got[2] == got[3] == 0
    assert got[1] + got[4] == 1


def test_seeds_are_mixed_by_a_published_function() -> None:
    # SplitMix64 seeded with 1234567 begins 6457827717110365317 (Rosetta Code)
    assert mix((1234567 + 0x9E3779B97F4A7C15) % 2**64) == 6457827717110365317


def test_rows_without_finite_logits_end_alone() -> None:
    rows = torch.stack([LOGITS, torch.full_like(LOGITS, float("nan")), LOGITS])
    first, broken, last = sample(rows, [Draw(SamplingParams(temperature=0), 0, 0)] * 3).read()
    assert broken is None
    assert first == last == (0, None)


def test_bias_and_penalties() -> None:
    zero = SamplingParams(temperature=0)
    biased = SamplingParams(temperature=0, logit_bias={0: -100.0, 4: 5.0})
    frequent = SamplingParams(temperature=0, frequency_penalty=0.6)
    repeated = SamplingParams(temperature=0, repetition_penalty=4.0)

    def best(params: SamplingParams, outputs: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> int:
        (result,) = sample(LOGITS[None], [Draw(params, 0, 0, outputs, prompt)]).read()
        assert result is not None
        return result[0]

    assert best(zero) == 0
    assert best(biased) == 4
    # 2.0 - 2 * 0.6 = 0.8 falls below 1.0; once is not enough
    assert best(frequent, outputs=(0,)) == 0
    assert best(frequent, outputs=(0, 0)) == 1
    # 2.0 / 4 = 0.5 falls below 1.0, also from the prompt
    assert best(repeated, prompt=(0,)) == 1


def test_logprobs_are_those_of_log_softmax() -> None:
    (result,) = sample(LOGITS[None], [Draw(SamplingParams(temperature=0, logprobs=2), 0, 0)]).read()
    assert result is not None
    logprob = result[1]
    assert logprob is not None
    wanted = PROBABILITIES.log()
    assert logprob.logprob == pytest.approx(float(wanted[0]), abs=1e-6)
    assert [token for token, _ in logprob.top] == [0, 1]
    assert logprob.top[1][1] == pytest.approx(float(wanted[1]), abs=1e-6)


def test_rows_of_one_batch_keep_their_own_rules() -> None:
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={3: 50.0}, logprobs=1),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(seed=2**64 - 1, top_p=0.01, logprobs=0),
    ]
    draws = [Draw(params, params.seed, 3, output_token_ids=(0,)) for params in mixed]
    draws.append(Draw(SamplingParams(temperature=0), 0, 0, allowed=bytes([0b10100])))
    together = sample(LOGITS.expand(6, -1), draws).read()
    assert together == [sample(LOGITS[None], [draw]).read()[0] for draw in draws]
    assert [result[0] for result in together if result] == [0, 3, 0, 1, 0, 2]
    assert [result[1] is not None for result in together if result] == [False, True, False, False, True, False]


def test_seeded_answers_do_not_depend_on_the_batch(make_engine: Callable[..., Engine], run_all: Run) -> None:
    params = SamplingParams(seed=77, max_tokens=20, temperature=1.3)
    alone = make_engine()
    alone.add_request(Request("x", (10, 20, 30), params))
    crowded = make_engine(max_step_tokens=7)
    for index in range(5):
        crowded.add_request(Request(f"o{index}", tuple(range(index + 1, 40)), SamplingParams(seed=index, max_tokens=9)))
    crowded.add_request(Request("x", (10, 20, 30), params))
    tokens = [[token for output in run_all(engine)["x"] for token in output.token_ids] for engine in (alone, crowded)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 20


def test_min_tokens_holds_the_end_off_and_usage_counts_it(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    to_the_end = {256: 100.0}
    engine.add_request(Request("soon", (1,), SamplingParams(temperature=0, logit_bias=to_the_end, max_tokens=50)))
    late = SamplingParams(temperature=0, logit_bias=to_the_end, min_tokens=5, max_tokens=50)
    engine.add_request(Request("late", (1,), late))
    ignoring = SamplingParams(temperature=0, logit_bias=to_the_end, ignore_eos=True, max_tokens=4)
    engine.add_request(Request("never", (1,), ignoring))
    last = {name: outputs[-1] for name, outputs in run_all(engine).items()}
    counts = {name: output.usage.completion_tokens for name, output in last.items() if output.usage}
    assert counts == {"soon": 1, "late": 6, "never": 4}
    assert [last[name].finish_reason for name in ("soon", "late", "never")] == ["stop", "stop", "length"]


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("pattern", ["a", "a{1,2}", "a{1,9}"])
def test_a_grammar_that_is_at_its_end_ends_before_min_tokens(
    pattern: str, logprobs: int | None, make_engine: Callable[..., Engine], run_all: Run
) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, min_tokens=5, max_tokens=20, logprobs=logprobs, logit_bias={256: 50.0})
    engine.add_request(Request("a", (1, 2, 3), params, Grammar("regex", pattern)))
    outputs = run_all(engine)["a"]
    assert outputs[-1].finish_reason == "stop"
    assert "".join(output.text for output in outputs) == "a" * {"a": 1, "a{1,2}": 2, "a{1,9}": 5}[pattern]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0), "top_p"),
        (SamplingParams(top_k=0), "top_k"),
        (SamplingParams(min_p=1), "min_p"),
        (SamplingParams(typical_p=0), "typical_p"),
        (SamplingParams(typical_p=1.1), "typical_p"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(stop=("",)), "stop"),
        (SamplingParams(logit_bias={400: 1}), "logit_bias"),
        (SamplingParams(stop_token_ids=(4, 400), min_tokens=2), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(logit_bias={4: 101}), "logit_bias"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(n=0), "n"),
        (SamplingParams(seed=2**64), "seed"),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    params: SamplingParams, param: str, make_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(RequestRefused) as refused:
        make_engine().add_request(Request("a", (1,), params))
    assert refused.value.param == param
