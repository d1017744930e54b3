"""Collapses planted in the engine: dropped, tried again by the reference path, ended honestly, and nobody else's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llguidance import LLTokenizer
from torch import Tensor
from transformers import PreTrainedModel

from kernels.paged_attention_plan import PagedPlan
from llm.chunk import Chunk
from llm.detokenize import Detokenizer
from llm.engine import Engine
from llm.guard import LETTERS
from llm.model_runner import ModelRunner
from llm.request import FinishReason, Grammar, Output, Request, SamplingParams
from llm.scheduler import SchedulerLimits
from tests.llm.byte_tokenizer import EOS
from tests.llm.conftest import tiny_model

Run = Callable[[Engine], dict[str, list[Output]]]
STUCK = ord("Z") - 33  # the byte-level alphabet begins with "!"
CLEAN = 10


def request(name: str = "r", *, prompt: int = 3, grammar: Grammar | None = None, **sampling: Any) -> Request:
    """Ask for a guarded answer; byte tokens."""
    values = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "collapse_guard": True, **sampling}
    ids = tuple((prompt * 29 + index * 7) % 250 for index in range(23))
    return Request(name, ids, SamplingParams(**values), grammar)


def break_model(engine: Engine, monkeypatch: pytest.MonkeyPatch, *names: str, is_cured: bool = True) -> list[bool]:
    """Let the model say STUCK alone behind CLEAN tokens of the named requests; gives which paths were gone."""
    forward, paths = engine.runner.forward, []

    def broken(chunks: Sequence[Chunk], fed: Tensor | None = None, *, is_reference: bool = False) -> Tensor:
        logits = forward(chunks, fed, is_reference=is_reference).clone()
        paths.append(is_reference)
        if is_reference and is_cured:
            return logits
        by_blocks = {id(item.blocks): item for item in engine.scheduler.running}
        wanted = [chunk for chunk in chunks if chunk.wants_logits]
        for row, chunk in enumerate(wanted):
            sequence = by_blocks[id(chunk.blocks)]
            is_late = chunk.past + chunk.length >= sequence.num_prompt_tokens + CLEAN
            if sequence.request.id in names and is_late:
                logits[row] = -50.0
                logits[row, STUCK] = 50.0
        return logits

    monkeypatch.setattr(engine.runner, "forward", broken)
    return paths


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: Sequence[Output]) -> str:
    return "".join(output.text for output in outputs)


def answer(engine: Engine, run_all: Run, *requests: Request) -> dict[str, list[Output]]:
    for item in requests:
        engine.add_request(item)
    return run_all(engine)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3Text", "GptOss", "DeepseekV3", "Qwen3Moe"])
@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_an_answer_recovers_by_the_reference_path(
    architecture: str,
    steps_ahead: int,
    make_engine: Callable[..., Engine],
    run_all: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean = tokens_of(answer(make_engine(tiny_model(architecture)), run_all, request(max_tokens=CLEAN))["r"])
    # the first of the run could not be known for one; what follows is what the model says behind it
    sent = [*clean, STUCK]
    engine = make_engine(tiny_model(architecture), steps_ahead=steps_ahead)
    paths = break_model(engine, monkeypatch, "r")
    outputs = answer(engine, run_all, request(max_tokens=CLEAN + LETTERS))["r"]
    asked = request()
    beyond = Request(
        "s", (*asked.prompt_token_ids, *sent), SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
    )
    wanted = tokens_of(answer(make_engine(tiny_model(architecture)), run_all, beyond)["s"])
    assert tokens_of(outputs) == [*sent, *wanted]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].usage is not None and outputs[-1].usage.completion_tokens == CLEAN + LETTERS
    assert (engine.writer.num_second_tries, engine.writer.num_collapsed) == (1, 0)
    assert paths.index(True) > CLEAN and all(paths[paths.index(True) :])


def test_what_collapses_again_ends_so_and_nothing_of_it_is_sent(
    make_engine: Callable[..., Engine], run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    break_model(engine, monkeypatch, "r", is_cured=False)
    outputs = answer(engine, run_all, request(logprobs=2))["r"]
    assert outputs[-1].finish_reason is FinishReason.COLLAPSE
    assert tokens_of(outputs)[CLEAN:] == [STUCK]
    assert text_of(outputs).count("ZZ") == 0
    assert sum(len(output.logprobs) for output in outputs) == CLEAN + 1
    assert outputs[-1].usage is not None and outputs[-1].usage.completion_tokens == CLEAN + 1
    assert (engine.writer.num_second_tries, engine.writer.num_collapsed) == (1, 1)
    # nothing that it computed is found by the next one
    again = answer(engine, run_all, request("fine", max_tokens=4))["fine"]
    assert again[-1].usage is not None and again[-1].usage.cached_tokens == 0


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_neighbours_and_sisters_are_left_alone(
    steps_ahead: int, make_engine: Callable[..., Engine], run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        request(f"n{number}", prompt=number, temperature=1.0, seed=number, stop=("\n",)) for number in range(4, 8)
    ]
    alone = {item.id: answer(make_engine(), run_all, item)[item.id] for item in others}
    engine = make_engine(steps_ahead=steps_ahead, max_step_tokens=40)
    break_model(engine, monkeypatch, "r")
    found = answer(engine, run_all, request(temperature=1.0, n=2, max_tokens=60), *others)
    for name, outputs in alone.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        assert found[name][-1].finish_reason == outputs[-1].finish_reason
    for name in ("r", "r/1"):
        assert found[name][-1].finish_reason is FinishReason.LENGTH
        assert len(tokens_of(found[name])) == 60
        assert "ZZZZ" not in text_of(found[name])
    assert engine.writer.num_second_tries == 2


def test_who_asks_for_no_guard_gets_the_run(
    make_engine: Callable[..., Engine], run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_guard, asks in ((True, False), (False, True)):
        engine = make_engine()
        engine.has_guard = has_guard
        break_model(engine, monkeypatch, "r")
        outputs = answer(engine, run_all, request(collapse_guard=asks))["r"]
        assert tokens_of(outputs)[CLEAN:] == [STUCK] * (48 - CLEAN)


def test_a_grammars_own_run_is_no_collapse_and_the_matcher_goes_back(
    make_engine: Callable[..., Engine], run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for logprobs in (None, 0):
        # forced, or drawn without a choice
        forced = request(grammar=Grammar("regex", "[ab]{2}Z{30}[ab]"), logprobs=logprobs)
        outputs = answer(make_engine(), run_all, forced)["r"]
        assert text_of(outputs)[2:-1] == "Z" * 30
        assert outputs[-1].finish_reason is FinishReason.STOP
    engine = make_engine()
    break_model(engine, monkeypatch, "r")
    outputs = answer(engine, run_all, request(grammar=Grammar("regex", "[a-z]{10}[A-Z]{3}[A-Z]{32}"), temperature=1.0))[
        "r"
    ]
    text = text_of(outputs)
    assert engine.writer.num_second_tries == 1
    assert len(text) == 45 and text[:10].islower() and text[10:].isupper()
    assert "Z" * LETTERS not in text


def test_a_stop_string_within_a_run_ends_it(
    make_engine: Callable[..., Engine], run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    break_model(engine, monkeypatch, "r")
    outputs = answer(engine, run_all, request(stop=("Z" * 5,)))["r"]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(tokens_of(outputs)) == CLEAN and engine.writer.num_second_tries == 0


def test_clean_answers_are_the_same_with_the_guard_and_without(
    make_engine: Callable[..., Engine], run_all: Run
) -> None:
    answers = []
    for is_guarded in (False, True):
        params = [
            request(f"c{seed}", prompt=seed, seed=seed, temperature=seed % 3 / 2, max_tokens=20, logprobs=seed % 2, n=2,
                    stop=("a", "\x00"), collapse_guard=is_guarded)
            for seed in range(8)
        ]  # fmt: skip
        found = answer(make_engine(), run_all, *params)
        parts = {}
        for name, outputs in found.items():
            logprobs = [item for output in outputs for item in output.logprobs]
            parts[name] = (text_of(outputs), tokens_of(outputs), logprobs, outputs[-1].finish_reason, outputs[-1].usage)
        answers.append(parts)
    assert answers[0] == answers[1]


def test_dropped_tokens_leave_the_text_as_if_they_had_never_come() -> None:
    """Characters cut between tokens, and a stop string that has begun, are as they were."""
    said = [b"a\xe2", b"\x96\x88<", b"\xe2\x96"]
    run = [b"\x88", b"\xe2\x96", b"\x88"]
    rest = [b"\x88", b"<st", b"ay>"]
    plain, held = Detokenizer(["<stop>"]), Detokenizer(["<stop>"])
    wanted = "".join([*(plain.push(7, part) for part in [*said, *rest]), plain.finish()])
    text = "".join(held.push(7, part) for part in said)
    text += "".join(held.push(8, part, num_suspect=count + 1) for count, part in enumerate(run))
    # those before them are out, half a character among them
    assert held.drop(len(run) + 2) == len(run)
    text += "".join(held.push(7, part) for part in rest) + held.finish()
    assert text == wanted
    assert held.take_tokens()[0] == plain.take_tokens()[0] == (7,) * 6


def test_a_second_try_that_is_preempted_stays_on_the_reference_path(
    ll_tokenizer: LLTokenizer, run_all: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(ModelRunner(tiny_model(), 128), ll_tokenizer, (EOS,), SchedulerLimits(max_step_tokens=32))
    break_model(engine, monkeypatch, "r", "s", "t")
    found = answer(engine, run_all, *(request(name, prompt=ord(name), max_tokens=70) for name in "rst"))
    assert engine.scheduler.num_preempted > 0
    assert engine.writer.num_second_tries >= 3
    for outputs in found.values():
        assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.COLLAPSE)
        assert "Z" * LETTERS not in text_of(outputs)


def test_the_reference_path_is_another_one(tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch,
                                           make_engine: Callable[..., Engine], run_all: Run) -> None:  # fmt: skip
    """A fault in the plan of a CPU's attention itself: the second try does not use it."""
    engine = make_engine(tiny_model())
    attend = PagedPlan.attend
    used = []

    def spy(self: PagedPlan, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        used.append(len(query))
        return attend(self, query, *args, **kwargs)

    monkeypatch.setattr(PagedPlan, "attend", spy)
    break_model(engine, monkeypatch, "r")
    answer(engine, run_all, request(max_tokens=CLEAN + LETTERS + 8))
    # two layers: the prompt, then CLEAN + LETTERS - 1 tokens; the rest by the reference
    assert used == [23] * 2 + [1] * 2 * (CLEAN + LETTERS - 1)
