"""The default mode's rule: greedy answers agree whatever the batch, but where the two best scores nearly tie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llm.engine import Engine
from llm.near_ties import NEAR_TIE, near_ties
from llm.request import Output, Request, SamplingParams
from llm.sampling import Draw, sample

Run = Callable[[Engine], dict[str, list[Output]]]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_rule_is_relative_to_the_best_and_absolute_below_one() -> None:
    margin = NEAR_TIE[torch.float32]
    scores = torch.tensor(
        [
            [50.0, 50.0 - 40 * margin, 0.0],
            [50.0, 50.0 - 60 * margin, 0.0],
            [0.1, 0.1 - 0.5 * margin, -9.0],
            [0.1, 0.1 - 2.0 * margin, -9.0],
            [-50.0, -50.0 - 40 * margin, -90.0],
            [3.0, float("-inf"), float("-inf")],
        ]
    )
    assert near_ties(scores, torch.float32).tolist() == [True, False, True, False, True, False]


def test_what_counts_is_what_is_compared() -> None:
    logits = torch.tensor([[5.0, 5.0, 1.0, -2.0]])

    def count(**changes: Any) -> tuple[int, int]:
        draw = {name: changes.pop(name) for name in ("allowed", "output_token_ids") if name in changes}
        params = SamplingParams(**{"temperature": 0, **changes})
        drawn = sample(logits, [Draw(params, 0, 0, **draw)], near_ties_of=torch.float32)
        drawn.read()
        return drawn.num_greedy, drawn.num_near_ties

    assert count() == (1, 1)
    assert count(temperature=0.5) == (0, 0)
    assert count(logit_bias={1: 1.0}) == (1, 0)
    assert count(logit_bias={2: 4.0, 0: -9.0}) == (1, 1)
    # a grammar that leaves one of the two
    assert count(allowed=bytes([0b1101])) == (1, 0)
    assert count(presence_penalty=0.5, output_token_ids=(0,)) == (1, 0)


def test_only_greedy_rows_are_counted() -> None:
    logits = torch.tensor([[5.0, 5.0, 1.0], [5.0, 4.0, 1.0], [5.0, 5.0, 1.0]])
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0), SamplingParams()]
    drawn = sample(logits, [Draw(item, 0, 0) for item in params], near_ties_of=torch.float32)
    drawn.read()
    assert (drawn.num_greedy, drawn.num_near_ties) == (2, 1)
    assert sample(logits, [Draw(item, 0, 0) for item in params]).num_greedy == 0


@pytest.mark.parametrize("has_twins", [False, True])
def test_answers_agree_up_to_the_first_near_tie(
    has_twins: bool, tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine], run_all: Run
) -> None:
    model: Any = tiny_model()
    if has_twins:
        # every even token has an odd one that is as likely but for rounding
        with torch.no_grad():
            model.lm_head.weight[1:257:2] = model.lm_head.weight[0:256:2] * (1 + 1e-7)
    prompts = {f"r{number}": tuple((number * 29 + index * 7) % 250 for index in range(23)) for number in range(6)}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = make_engine(model, max_step_tokens=40)
    for name, prompt in prompts.items():
        together.add_request(Request(name, prompt, params))
    answers = run_all(together)
    for name, prompt in prompts.items():
        alone = make_engine(model)
        alone.add_request(Request(name, prompt, params))
        first_near_tie = 0
        tokens: list[int] = []
        while alone.has_work:
            alone.launch()
            for output in alone.collect():
                tokens += output.token_ids
            first_near_tie = first_near_tie or (len(tokens) if alone.num_near_ties else 0)
        assert alone.num_greedy == 16
        agreed = (first_near_tie or 17) - 1
        assert tokens[:agreed] == tokens_of(answers[name])[:agreed]
    assert together.num_greedy == 6 * 16
    # the few tokens behind the bytes have no twin
    assert (together.num_near_ties > 5 * 16) if has_twins else (together.num_near_ties <= 2)
