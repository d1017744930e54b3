"""Greedy answers equal transformers' `generate`, token for token: each family alone, mixed, cached and preempted."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from transformers import PreTrainedModel

from llm.engine import Engine
from llm.errors import RequestRefused, UnsupportedModel
from llm.kv_cache import KvCache, LayerSpec, Traffic
from llm.memory import plan_kv_tokens
from llm.model_runner import ModelRunner
from llm.request import Output, Request, SamplingParams
from llm.scheduler import SchedulerLimits

Run = Callable[[Engine], dict[str, list[Output]]]
ARCHITECTURES = (
    "Llama",
    "Qwen3",
    "Qwen3Moe",
    "Mistral",
    "Gemma2",
    "Gemma3Text",
    "Phi",
    "Phi3",
    "Glm",
    "GptOss",
    "DeepseekV3",
)


def prompts(count: int, seed: int, longest: int = 60) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def expected(model: PreTrainedModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    # of transformers' own attentions the plain one knows soft caps and sinks
    model.set_attn_implementation("eager")
    answer = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)  # type: ignore[operator]
    tokens = [int(token) for token in answer[0, len(prompt) :]]
    # the engine's text and tokens leave the end out
    return tokens[:-1] if tokens[-1] == 256 else tokens


def token_ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy(num_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


@pytest.mark.parametrize("steps_ahead", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_equal_generate_alone_mixed_cached_and_preempted(
    architecture: str,
    steps_ahead: int,
    tiny_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., Engine],
    run_all: Run,
) -> None:
    reference = tiny_model(architecture)
    shared = prompts(1, seed=9)[0][:37]
    asked = [*prompts(4, seed=1), *(shared + ending for ending in prompts(2, seed=2, longest=8))]
    wanted = [expected(reference, prompt, 24) for prompt in asked]
    # an end at the first tokens would show little
    assert sum(len(tokens) == 24 for tokens in wanted) >= 3

    # chunks of 17 tokens cut every longer prompt; only three run at once, so that requests join and leave
    roomy = make_engine(tiny_model(architecture), max_sequences=3, max_step_tokens=17, steps_ahead=steps_ahead)
    # two of the longest fill the pool
    tight = make_engine(tiny_model(architecture), kv_tokens=112, max_step_tokens=17, steps_ahead=steps_ahead)

    def ask(engine: Engine, name: str, numbers: Sequence[int]) -> dict[int, Output]:
        for number in numbers:
            engine.add_request(Request(f"{name}{number}", asked[number], greedy()))
        answers = run_all(engine)
        for number in numbers:
            outputs = answers[f"{name}{number}"]
            assert token_ids(outputs) == wanted[number], (name, number)
            assert outputs[-1].finish_reason == ("length" if len(wanted[number]) == 24 else "stop")
        return {number: answers[f"{name}{number}"][-1] for number in numbers}

    for number in (0, 4):
        ask(roomy, "alone", [number])
    assert roomy.scheduler.num_prefix_hits == 0
    ask(roomy, "mixed", range(6))
    again = ask(roomy, "again", range(6))
    for number, output in again.items():
        assert output.usage is not None
        # all full blocks but that of the last token
        assert output.usage.cached_tokens == (len(asked[number]) - 1) // 16 * 16
    assert roomy.scheduler.num_preempted == 0
    ask(tight, "tight", range(6))
    assert tight.scheduler.num_preempted > 0


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_experts_run_without_waiting_for_the_device(
    architecture: str, tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine]
) -> None:
    # transformers' plain experts read on the host which of them were chosen
    assert make_engine(tiny_model(architecture)).runner.model.config._experts_implementation == "grouped_mm"


def test_latents_are_stored_in_place_of_keys_and_values(
    tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine]
) -> None:
    cache = make_engine(tiny_model("DeepseekV3")).runner.kv_cache
    assert all(spec.is_latent and (spec.key_dim, spec.value_dim) == (32, 24) for spec in cache.specs)
    # one latent of 24 + 8 columns, stored as 64, for all heads of both layers
    assert cache.size_bytes == (1024 + 16) * 2 * 64 * 4


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


def test_prompt_over_the_context_is_refused_with_both_numbers(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=r"context is 256 tokens; the prompt has 300"):
        engine.add_request(Request("a", (1,) * 300, SamplingParams()))
    with pytest.raises(RequestRefused, match=r"context is 256 tokens; the prompt has 200 and max_tokens is 57"):
        engine.add_request(Request("a", (1,) * 200, SamplingParams(max_tokens=57)))
    small = make_engine(kv_tokens=100)
    # six blocks of 16
    with pytest.raises(RequestRefused, match="holds 96 tokens"):
        small.add_request(Request("a", (1,) * 60, SamplingParams(max_tokens=37)))
    assert not engine.has_work
    assert not small.has_work


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            "Phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "long_factor": [1.0] * 4,
                    "short_factor": [1.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "longrope",
        ),
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "later tokens"),
        ("Llama", {"head_dim": 600, "num_attention_heads": 1, "num_key_value_heads": 1}, "keys of 600"),
    ],
)
def test_models_that_would_be_wrong_are_refused_by_name(
    architecture: str,
    changes: dict[str, object],
    reason: str,
    tiny_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., Engine],
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        make_engine(tiny_model(architecture, **changes))


def test_a_model_whose_paged_answers_differ_from_its_own_is_refused(
    tiny_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = tiny_model()
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def with_half_the_scale(self: Any, *args: object, **kwargs: object) -> object:
        # as a model might whose code does something only with its own attention
        is_own = self.config._attn_implementation == "eager"
        monkeypatch.setattr(self, "scaling", 8**-0.5 if is_own else 4**-0.5)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", with_half_the_scale)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: paged attention gives other logits"):
        make_engine(model)


def test_the_pool_is_planned_from_memory(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model()
    # 2 layers x (keys and values) x 2 heads x 64 stored columns x 4 bytes = 2048 bytes a token, 32768 a block of 16
    specs = [LayerSpec(2, 8, 8)] * 2
    # of 62 blocks that fit one is never handed out
    assert plan_kv_tokens(model, specs, 62 * 32768 + 5) == 61 * 16
    # 32 contexts of 256 are more than enough
    assert plan_kv_tokens(model, specs, 10**9) == 32 * 256
    assert plan_kv_tokens(model, specs, 0) == 16


def test_layers_with_a_window_are_planned_for_what_they_hold(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model()
    full, windowed = LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=20)
    # twice 3 sequences of 2 + 2 blocks and a step of 2: 28 blocks of the windowed layer, 16384 bytes a block and layer
    traffic = Traffic(max_sequences=3, max_step_tokens=32)
    memory = (28 + 1 + 100 + 1) * 16384
    planned = plan_kv_tokens(model, [full, windowed], memory, traffic=traffic)
    assert planned == 100 * 16
    assert plan_kv_tokens(model, [full, full], memory, traffic=traffic) == 64 * 16
    cache = KvCache([full, windowed], planned, traffic=traffic)
    assert cache.size_bytes == memory
    assert [group.pool.num_blocks for group in cache.groups] == [100, 28]
    assert KvCache([full, windowed], planned + 16, traffic=traffic).size_bytes == memory + 16384
    # with little memory both have as much
    assert plan_kv_tokens(model, [full, windowed], 22 * 16384, traffic=traffic) == 10 * 16


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma3Text", "GptOss"])
def test_full_traffic_fits_what_is_planned_for_it(
    architecture: str, tiny_model: Callable[..., PreTrainedModel], ll_tokenizer: LLTokenizer, run_all: Run
) -> None:
    limits = SchedulerLimits(max_sequences=5, max_step_tokens=24)
    runner = ModelRunner(tiny_model(architecture), 2048, traffic=Traffic(5, 24))
    engine = Engine(runner, ll_tokenizer, (256,), limits)
    # twice 5 * (1 + 2) + 2 blocks
    assert [g.pool.num_blocks for g in runner.kv_cache.groups if g.window] == [34]
    most = 0
    for number, prompt in enumerate(prompts(12, seed=8, longest=120)):
        engine.add_request(Request(f"r{number}", prompt, greedy(100)))
    while engine.has_work:
        engine.launch()
        most = max(most, *(g.pool.num_used for g in runner.kv_cache.groups if g.window))
        engine.collect()
    assert engine.scheduler.num_preempted == 0
    assert 5 <= most <= 17
