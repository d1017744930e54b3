"""Greedy answers equal transformers' `generate`, token for token, alone and in any mix."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from llm.engine import Engine
from llm.errors import RequestRefused, UnsupportedModel
from llm.model_runner import plan_kv_tokens
from llm.request import Output, Request, SamplingParams

Run = Callable[[Engine], dict[str, list[Output]]]
ARCHITECTURES = ("Llama", "Qwen3", "Mistral", "Gemma3Text", "Phi3")


def prompts(count: int, seed: int, longest: int = 60) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def expected(model: PreTrainedModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)  # type: ignore[operator]
    tokens = [int(token) for token in answer[0, len(prompt) :]]
    # the engine's text and tokens leave the end out
    return tokens[:-1] if tokens[-1] == 256 else tokens


def token_ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy(num_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_batches_equal_generate(
    architecture: str, tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine], run_all: Run
) -> None:
    reference = tiny_model(architecture)
    wanted = {f"r{i}": (prompt, expected(reference, prompt, 24)) for i, prompt in enumerate(prompts(6, seed=1))}
    # chunks of 17 tokens cut every longer prompt; only three run at once, so that requests join and leave
    engine = make_engine(tiny_model(architecture), max_sequences=3, max_step_tokens=17)
    for name, (prompt, _) in wanted.items():
        engine.add_request(Request(name, prompt, greedy()))
    answers = run_all(engine)
    for name, (_, tokens) in wanted.items():
        assert token_ids(answers[name]) == tokens, name
        assert answers[name][-1].finish_reason == ("length" if len(tokens) == 24 else "stop")


def test_requests_join_while_others_run(
    tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine]
) -> None:
    reference, engine = tiny_model(), make_engine()
    first, second = prompts(2, seed=5)
    engine.add_request(Request("a", first, greedy()))
    outputs: dict[str, list[Output]] = {"a": [], "b": []}
    for step in range(60):
        if step == 7:
            engine.add_request(Request("b", second, greedy()))
        engine.launch()
        for output in engine.collect():
            outputs[output.request_id].append(output)
    assert token_ids(outputs["a"]) == expected(reference, first, 24)
    assert token_ids(outputs["b"]) == expected(reference, second, 24)
    assert not engine.has_work


def test_shared_beginning_is_copied_and_the_answer_stays(
    tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine], run_all: Run
) -> None:
    reference, engine = tiny_model(), make_engine(max_step_tokens=16)
    shared = tuple(range(50, 120))
    endings = prompts(3, seed=11, longest=9)
    for index, ending in enumerate(endings):
        engine.add_request(Request(f"r{index}", shared + ending, greedy()))
    computed = 0
    answers: dict[str, list[Output]] = {}
    while engine.has_work:
        before = {id(s): s.num_computed for s in engine.scheduler.running}
        engine.launch()
        computed += sum(s.num_computed - before.get(id(s), len(shared)) for s in engine.scheduler.running)
        for output in engine.collect():
            answers.setdefault(output.request_id, []).append(output)
    for index, ending in enumerate(endings):
        assert token_ids(answers[f"r{index}"]) == expected(reference, shared + ending, 24)
    # the 70 shared tokens were computed once, not three times
    assert computed < len(shared) + sum(map(len, endings)) + 3 * 24


def test_several_answers_differ_and_the_first_is_that_of_one(make_engine: Callable[..., Engine], run_all: Run) -> None:
    prompt = prompts(1, seed=3)[0]
    engine = make_engine()
    engine.add_request(Request("one", prompt, SamplingParams(seed=5, max_tokens=12, temperature=2)))
    engine.add_request(Request("many", prompt, SamplingParams(seed=5, max_tokens=12, temperature=2, n=3)))
    answers = {name: token_ids(outputs) for name, outputs in run_all(engine).items()}
    assert answers["many"] == answers["one"]
    assert len({tuple(answers[name]) for name in ("many", "many/1", "many/2")}) == 3


def test_abort_frees_places_at_once(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    for name, prompt in zip("abc", prompts(3, seed=2), strict=True):
        engine.add_request(Request(name, prompt, greedy(40)))
    engine.launch()
    assert engine.scheduler.kv_cache.num_used_tokens > 0
    # one while its step is on its way, one between steps
    assert engine.abort("a")
    engine.collect()
    assert engine.abort("b")
    assert engine.num_running == 1
    assert not engine.abort("b")
    answers = run_all(engine)
    assert set(answers) == {"c"}
    engine.check_idle()


def test_admission_waits_for_room_and_keeps_order(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(kv_tokens=64)
    finished = []
    for index in range(5):
        engine.add_request(Request(f"r{index}", (1, 2, 3), greedy(30), priority=-1 if index == 4 else 0))
    while engine.has_work:
        engine.launch()
        assert engine.num_running <= 1
        finished += [output.request_id for output in engine.collect() if output.finish_reason]
    assert finished == ["r4", "r0", "r1", "r2", "r3"]


def test_prompt_over_the_context_is_refused_with_both_numbers(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=r"context is 256 tokens; the prompt has 300"):
        engine.add_request(Request("a", (1,) * 300, SamplingParams()))
    with pytest.raises(RequestRefused, match=r"context is 256 tokens; the prompt has 200 and max_tokens is 57"):
        engine.add_request(Request("a", (1,) * 200, SamplingParams(max_tokens=57)))
    small = make_engine(kv_tokens=100)
    with pytest.raises(RequestRefused, match="holds 100 tokens"):
        small.add_request(Request("a", (1,) * 60, SamplingParams(max_tokens=41)))
    assert not engine.has_work
    assert not small.has_work


def test_models_that_would_be_wrong_are_refused(
    tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(UnsupportedModel, match="softcap"):
        make_engine(tiny_model("Gemma2", attn_logit_softcapping=5.0))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        make_engine(tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))


def test_the_pool_is_planned_from_memory(tiny_model: Callable[..., PreTrainedModel]) -> None:
    # 2 layers x (keys and values) x 2 heads x 8 wide x 4 bytes = 256 bytes a token
    assert plan_kv_tokens(tiny_model(), 256_000) == 1000
    # 32 contexts of 256 are more than enough
    assert plan_kv_tokens(tiny_model(), 10**9) == 32 * 256
    assert plan_kv_tokens(tiny_model(), 0) == 1
