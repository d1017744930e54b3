"""How much memory keys and values may take, and how many token places it holds."""

from collections.abc import Sequence

import psutil
import torch
from transformers import PreTrainedModel

from llm.kv_cache import BLOCK_SIZE, LayerSpec, Traffic, cache_bytes

MAX_CONTEXTS = 32


def plan_kv_tokens(
    model: PreTrainedModel,
    specs: Sequence[LayerSpec],
    memory_bytes: int,
    block_size: int = BLOCK_SIZE,
    traffic: Traffic | None = None,
) -> int:
    """Say how many token places fit into `memory_bytes`, in whole blocks, at least one.

    Layers with a window take what `traffic` makes them hold. More than MAX_CONTEXTS contexts are of no use to the
    number of sequences that run at once.
    """
    context = int(model.config.get_text_config().max_position_embeddings)
    # memory grows with the number of blocks: more than `fewest` may fit, `most` + 1 does not or is of no use
    fewest, most = 1, max(1, MAX_CONTEXTS * context // block_size)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if cache_bytes(specs, middle, block_size, model.dtype, traffic) <= memory_bytes:
            fewest = middle
        else:
            most = middle - 1
    return fewest * block_size


def free_memory_bytes(device: torch.device | str) -> int:
    """Memory that blocks may take: most of a GPU's free memory, a quarter of the machine's."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.8 * free)
    return int(0.25 * psutil.virtual_memory().available)
