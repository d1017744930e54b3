"""The model card that a worker publishes: `card.json` beside the weights, or one derived from the configurations.

Source of the official models' defaults: `generate.py` of github.com/Wan-Video/Wan2.1 (50 steps, 40 from an image,
guidance 5, 81 frames) and `wan/configs/` of github.com/Wan-Video/Wan2.2 (A14B: 40 steps, a scale for each expert, a
shift of 12 or 5; TI2V-5B: 24 fps, 121 frames). The 1.3B model has FastVideo's guidance 3
(`WanT2V_1_3B_SamplingParam`) and the shift 3 of diffusers' documentation of Wan for 480p.
"""

from dataclasses import dataclass
from typing import Any

from video import attention, drift
from video.checkpoints import Checkpoint
from video.cost import Cost, Shape, cost_json, device_memory_bytes, measure_cost
from video.errors import CheckpointError
from video.extend import fit_frames
from video.manifest import device_name


@dataclass(frozen=True)
class Preset:
    """What the makers of a model recommend."""

    size: str
    max_pixels: int
    fps: int
    frames: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float


_T2V_1_3B = Preset("832x480", 832 * 480, 16, 81, 50, 3.0, None, 3.0)
_T2V_14B = Preset("832x480", 1280 * 720, 16, 81, 50, 5.0, None, 5.0)
_I2V_14B = Preset("832x480", 1280 * 720, 16, 81, 40, 5.0, None, 5.0)
_T2V_A14B = Preset("832x480", 1280 * 720, 16, 81, 40, 4.0, 3.0, 12.0)
_I2V_A14B = Preset("832x480", 1280 * 720, 16, 81, 40, 3.5, 3.5, 5.0)
_TI2V_5B = Preset("1280x704", 1280 * 704, 24, 121, 50, 5.0, None, 5.0)


def make_card(checkpoint: Checkpoint, name: str, pool: str) -> dict[str, Any]:
    """Give the card of a loaded model, with its hash and the cost measured on this device.

    Raises:
        CheckpointError: `card.json` is of another version or lacks a field that is needed here.
    """
    card = checkpoint.card or derive_card(checkpoint)
    try:
        if card["v"] != 1 or card["kind"] != "video":
            raise CheckpointError(f"card.json: must be a video card of version 1, got {card['kind']} {card['v']}.")
        cost = _measure(checkpoint, card)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"card.json: lacks or misstates a field ({error!r}).") from error
    return {
        **card,
        "name": name,
        "pool": pool,
        "hash": checkpoint.weights_hash,
        "layout": checkpoint.layout,
        "attention": list(attention.MODES),
        "on_drift": list(drift.POLICIES),
        "cost": cost_json(cost),
        "machine": {"name": device_name(checkpoint.device), "memory_bytes": device_memory_bytes(checkpoint.device)},
    }


def derive_card(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a model that has no card by its configurations and its makers' defaults."""
    preset = _find_preset(checkpoint)
    multiple, temporal = checkpoint.size_multiple, checkpoint.temporal_factor
    width, height = (int(side) for side in preset.size.split("x"))
    # a tiny model of unit tests has fewer rotary positions than a real one has patches
    longest = int(checkpoint.transformer.config.rope_max_seq_len) * multiple
    conditions = {
        "wan-t2v": ["text"],
        "wan-ti2v": ["text", "first_frame"],
        "wan-i2v": ["first_frame", "last_frame"],
    }[checkpoint.layout]
    return {
        "v": 1,
        "kind": "video",
        "revision": "unknown",
        "license": "unknown",
        "origin": f"a {checkpoint.layout} checkpoint of this machine without a card.json",
        "size": {
            "default": f"{width // multiple * multiple}x{height // multiple * multiple}",
            "multiple_of": multiple,
            "min": [multiple * 4, multiple * 4],
            "max": [min(1280, longest), min(1280, longest)],
            "max_pixels": preset.max_pixels,
        },
        "frames": {
            "rule": f"{temporal}k+1",
            "min": 1,
            "max": preset.frames,
            "default": preset.frames,
            "temporal": temporal,
        },
        "fps": preset.fps,
        "fps_range": [1, 60],
        "defaults": {
            "num_inference_steps": preset.steps,
            "guidance_scale": preset.guidance_scale,
            "guidance_scale_2": preset.guidance_scale_2,
            "seconds": 5,
            "flow_shift": preset.flow_shift,
            "negative_prompt": "",
            "scheduler": checkpoint.scheduler,
        },
        "limits": {"max_prompt_chars": 2000, "max_steps": 200, "max_seconds": 60, "max_guidance_scale": 30},
        "conditions": conditions,
    }


def _find_preset(checkpoint: Checkpoint) -> Preset:
    if checkpoint.layout == "wan-ti2v":
        return _TI2V_5B
    if checkpoint.layout == "wan-i2v":
        return _I2V_14B if checkpoint.transformer_2 is None else _I2V_A14B
    if checkpoint.transformer_2 is not None:
        return _T2V_A14B
    # 12 heads of 128 in the 1.3B model, 40 in the 14B model
    return _T2V_1_3B if checkpoint.transformer.config.num_attention_heads <= 12 else _T2V_14B


def _measure(checkpoint: Checkpoint, card: dict[str, Any]) -> Cost:
    width, height = (int(side) for side in card["size"]["default"].split("x"))
    small_width, small_height = card["size"]["min"]
    temporal = card["frames"]["temporal"]
    # two latent frames, so that the decoder's steady state is seen
    smallest = Shape(small_width, small_height, temporal + 1)
    default = Shape(width, height, fit_frames(max(card["frames"]["default"], temporal + 1), temporal))
    return measure_cost(checkpoint, smallest, default, max(float(card["defaults"]["guidance_scale"]), 1.5))
