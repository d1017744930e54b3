"""Who goes first, who gives way, and that nobody waits for ever; what the prefix cache saves and keeps apart."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from llm.engine import Engine
from llm.request import Output, Request, SamplingParams
from llm.scheduler import MAX_OVERTAKEN

Run = Callable[[Engine], dict[str, list[Output]]]


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + index * 7) % 250 for index in range(length))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def cached(outputs: list[Output]) -> int:
    usage = outputs[-1].usage
    assert usage is not None
    return usage.cached_tokens


def test_blocks_are_taken_as_they_are_needed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(kv_tokens=160)
    engine.add_request(Request("a", text(10), greedy(140)))
    used = []
    while engine.has_work:
        engine.launch()
        used.append(engine.scheduler.kv_cache.num_used_tokens)
        engine.collect()
    assert used[0] == 16 and used[6] == 16 and used[7] == 32
    assert max(used) == 160


def test_the_youngest_of_the_lowest_priority_gives_way(make_engine: Callable[..., Engine]) -> None:
    # two of the three fit to their ends
    engine = make_engine(kv_tokens=128)
    for name, priority in (("old", 0), ("urgent", -1), ("young", 0)):
        engine.add_request(Request(name, text(15, seed=len(name)), greedy(40), priority=priority))
    finished: list[str] = []
    preempted: list[str] = []
    while engine.has_work:
        before = {sequence.request.id for sequence in engine.scheduler.running}
        engine.launch()
        waiting = {sequence.request.id for sequence in engine.scheduler.waiting}
        preempted += sorted(before & waiting)
        finished += [output.request_id for output in engine.collect() if output.finish_reason]
    assert set(preempted) == {"young"}
    assert finished == ["urgent", "old", "young"] or finished == ["old", "urgent", "young"]


def test_a_higher_priority_pushes_a_lower_one_out(make_engine: Callable[..., Engine], run_all: Run) -> None:
    alone = make_engine()
    alone.add_request(Request("low", text(20), greedy(60)))
    wanted = "".join(output.text for output in run_all(alone)["low"])
    engine = make_engine(max_sequences=1)
    engine.add_request(Request("low", text(20), greedy(60), priority=5))
    outputs: list[Output] = []
    for _ in range(9):
        engine.launch()
        outputs += engine.collect()
    engine.add_request(Request("high", text(20, seed=4), greedy(8)))
    order = []
    while engine.has_work:
        engine.launch()
        for output in engine.collect():
            outputs.append(output)
            order += [output.request_id] if output.finish_reason else []
    assert order == ["high", "low"]
    # it went on where it was
    assert "".join(output.text for output in outputs if output.request_id == "low") == wanted


def test_a_low_priority_is_overtaken_a_bounded_number_of_times(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_sequences=1)
    engine.add_request(Request("low", text(5), greedy(2), priority=9))
    for number in range(MAX_OVERTAKEN + 20):
        engine.add_request(Request(f"high{number}", text(5, seed=number), greedy(1)))
    order = []
    while engine.has_work:
        engine.launch()
        order += [output.request_id for output in engine.collect() if output.finish_reason]
    # two lows of the same priority would go in order of arrival: all the highs came later
    assert order.index("low") == MAX_OVERTAKEN


def test_a_long_prompt_is_read_while_others_write(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_step_tokens=8)
    engine.add_request(Request("writer", text(4), greedy(60)))
    engine.launch()
    engine.collect()
    engine.add_request(Request("reader", text(70, seed=3), greedy(1)))
    steps, gaps = 0, []
    while any(sequence.request.id == "reader" for sequence in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.launch()
        gaps.append(sum(len(output.token_ids) for output in engine.collect() if output.request_id == "writer"))
        steps += 1
    # seven of eight tokens a step are the reader's
    assert steps == 10
    assert set(gaps) == {1}


def test_a_beginning_is_computed_once_and_counted(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(max_step_tokens=16)
    shared = text(70)
    for number in range(3):
        engine.add_request(Request(f"r{number}", (*shared, number), greedy(4)))
    answers = run_all(engine)
    # the later ones wait for the first until less than 32 more tokens are in common: one block of four
    assert [cached(answers[f"r{number}"]) for number in range(3)] == [0, 48, 48]


def test_what_was_written_is_a_beginning_too(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    engine.add_request(Request("first", text(20), greedy(30)))
    written = tuple(token for output in run_all(engine)["first"] for token in output.token_ids)
    engine.add_request(Request("turn", (*text(20), *written, 7, 7), greedy(2)))
    # 20 + 29 tokens were computed, the last one drawn was not
    assert cached(run_all(engine)["turn"]) == 48


def test_salts_share_nothing(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    for name, salt in (("one", "key-a"), ("two", "key-b"), ("three", "key-a"), ("four", "")):
        engine.add_request(Request(name, text(50), greedy(2), cache_salt=salt))
        assert cached(run_all(engine)[name]) == (48 if name == "three" else 0)


def test_what_is_not_kept_leaves_nothing(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine()
    for name, is_kept in (("hidden", False), ("open", True), ("hidden again", False)):
        engine.add_request(Request(name, text(50), greedy(2), is_kept=is_kept))
        assert cached(run_all(engine)[name]) == (48 if name == "hidden again" else 0)


def test_old_beginnings_give_way_to_new_ones(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(kv_tokens=128)
    for number in range(6):
        engine.add_request(Request(f"r{number}", text(60, seed=number), greedy(2)))
        run_all(engine)
    engine.add_request(Request("last", text(60, seed=5), greedy(2)))
    assert cached(run_all(engine)["last"]) == 48
    engine.add_request(Request("first", text(60, seed=0), greedy(2)))
    assert cached(run_all(engine)["first"]) == 0
    engine.check_idle()


@pytest.mark.parametrize("window", [5, 20])
def test_a_window_lets_a_sequence_outgrow_the_pool(
    window: int, tiny_model: Callable[..., PreTrainedModel], make_engine: Callable[..., Engine], run_all: Run
) -> None:
    roomy = make_engine(tiny_model("Mistral", sliding_window=window))
    tight = make_engine(tiny_model("Mistral", sliding_window=window), kv_tokens=80, max_step_tokens=16)
    for engine in (roomy, tight):
        engine.add_request(Request("long", text(60), greedy(150)))
    answers = [run_all(engine)["long"] for engine in (roomy, tight)]
    texts = ["".join(output.text for output in outputs) for outputs in answers]
    assert texts[0] == texts[1]
    tight.check_idle()


def test_an_abort_between_launch_and_collect_is_safe(make_engine: Callable[..., Engine], run_all: Run) -> None:
    alone = make_engine()
    alone.add_request(Request("b", text(30, seed=2), greedy(20)))
    wanted = "".join(output.text for output in run_all(alone)["b"])
    engine = make_engine(steps_ahead=2)
    engine.add_request(Request("a", text(30, seed=1), greedy(20)))
    engine.add_request(Request("b", text(30, seed=2), greedy(20)))
    seen = ""
    for step in range(60):
        engine.launch()
        if step == 6:
            assert engine.abort("a")
            # its blocks may be another's before its last steps are collected
            engine.add_request(Request("c", text(40, seed=3), greedy(5)))
        for output in engine.collect():
            assert output.request_id != "a" or step < 6
            seen += output.text if output.request_id == "b" else ""
    assert seen == wanted
    assert not engine.has_work
    engine.check_idle()
