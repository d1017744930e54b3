"""The pool of places: intervals stay disjoint under any traffic, and its books are checked."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm.engine import Engine
from llm.errors import IntegrityError
from llm.kv_cache import Interval, KvCache, kv_bytes_per_token
from llm.request import FinishReason, Grammar, Request, SamplingParams


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_any_order_of_reserving_and_freeing_keeps_intervals_apart(steps: list[tuple[bool, int]]) -> None:
    cache, owners = KvCache(100), []
    for number, (is_reserving, size) in enumerate(steps):
        if is_reserving:
            interval = cache.reserve(f"o{number}", size)
            if interval is not None:
                assert interval.end - interval.start == size
                owners.append(f"o{number}")
        elif owners:
            cache.free(owners.pop(size % len(owners)))
        cache.check(set(owners))
    for owner in owners:
        cache.free(owner)
    assert cache.num_used_tokens == 0
    assert cache.reserve("all", 100) == Interval(0, 100)


def test_the_first_gap_that_is_large_enough_is_taken() -> None:
    cache = KvCache(100)
    for name, size in (("a", 20), ("b", 10), ("c", 30)):
        cache.reserve(name, size)
    cache.free("b")
    assert cache.reserve("d", 11) == Interval(60, 71)
    assert cache.reserve("e", 10) == Interval(20, 30)
    assert cache.reserve("f", 30) is None


def test_books_that_do_not_balance_are_reported() -> None:
    cache = KvCache(10)
    cache.reserve("a", 4)
    with pytest.raises(IntegrityError, match="owned by"):
        cache.check(set())
    cache._owned["b"] = Interval(3, 6)
    with pytest.raises(IntegrityError, match="overlaps"):
        cache.check({"a", "b"})


def test_size_is_planned_and_measured_alike() -> None:
    cache = KvCache(64)
    key = torch.zeros(2, 1, 8)
    for layer in range(3):
        cache.layer(layer, key, key)
    assert cache.size_bytes == 64 * kv_bytes_per_token(3, 2, 8, torch.float32)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_ends_with_nothing_owned(seed: int, make_engine: Callable[..., Engine]) -> None:
    rng = random.Random(seed)
    engine = make_engine(kv_tokens=300, max_sequences=4, max_step_tokens=16)
    names: list[str] = []
    ended: list[str] = []
    for step in range(250):
        if rng.random() < 0.25:
            name = f"r{step}"
            prompt = tuple(rng.randrange(200) for _ in range(rng.randint(1, 40)))
            grammar = Grammar("regex", "[a-f]{3,9}") if rng.random() < 0.3 else None
            params = SamplingParams(
                seed=step, max_tokens=rng.randint(1, 30), n=rng.choice((1, 1, 2)), stop=("ab", "\n"), temperature=1.5
            )
            engine.add_request(Request(name, prompt, params, grammar))
            names.append(name)
        engine.launch()
        if names and rng.random() < 0.08:
            engine.abort(rng.choice(names))
        for output in engine.collect():
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                ended.append(f"{output.request_id}/{output.index}")
        engine.scheduler.kv_cache.check({sequence.name for sequence in engine.scheduler.running})
    while engine.has_work:
        engine.launch()
        engine.collect()
    engine.check_idle()
    assert len(ended) == len(set(ended)) > 20
