"""The model on its device: loads a transformers folder offline, checks it, and runs one packed batch a step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm.attention import NAME, Segment, StepBatch
from llm.errors import CheckpointError, UnsupportedModel
from llm.kv_cache import Interval, KvCache, kv_bytes_per_token

# 2026-11, AMD EPYC (AVX2), one thread, SmolLM2-135M: fp32 prefills 9 times faster than bf16 (284 against 31 tokens/s)
# and decodes 8 sequences 5 times faster (54 against 10); alone bf16 decodes 1.2 times faster (16 against 13).
CPU_DTYPE = torch.float32
GPU_DTYPE = torch.bfloat16
# factors of these depend on the longest position in the batch, so an answer would depend on its neighbours
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_KINDS = {"full_attention", "sliding_attention"}
MAX_CONTEXTS = 32


class Chunk(NamedTuple):
    """New tokens of one sequence, the number that came before them, its places, and whether its logits are wanted."""

    token_ids: Sequence[int]
    past: int
    interval: Interval
    wants_logits: bool


class ModelRunner:
    """A causal language model with its pool of keys and values."""

    def __init__(self, model: PreTrainedModel, kv_cache: KvCache) -> None:
        _check_supported(model)
        model.set_attn_implementation(NAME)
        model.train(False)
        self.model = model
        self.kv_cache = kv_cache
        self.device = model.device
        self.vocab_size = int(model.lm_head.weight.shape[0])
        self.context_length = int(model.config.get_text_config().max_position_embeddings)
        self._probe()

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one step.

        Returns: logits [B, V] fp32 after the last token of each chunk that wants them, in their order.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        for chunk in chunks:
            segments.append(Segment(len(token_ids), len(chunk.token_ids), chunk.interval.start, chunk.past))
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.past, chunk.past + len(chunk.token_ids)))
            if chunk.wants_logits:
                wanted.append(len(token_ids) - 1)
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            # an empty index would be read as "all"
            logits_to_keep=torch.tensor(wanted or [len(token_ids) - 1], device=self.device),
            step_batch=StepBatch(segments, self.kv_cache),
        )
        logits: Tensor = output.logits[0].float()
        return logits if wanted else logits[:0]

    def _probe(self) -> None:
        """Run one token, so that what the model lacks shows at load and the pool is allocated."""
        interval = self.kv_cache.reserve("probe", 1)
        assert interval is not None
        logits = self.forward([Chunk([0], 0, interval, wants_logits=True)])
        self.kv_cache.free("probe")
        if not self.kv_cache.size_bytes:
            raise UnsupportedModel(f"{type(self.model).__name__}: its attention does not use the attention interface")
        if logits.shape != (1, self.vocab_size):
            raise UnsupportedModel(f"{type(self.model).__name__}: logits are {list(logits.shape)}, expected one row")


def plan_kv_tokens(model: PreTrainedModel, memory_bytes: int) -> int:
    """Say how many places a pool of `memory_bytes` has; at least one sequence of the model's whole context is aimed at.

    More than MAX_CONTEXTS contexts are of no use to the number of sequences that run at once.
    """
    config: Any = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    place_bytes = kv_bytes_per_token(config.num_hidden_layers, num_kv_heads, head_dim, model.dtype)
    return max(1, min(memory_bytes // place_bytes, MAX_CONTEXTS * int(config.max_position_embeddings)))


def free_memory_bytes(device: str) -> int:
    """Memory that a pool may take: most of a GPU's free memory, a quarter of the machine's."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.8 * free)
    return int(0.25 * psutil.virtual_memory().available)


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """Load a transformers folder, safetensors only, without the network, in the dtype that suits the device.

    Raises CheckpointError if the folder is not a complete checkpoint.
    """
    dtype = GPU_DTYPE if device.startswith("cuda") else CPU_DTYPE
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder.name} is not a checkpoint that transformers loads: {error}") from error
    assert isinstance(model, PreTrainedModel)
    # the parameters are moved in place; transformers' own wrapper of `to` carries no types
    nn.Module.to(model, device)
    return model


def _check_supported(model: PreTrainedModel) -> None:
    config: Any = model.config.get_text_config()
    name = type(model).__name__
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if stateful := sorted(kinds - _LAYER_KINDS):
        raise UnsupportedModel(f"{name}: layers of kind {', '.join(stateful)} keep a state that is not held here")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if dependent := {str(part.get("rope_type")) for part in parts}.intersection(_BATCH_DEPENDENT_ROPE):
        raise UnsupportedModel(f"{name}: rope type {', '.join(dependent)} makes answers depend on the batch")
    if not any(isinstance(module, nn.Module) and hasattr(module, "layer_idx") for module in model.modules()):
        raise UnsupportedModel(f"{name}: its attention layers are not numbered")
