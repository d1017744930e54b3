"""What a training run leaves behind: a log of JSON lines, resumable states, weights.

Invariants: a file appears whole or not at all (written aside, then renamed); a log line is flushed when it is written.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

SHARD_BYTES = 14 * 2**20


class Log:
    """Appends JSON lines `{stage, seconds, ...}` to a file; seconds count from the log's opening."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")
        self.started_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    def write(self, stage: str, **fields: Any) -> None:
        rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in fields.items()}
        line = json.dumps({"stage": stage, "seconds": round(self.seconds, 2), **rounded})
        self.file.write(line + "\n")
        self.file.flush()
        logger.info("%s", line)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a resumable state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    torch.save(state, aside)
    os.replace(aside, path)


def load_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Read a state of `save_state`; None where there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def save_weights(directory: Path, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write fp32 weights as `name-0.safetensors`, `name-1.safetensors`, ... of at most about 14 MiB each.

    Args:
        directory: made where it is missing.
        name: of the part, such as "transformer".
        tensors: by parameter name; moved to the CPU in fp32.
        about: JSON-able facts, kept under the key "about" of each shard's metadata.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key in sorted(tensors):
        tensor = tensors[key].detach().float().cpu().contiguous().clone()
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    for index, shard in enumerate(shards):
        path = directory / f"{name}-{index}.safetensors"
        aside = path.with_suffix(".part")
        save_file(shard, aside, metadata={"about": json.dumps(about)})
        os.replace(aside, path)


def load_weights(directory: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_weights` wrote: the tensors and the facts.

    Raises:
        FileNotFoundError: if there is no shard of that name.
    """
    paths = sorted(directory.glob(f"{name}-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"load_weights: no {name}-*.safetensors in {directory}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= load_file(path)
    with safe_open(paths[0], framework="pt") as shard:
        about: dict[str, Any] = json.loads(shard.metadata()["about"])
    return tensors, about
