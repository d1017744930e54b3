"""The manifest of a clip: with the prompts and the input files it makes the same frames again.

On the same machine, device, versions and threads the frames are equal bit for bit, which `frames_sha256` shows;
elsewhere sums are rounded in another order. Prompts stand in it as hashes only: their text can be erased alone.
"""

import hashlib
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from video.attention import KERNEL_DENSE
from video.checkpoints import Checkpoint
from video.extend import Segment
from video.loop import is_guidance_batched
from video.output import WrittenClip
from video.request import ClipInputs, ClipRequest

MANIFEST_VERSION = 1
_PACKAGES = ("media-server", "torch", "diffusers", "transformers", "tokenizers", "av", "numpy")


def make_manifest(
    checkpoint: Checkpoint,
    card: dict[str, Any],
    request: ClipRequest,
    inputs: ClipInputs,
    segments: list[Segment],
    drift: dict[str, Any],
    written: WrittenClip,
    threads: int,
) -> dict[str, Any]:
    """Say all that makes the clip again, but for the prompts: of these the hashes, so that they can be erased."""
    values = asdict(request)
    texts = {name: values.pop(name) for name in ("prompt", "negative_prompt", "segment_prompts")}
    values["fps"] = written.facts.to_json()["fps"]
    paths = {name: path for name, path in vars(inputs).items() if path is not None}
    tokens = [checkpoint.num_tokens(segment.made_frames, request.height, request.width) for segment in segments]
    return {
        "v": MANIFEST_VERSION,
        "model": {
            "name": card.get("name"),
            "revision": card.get("revision"),
            "hash": checkpoint.weights_hash,
            "layout": checkpoint.layout,
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "device": checkpoint.device.type,
            "name": device_name(checkpoint.device),
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
            "threads": threads,
        },
        "kernel_path": KERNEL_DENSE,
        "seed": request.seed,
        "parameters": {**values, "scheduler": request.scheduler or checkpoint.scheduler},
        "prompts_sha256": {
            "prompt": _sha256(texts["prompt"]),
            "negative_prompt": _sha256(texts["negative_prompt"]),
            "segment_prompts": [_sha256(text) for text in texts["segment_prompts"]],
        },
        "inputs_sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()},
        "segments": [
            {**asdict(segment), "tokens": count, "guidance_batched": is_guidance_batched(count)}
            for segment, count in zip(segments, tokens, strict=True)
        ],
        "drift": drift,
        "file": written.facts.to_json(),
        "frames_sha256": written.frames_sha256,
        "spritesheet": written.spritesheet,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def device_name(device: torch.device) -> str:
    """Name a GPU, or the architecture of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
