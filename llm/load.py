"""A transformers folder as an engine, with limits and block sizes that suit its device."""

from pathlib import Path

from llguidance import LLTokenizer

from llm.engine import Engine
from llm.errors import CheckpointError
from llm.kv_cache import BLOCK_SIZE, Traffic
from llm.memory import free_memory_bytes
from llm.model_runner import ModelRunner, load_model
from llm.scheduler import SchedulerLimits

# 2026-11, one thread of an AMD EPYC, SmolLM2-135M fp32: steps of 64, 128 and 256 prompt tokens hold the running answers
# up for 0.31, 0.57 and 1.07 s and read 209, 223 and 239 tokens/s
CPU_LIMITS = SchedulerLimits(max_sequences=32, max_step_tokens=128)
GPU_LIMITS = SchedulerLimits(max_sequences=128, max_step_tokens=4096, steps_ahead=2)
# the paged kernel's step over keys, so that it reads one block at a time
GPU_BLOCK_SIZE = 64
# a CPU shares its memory with everything else, and is slow long before so many tokens
MAX_CPU_KV_TOKENS = 16384


def load_engine(
    folder: Path,
    device: str,
    *,
    kv_tokens: int | None = None,
    limits: SchedulerLimits | None = None,
    is_invariant: bool = False,
    has_guard: bool = True,
) -> Engine:
    """Load a transformers folder as an engine.

    Args:
        folder: config.json, safetensors, tokenizer.json.
        device: "cpu" or "cuda:N".
        kv_tokens: token places of keys and values, for all sequences together; None: what memory holds, on a CPU at
            most MAX_CPU_KV_TOKENS.
        is_invariant: give the same bits whatever the batch (`llm.invariant`), at a price.
        has_guard: guard against collapses the requests that ask for it.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedModel: the architecture would be computed wrongly.
    """
    is_cpu = device == "cpu"
    if limits is None:
        limits = CPU_LIMITS if is_cpu else GPU_LIMITS
    runner = ModelRunner(
        load_model(folder, device),
        kv_tokens,
        max_kv_tokens=MAX_CPU_KV_TOKENS if is_cpu else None,
        block_size=BLOCK_SIZE if is_cpu else GPU_BLOCK_SIZE,
        traffic=Traffic(limits.max_sequences, limits.max_step_tokens),
        is_invariant=is_invariant,
    )
    eos_token_ids = _eos_token_ids(runner)
    try:
        text = (folder / "tokenizer.json").read_text()
        tokenizer = LLTokenizer(text, n_vocab=runner.vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: tokenizer.json cannot be read: {error}") from error
    # a CPU computes anew what it would only copy beside itself
    offload_bytes = 0 if is_cpu else free_memory_bytes("cpu")
    return Engine(runner, tokenizer, eos_token_ids, limits, offload_bytes=offload_bytes, has_guard=has_guard)


def _eos_token_ids(runner: ModelRunner) -> tuple[int, ...]:
    """Take the ends that the generation configuration names, or the model's own."""
    generation = runner.model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = runner.model.config.get_text_config().eos_token_id
    if eos is None:
        raise CheckpointError("The model names no end-of-text token, so no answer would ever end.")
    return (eos,) if isinstance(eos, int) else tuple(eos)
