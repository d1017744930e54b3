"""Invariant mode: logits bit-equal alone, in batches of several sizes, in chunks, behind cached beginnings."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from torch import Tensor
from transformers import PreTrainedModel

from llm.chunk import Chunk, tiles
from llm.engine import Engine
from llm.errors import UnsupportedModel
from llm.invariant import InvariantRows
from llm.kv_cache import SequenceBlocks
from llm.load import load_engine
from llm.model_runner import ModelRunner
from llm.request import Request, SamplingParams
from llm.scheduler import SchedulerLimits
from tests.llm.byte_tokenizer import EOS
from tests.llm.embedded import embedded_model

__all__ = ["embedded_model"]

Logits = dict[tuple[str, int], Tensor]
NUM_TOKENS = 6


def record(
    engine: Engine, prompts: dict[str, tuple[int, ...]], num_tokens: int = NUM_TOKENS, *, is_kept: bool = True
) -> Logits:
    """Answer all prompts at once; gives each one's logits by the number of tokens before them."""
    found: Logits = {}
    own_forward = engine.runner.forward

    def forward(chunks: Sequence[Chunk], fed: Tensor | None = None) -> Tensor:
        logits = own_forward(chunks, fed)
        names = {id(sequence.blocks): sequence.request.id for sequence in engine.scheduler.running}
        wanted = [chunk for chunk in chunks if chunk.wants_logits]
        for chunk, row in zip(wanted, logits, strict=True):
            found[names[id(chunk.blocks)], chunk.past + chunk.length] = row.clone()
        return logits

    engine.runner.forward = forward  # type: ignore[method-assign, assignment]
    try:
        for name, prompt in prompts.items():
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            engine.add_request(Request(name, prompt, params, is_kept=is_kept))
        while engine.has_work:
            engine.launch()
            engine.collect()
    finally:
        engine.runner.forward = own_forward  # type: ignore[method-assign]
    return found


def differing(first: Logits, second: Logits) -> int:
    """Count the places that both have and that differ in any bit."""
    both = first.keys() & second.keys()
    assert both
    return sum(not torch.equal(first[place], second[place]) for place in both)


def make(
    model: PreTrainedModel,
    tokenizer: LLTokenizer,
    *,
    kv_tokens: int = 1024,
    is_invariant: bool = True,
    rows: InvariantRows | None = None,
    **limits: int,
) -> Engine:
    runner = ModelRunner(model, kv_tokens, is_invariant=is_invariant, invariant_rows=rows)
    return Engine(runner, tokenizer, (EOS,), SchedulerLimits(**limits))


def some_prompts(count: int, vocab: int, longest: int, seed: int = 4) -> dict[str, tuple[int, ...]]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(vocab) for _ in range(longest))
    return {
        # every third goes on from the same beginning
        f"r{number}": (shared[: 33 if number % 3 == 0 else 0] + tuple(rng.randrange(vocab) for _ in range(length)))
        for number, length in enumerate(rng.randint(1, longest) for _ in range(count))
    }


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3Moe", "Mistral", "Gemma2", "GptOss", "DeepseekV3"])
def test_logits_have_the_same_bits_whatever_the_batch(
    architecture: str, tiny_model: Callable[..., PreTrainedModel], ll_tokenizer: LLTokenizer
) -> None:
    prompts = some_prompts(7, 250, 50)
    engine = make(tiny_model(architecture), ll_tokenizer, max_step_tokens=256)
    alone: Logits = {}
    for name, prompt in prompts.items():
        alone.update(record(engine, {name: prompt}, is_kept=False))
    assert len(alone) == 7 * NUM_TOKENS and engine.scheduler.num_prefix_hits == 0
    for size in (2, 7):
        found = record(engine, dict(list(prompts.items())[:size]), is_kept=False)
        assert len(found) == size * NUM_TOKENS
        assert differing(alone, found) == 0, size
    # three at once, prompts in chunks; the second time every beginning is known
    chunked = make(tiny_model(architecture), ll_tokenizer, max_step_tokens=13, max_sequences=3, steps_ahead=2)
    for turn in ("cold", "warm"):
        hits = chunked.scheduler.num_prefix_hits
        assert differing(alone, record(chunked, prompts)) == 0, turn
    assert chunked.scheduler.num_prefix_hits - hits > 100
    # in tiles, and with so few blocks that some are computed twice, unless a window makes a few enough
    tight = make(tiny_model(architecture), ll_tokenizer, kv_tokens=112, rows=InvariantRows(16, 16), max_step_tokens=29)
    assert differing(alone, record(tight, prompts)) == 0
    assert tight.scheduler.num_preempted > 0 or architecture == "Mistral"


def test_the_default_mode_does_not_promise_it(
    tiny_model: Callable[..., PreTrainedModel], ll_tokenizer: LLTokenizer
) -> None:
    # else the test above would show nothing
    prompts = some_prompts(7, 250, 50)
    alone = record(make(tiny_model(), ll_tokenizer, is_invariant=False), {"r0": prompts["r0"]})
    together = record(make(tiny_model(), ll_tokenizer, is_invariant=False), prompts)
    assert differing(alone, together) > 0


def test_a_model_that_looks_at_its_neighbours_is_refused(
    tiny_model: Callable[..., PreTrainedModel], ll_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model()
    norm = type(model.model.norm)
    own = norm.forward

    def with_a_trace_of_the_others(self: Any, hidden_states: Tensor) -> Tensor:
        # far below what the comparison with the model's own logits would see
        normed: Tensor = own(self, hidden_states)
        return normed * (1 + 1e-6 * torch.tanh(hidden_states.mean()))

    monkeypatch.setattr(norm, "forward", with_a_trace_of_the_others)
    make(model, ll_tokenizer, is_invariant=False)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: invariant mode does not give the same bits"):
        make(model, ll_tokenizer)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 100])
def test_tiles_keep_every_token_in_order(num_rows: int) -> None:
    blocks = [SequenceBlocks([[]]) for _ in range(3)]
    chunks = [
        Chunk(list(range(5)), 7, blocks[0], wants_logits=True, fed_row=2),
        Chunk([9], 0, blocks[1], wants_logits=True),
        Chunk(list(range(20, 31)), 3, blocks[2], wants_logits=False),
    ]
    parts = list(tiles(chunks, num_rows))
    assert [sum(part.length for part in tile) for tile in parts] == [
        *[num_rows] * (18 // num_rows),
        *[18 % num_rows] * (18 % num_rows > 0),
    ]
    for chunk in chunks:
        own = [part for tile in parts for part in tile if part.blocks is chunk.blocks]
        assert [token for part in own for token in part.token_ids] == list(chunk.token_ids)
        assert [part.past for part in own] == [chunk.past + sum(p.length for p in own[:i]) for i in range(len(own))]
        assert [part.wants_logits for part in own] == [False] * (len(own) - 1) + [chunk.wants_logits]
        assert [part.fed_row for part in own] == [None] * (len(own) - 1) + [chunk.fed_row]


@pytest.mark.slow
def test_the_embedded_model_has_the_same_bits_whatever_the_batch(embedded_model: Path) -> None:
    prompts = some_prompts(5, 49000, 40)
    limits = SchedulerLimits(max_step_tokens=256)
    alone: Logits = {}
    for name, prompt in list(prompts.items())[:2]:
        engine = load_engine(embedded_model, "cpu", kv_tokens=512, limits=limits, is_invariant=True)
        alone.update(record(engine, {name: prompt}, 5))
    chunked = load_engine(
        embedded_model, "cpu", kv_tokens=512, limits=SchedulerLimits(max_step_tokens=19), is_invariant=True
    )
    for _ in range(2):
        assert differing(alone, record(chunked, prompts, 5)) == 0
    assert chunked.scheduler.num_prefix_hits > 0
