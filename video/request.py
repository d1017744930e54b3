"""A clip's request as the video program reads it, and the files that come with it.

The front has filled in every parameter and checked it against the card; what is checked here protects this program.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from video.errors import InvalidClip
from video.extend import MAX_SEED


@dataclass(frozen=True)
class ClipRequest:
    """A clip as it is asked for; every parameter is set. Read by `read_request`."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: Fraction
    seed: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float | None
    scheduler: str | None
    attention: dict[str, Any]
    extend: dict[str, Any] | None
    output: dict[str, Any]
    # one for each segment, or none: then `prompt` is every segment's
    segment_prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClipInputs:
    """Files that a clip begins or ends with; a video is continued, and its frames stand at the head of the file."""

    first_frame: Path | None = None
    last_frame: Path | None = None
    video: Path | None = None


def read_request(values: dict[str, Any]) -> ClipRequest:
    """Read a request from JSON.

    Raises:
        InvalidClip: a field is missing, of the wrong kind, or out of its range.
    """
    try:
        extend = values.get("extend")
        request = ClipRequest(
            prompt=str(values["prompt"]),
            negative_prompt=str(values.get("negative_prompt") or ""),
            width=int(values["width"]),
            height=int(values["height"]),
            num_frames=int(values["num_frames"]),
            fps=Fraction(str(values["fps"])),
            seed=int(values["seed"]),
            num_inference_steps=int(values["num_inference_steps"]),
            guidance_scale=float(values["guidance_scale"]),
            guidance_scale_2=None if values.get("guidance_scale_2") is None else float(values["guidance_scale_2"]),
            flow_shift=None if values.get("flow_shift") is None else float(values["flow_shift"]),
            scheduler=values.get("scheduler"),
            attention=dict(values.get("attention") or {}),
            extend=None if extend is None else dict(extend),
            output=dict(values.get("output") or {}),
            segment_prompts=tuple(str(text) for text in values.get("segment_prompts") or ()),
        )
    except KeyError as error:
        raise InvalidClip(f"{error.args[0]}: this field is required.") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidClip(f"request: {error}.") from error
    for name in ("num_frames", "num_inference_steps", "width", "height"):
        if getattr(request, name) < 1:
            raise InvalidClip(f"{name}: must be at least 1, got {getattr(request, name)}.")
    if request.fps <= 0:
        raise InvalidClip(f"fps: must be above 0, got {request.fps}.")
    if not 0 <= request.seed < MAX_SEED:
        raise InvalidClip(f"seed: must be from 0 to 2**53 - 1, got {request.seed}.")
    return request
