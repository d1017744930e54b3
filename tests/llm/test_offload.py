"""Preempted sequences go on from copies of their keys and values: same answers, nothing computed twice or left."""

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from llm.chunk import Chunk
from llm.engine import Engine
from llm.errors import IntegrityError
from llm.kv_cache import KvCache, LayerSpec
from llm.offload import OffloadStore
from llm.request import Output, Request, SamplingParams
from tests.llm.test_scheduler import greedy, text

Run = Callable[[Engine], dict[str, list[Output]]]


def ask(engine: Engine, run_all: Run) -> tuple[dict[str, list[int]], int]:
    """Six answers at once; gives their tokens, and how many tokens were computed for them."""
    computed = 0
    own_forward = engine.runner.forward

    def forward(chunks: Sequence[Chunk], fed: Tensor | None = None) -> Tensor:
        nonlocal computed
        computed += sum(chunk.length for chunk in chunks)
        return own_forward(chunks, fed)

    engine.runner.forward = forward  # type: ignore[method-assign, assignment]
    for number in range(6):
        # nothing is kept: what is not copied has to be computed
        engine.add_request(Request(f"r{number}", text(20 + 3 * number, seed=number), greedy(30), is_kept=False))
    answers = run_all(engine)
    tokens = {name: [token for output in outputs for token in output.token_ids] for name, outputs in answers.items()}
    return tokens, computed


def with_store(engine: Engine, max_bytes: int) -> OffloadStore:
    # a second pool on the same device: what counts is that blocks are copied out and back
    engine.scheduler.offload = OffloadStore(engine.runner.kv_cache, max_bytes)
    return engine.scheduler.offload


@pytest.mark.parametrize("steps_ahead", [1, 2])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3Text", "DeepseekV3"])
def test_copies_give_the_same_answers_and_nothing_is_computed_twice(
    architecture: str,
    steps_ahead: int,
    tiny_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., Engine],
    run_all: Run,
) -> None:
    wanted, least = ask(make_engine(tiny_model(architecture)), run_all)
    limits = {"kv_tokens": 144, "max_step_tokens": 17, "steps_ahead": steps_ahead}
    anew = make_engine(tiny_model(architecture), **limits)
    tokens, computed = ask(anew, run_all)
    assert tokens == wanted and computed > least and anew.scheduler.num_preempted > 0
    engine = make_engine(tiny_model(architecture), **limits)
    store = with_store(engine, 10**8)
    tokens, computed = ask(engine, run_all)
    assert tokens == wanted
    assert computed == least
    assert store.num_restored == store.num_saved > 0
    assert store.used_bytes == 0
    engine.check_idle()


def test_without_room_for_a_copy_it_is_computed_anew(make_engine: Callable[..., Engine], run_all: Run) -> None:
    wanted, _ = ask(make_engine(), run_all)
    engine = make_engine(kv_tokens=144)
    # 2048 bytes a token: one block
    store = with_store(engine, 16 * 2048)
    assert ask(engine, run_all)[0] == wanted
    assert engine.scheduler.num_preempted > store.num_saved


def test_an_aborted_sequence_leaves_no_copy(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(max_sequences=1)
    store = with_store(engine, 10**8)
    engine.add_request(Request("low", text(20), greedy(60), priority=5, is_kept=False))
    for _ in range(4):
        engine.launch()
        engine.collect()
    engine.add_request(Request("high", text(20, seed=4), greedy(8)))
    engine.launch()
    assert store.used_bytes > 0 and store.get("low/0") is not None
    assert engine.abort("low")
    assert store.used_bytes == 0
    assert set(run_all(engine)) == {"high"}


def test_what_the_prefix_cache_still_has_is_not_copied_back(make_engine: Callable[..., Engine], run_all: Run) -> None:
    engine = make_engine(max_sequences=1)
    store = with_store(engine, 10**8)
    engine.add_request(Request("low", text(20), greedy(60), priority=5))
    for _ in range(4):
        engine.launch()
        engine.collect()
    engine.add_request(Request("high", text(20, seed=4), SamplingParams(temperature=0, max_tokens=2)))
    run_all(engine)
    assert (store.num_saved, store.num_restored, store.used_bytes) == (1, 0, 0)


def test_copies_of_nobody_are_reported() -> None:
    cache = KvCache([LayerSpec(2, 8, 8)], 64)
    store = OffloadStore(cache, 10**6)
    blocks = cache.begin("a", cache.match([], 20))
    assert cache.grow(blocks, 0, 20)
    assert store.save("a", blocks, 20)
    # two blocks of 16 tokens, 1024 bytes each
    assert store.used_bytes == 2 * 16 * 1024
    store.check({"a"})
    with pytest.raises(IntegrityError, match=r"copies of \['a'\]"):
        store.check(set())
