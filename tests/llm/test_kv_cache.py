"""The blocks of keys and values: every one accounted for under any traffic, beginnings shared by content alone."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm.block_pool import NULL_BLOCK, BlockPool
from llm.engine import Engine
from llm.errors import IntegrityError, UnsupportedModel
from llm.kv_cache import KvCache, LayerSpec
from llm.prefix_cache import BlockChain, CachedBlock
from llm.request import FinishReason, Grammar, Request, SamplingParams

FULL = LayerSpec(2, 8, 8)
WINDOWED = LayerSpec(2, 8, 8, window=20)


def content(number: int) -> CachedBlock:
    return CachedBlock(number.to_bytes(4, "big"), b"", (number,))


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["take", "share", "store", "release", "forget"]), st.integers(0, 40))),
)
def test_any_order_of_use_leaves_every_block_accounted_for(prefers_runs: bool, steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(20, prefers_runs=prefers_runs)
    held: list[int] = []
    for number, (action, size) in enumerate(steps):
        if action == "take" and size % 8 <= pool.num_free:
            taken = pool.allocate(size % 8, held[-1] if held else None)
            assert not set(taken) & set(held) and NULL_BLOCK not in taken
            held += taken
        elif held and action == "share":
            pool.share([held[size % len(held)]])
            held.append(held[size % len(held)])
        elif held and action == "store":
            pool.store(held[size % len(held)], content(number))
        elif held and action == "release":
            pool.release([held.pop(size % len(held))])
        elif held and action == "forget":
            pool.forget([held[size % len(held)]])
        pool.check(Counter(held))
        assert pool.num_used == len(set(held))
    for block in held:
        pool.release([block])
    pool.check({})
    assert pool.num_free == 20


def test_the_block_used_longest_ago_is_evicted_and_ends_go_before_beginnings() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(3)
    for number, block in enumerate([*first, *second]):
        pool.store(block, content(number))
    pool.release(second)
    pool.release(first)
    pool.share([second[0]])
    pool.release([second[0]])
    # oldest first: the end of the second, then of the first, and the block that was used again last
    order = []
    for _ in range(6):
        known = {number for number in range(6) if pool.find(content(number)) is not None}
        pool.allocate(1)
        order += sorted(known - {number for number in range(6) if pool.find(content(number)) is not None})
    assert order == [5, 4, 2, 1, 0, 3]


def test_a_hash_alone_is_no_hit() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.store(block, CachedBlock(b"same", b"parent", (1, 2)))
    assert pool.find(CachedBlock(b"same", b"parent", (1, 2))) == block
    assert pool.find(CachedBlock(b"same", b"parent", (1, 3))) is None
    assert pool.find(CachedBlock(b"same", b"other", (1, 2))) is None


def test_chains_differ_by_what_came_before_and_by_salt() -> None:
    def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
        return [block.hash for block in BlockChain(salt, 4).extend(tokens)]

    one = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(one) == 2
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8]) == one
    assert hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert not set(hashes([1, 2, 3, 4, 5, 6, 7, 8], salt="key")) & set(one)


def test_books_that_do_not_balance_are_reported() -> None:
    cache = KvCache([FULL], 64)
    blocks = cache.begin("a", cache.match([], 40))
    assert cache.grow(blocks, 0, 40)
    cache.check({"a"})
    with pytest.raises(IntegrityError, match="owned by"):
        cache.check(set())
    cache.groups[0].pool.share([blocks.tables[0][0]])
    with pytest.raises(IntegrityError, match="references differ"):
        cache.check({"a"})


def test_no_room_takes_nothing() -> None:
    cache = KvCache([FULL, WINDOWED], 64)
    first, second = (cache.begin(name, cache.match([], 1)) for name in "ab")
    assert cache.grow(first, 0, 48)
    assert not cache.grow(second, 0, 17)
    assert second.tables == [[], []]
    assert cache.grow(second, 0, 16)
    assert cache.num_used_tokens == cache.num_tokens == 64


def test_a_window_gives_old_blocks_back_and_its_end_alone_is_needed_for_a_hit() -> None:
    cache = KvCache([FULL, WINDOWED], 160)
    chain = BlockChain("", 16).extend(list(range(100)))
    blocks = cache.begin("a", cache.match(chain, 100))
    for done in (0, 32, 64):
        assert cache.grow(blocks, done, done + 32)
        cache.store(blocks, chain, done + 32)
    full, windowed = blocks.tables
    assert len(full) == len(windowed) == 6
    # token 64 sees from 45 on: blocks 0 and 1 are given back
    assert windowed[:2] == [NULL_BLOCK] * 2 and NULL_BLOCK not in windowed[2:]
    cache.check({"a"})
    cache.free("a")
    windowed_pool = cache.groups[1].pool
    # token 96 sees from 77 on: of six blocks it needs the last two
    windowed_pool.forget([block for block in windowed_pool._content if block not in windowed[4:]])
    hit = cache.match(chain, 100)
    assert hit.num_tokens == 96
    assert hit.tables == [full, [NULL_BLOCK] * 4 + windowed[4:]]
    # one of the two is gone: nothing of use is left
    windowed_pool.forget([windowed[4]])
    assert cache.match(chain, 100).num_tokens == 0
    cache.check(set())


def test_the_last_token_is_never_part_of_a_hit() -> None:
    cache = KvCache([FULL], 160)
    chain = BlockChain("", 16).extend(list(range(48)))
    blocks = cache.begin("a", cache.match(chain, 48))
    assert cache.grow(blocks, 0, 48)
    cache.store(blocks, chain, 48)
    assert cache.match(chain, 48).num_tokens == 32
    assert cache.match(chain, 49).num_tokens == 48


def test_memory_is_what_the_specs_say() -> None:
    latent = LayerSpec(1, 576, 512, is_latent=True)
    cache = KvCache([FULL, latent], 64)
    # a block more, which is never handed out
    assert cache.size_bytes == 80 * sum(spec.bytes_per_token(torch.float32) for spec in (FULL, latent))
    # 8 columns are stored as 64, the kernels' least
    assert FULL.bytes_per_token(torch.float32) == 2 * 2 * 64 * 4
    assert latent.bytes_per_token(torch.bfloat16) == 576 * 2
    keys, values = cache.layer(1)
    assert (keys.shape[3], values.shape[3], values.data_ptr()) == (576, 512, keys.data_ptr())


def test_widths_beyond_the_kernels_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keys of 600"):
        LayerSpec(1, 600, 64)


def test_runs_of_blocks_stay_together_on_a_cpu() -> None:
    pool = BlockPool(256, prefers_runs=True)
    tables: list[list[int]] = [[] for _ in range(8)]
    for _ in range(20):
        for table in tables:
            table += pool.allocate(1, table[-1] if table else None)
    assert all(table == list(range(table[0], table[0] + 20)) for table in tables)


@pytest.mark.parametrize("steps_ahead", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_ends_with_nothing_owned(
    seed: int, steps_ahead: int, make_engine: Callable[..., Engine]
) -> None:
    rng = random.Random(seed)
    engine = make_engine(kv_tokens=128, max_sequences=4, max_step_tokens=16, steps_ahead=steps_ahead)
    beginnings = [tuple(rng.randrange(200) for _ in range(40)) for _ in range(2)]
    names: list[str] = []
    ended: list[str] = []
    for step in range(100):
        if rng.random() < 0.3:
            name = f"r{step}"
            prompt = (*rng.choice(beginnings)[: rng.randint(1, 40)], rng.randrange(200))
            grammar = Grammar("regex", "[a-f]{3,9}") if rng.random() < 0.3 else None
            params = SamplingParams(
                seed=step, max_tokens=rng.randint(1, 60), n=rng.choice((1, 1, 2)), stop=("ab", "\n"), temperature=1.5
            )
            salt = rng.choice(("", "key"))
            engine.add_request(
                Request(name, prompt, params, grammar, rng.randint(0, 2), salt, is_kept=rng.random() < 0.8)
            )
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
    assert engine.scheduler.kv_cache.num_used_tokens == 0
    assert len(ended) == len(set(ended)) > 5
    assert engine.scheduler.num_preempted > 0 and engine.scheduler.num_prefix_hits > 0
