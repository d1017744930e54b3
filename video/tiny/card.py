"""The card of an embedded model: what a front must know of it, in the words that its captions were made of."""

from dataclasses import dataclass
from typing import Any

from video.tiny.captions import EXAMPLES, STYLE
from video.tiny.vocabulary import CAMERAS, COLORS, HIDDEN_ON, KINDS, MOTIONS, PLAINS, RELATIONS, SCENES, SIZES


@dataclass(frozen=True)
class Scope:
    """What a model was trained on; sizes are WIDTHxHEIGHT."""

    sizes: tuple[str, ...]
    max_sides: tuple[int, int]
    max_frames: int
    default_frames: int
    kinds: tuple[str, ...]
    scenes: tuple[str, ...]
    cameras: tuple[str, ...]
    relations: tuple[str, ...]
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float


WHOLE = Scope(
    sizes=("160x96", "96x96", "128x80", "256x144"),
    max_sides=(256, 256),
    max_frames=57,
    default_frames=33,
    kinds=KINDS,
    scenes=SCENES,
    cameras=CAMERAS,
    relations=RELATIONS,
    num_inference_steps=20,
    guidance_scale=3.0,
    flow_shift=3.0,
)
SMALL = Scope(
    sizes=("160x96", "96x64"),
    max_sides=(160, 96),
    max_frames=33,
    default_frames=33,
    kinds=KINDS,
    scenes=SCENES,
    cameras=("none",),
    relations=(),
    num_inference_steps=20,
    guidance_scale=3.0,
    flow_shift=2.0,
)


def make_card(scope: Scope, revision: str) -> dict[str, Any]:
    """Describe a model of the tiny world as `card.json`, version 1.

    Args:
        scope: what it was trained on.
        revision: names the weights for a person.
    """
    width, height = scope.max_sides
    slots = {
        "size": SIZES,
        "color": COLORS,
        "kind": scope.kinds,
        "motion": MOTIONS,
        "backdrop": (*PLAINS, *scope.scenes),
        "camera": scope.cameras,
        "relation": scope.relations,
    }
    return {
        "v": 1,
        "name": "tiny-wan",
        "kind": "video",
        "pool": "video",
        "revision": revision,
        "hash": "",
        "license": "Apache-2.0",
        "origin": "trained by video/tiny of this project on clips that it draws itself",
        "layout": "wan-ti2v",
        "size": {
            "default": scope.sizes[0],
            "multiple_of": 16,
            "min": [64, 64],
            "max": [width, height],
            "max_pixels": width * height,
            "trained": list(scope.sizes),
        },
        "frames": {
            "rule": "4k+1",
            "min": 1,
            "max": scope.max_frames,
            "default": scope.default_frames,
            "temporal": 4,
        },
        "fps": 16,
        "fps_range": [1, 60],
        "defaults": {
            "num_inference_steps": scope.num_inference_steps,
            "guidance_scale": scope.guidance_scale,
            "seconds": 2,
            "flow_shift": scope.flow_shift,
            "negative_prompt": "",
            "scheduler": "unipc",
        },
        "limits": {"max_prompt_chars": 2000, "max_steps": 200, "max_seconds": 60, "max_guidance_scale": 30},
        "conditions": ["text", "first_frame", "last_frame", "overlap"],
        "caption_style": {
            "text": STYLE,
            "examples": [example for example in EXAMPLES if _is_within(example, scope)],
            "slots": {slot: list(words) for slot, words in slots.items() if words},
            # colours that cannot be told from a backdrop, by backdrop
            "hidden_on": {backdrop: list(colors) for backdrop, colors in HIDDEN_ON.items()},
        },
    }


def _is_within(example: str, scope: Scope) -> bool:
    """Tell whether a caption names nothing that the model was not trained on."""
    words = set(example.replace(",", "").split())
    unknown = set(KINDS) - set(scope.kinds) | set(SCENES) - set(scope.scenes)
    return not words & unknown and ("camera" not in words or len(scope.cameras) > 1) and "turns" not in words
