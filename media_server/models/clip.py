"""A clip's request against a model's card: defaults filled in, each rule checked, nothing clamped in silence.

`num_frames` (or `seconds` times `fps`) is the length that comes out, exactly: the video program makes the next count
of the model's frame rule and trims. A clip longer than the model's longest becomes chained segments, each continuing
from the last frames of the one before; the answer says so in `adjusted`.
"""

import secrets
from collections.abc import Mapping

from media_server.models.card import VideoCard, parse_size
from media_server.models.clip_length import check_known_frames, find_num_frames, find_overlap, plan_segments
from media_server.models.clip_request import (
    MAX_SEED,
    Adjustment,
    AttentionRequest,
    ClipParams,
    ClipRequest,
    ExtendRequest,
    OutputRequest,
    Segments,
    parse_clip_request,
)
from media_server.validation import refuse

__all__ = [
    "MAX_SEED",
    "Adjustment",
    "AttentionRequest",
    "ClipParams",
    "ClipRequest",
    "ExtendRequest",
    "OutputRequest",
    "Segments",
    "check_characters",
    "check_metadata",
    "parse_clip_request",
    "validate_clip",
]


# OpenAI's own limits
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


def validate_clip(card: VideoCard, request: ClipRequest) -> ClipParams:
    """Fill in a clip's request from the card and check it against the card's rules.

    Raises InvalidRequest with the field, the rule and the value.
    """
    _check_prompt(card, "prompt", request.prompt)
    negative = card.defaults.negative_prompt if request.negative_prompt is None else request.negative_prompt
    _check_length(card, "negative_prompt", negative)
    check_metadata(request.metadata)
    _check_inputs(card, request)
    width, height = _size(card, request)
    fps = card.fps if request.fps is None else request.fps
    if not card.fps_range[0] <= fps <= card.fps_range[1]:
        refuse("fps", f"from {card.fps_range[0]} to {card.fps_range[1]}", fps)
    overlap = find_overlap(card, request)
    num_frames = find_num_frames(card, request, fps, overlap)
    extend, adjusted = plan_segments(card, request, num_frames, overlap)
    check_known_frames(card, request, num_frames, extend)
    return ClipParams(
        prompt=request.prompt,
        negative_prompt=negative,
        segment_prompts=_segment_prompts(card, request, extend),
        size=f"{width}x{height}",
        width=width,
        height=height,
        fps=fps,
        num_frames=num_frames,
        seconds=num_frames / fps,
        seed=secrets.randbelow(MAX_SEED) if request.seed is None else request.seed,
        num_inference_steps=_steps(card, request),
        guidance_scale=_guidance(card, "guidance_scale", request.guidance_scale, card.defaults.guidance_scale),
        guidance_scale_2=_second_guidance(card, request),
        flow_shift=card.defaults.flow_shift,
        attention=_attention(card, request),
        extend=extend,
        output=request.output,
        inputs={str(name): key for name, key in request.inputs.items()},
        model_hash=card.hash,
        adjusted=adjusted,
    )


def _check_prompt(card: VideoCard, param: str, text: str) -> None:
    if not text.strip():
        refuse(param, "must not be empty", text)
    _check_length(card, param, text)


def check_characters(param: str, text: str) -> None:
    """Raise InvalidRequest if a text holds what UTF-8 or PostgreSQL cannot: half a surrogate pair, or NUL."""
    for index, character in enumerate(text):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            refuse(param, "must hold neither NUL nor half a surrogate pair", f"U+{ord(character):04X} at {index}")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise InvalidRequest if a key or a value of a job's metadata is too long, or holds what cannot be stored."""
    for key, text in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
            rule = f"keys have at most {MAX_METADATA_KEY} characters, values at most {MAX_METADATA_VALUE}"
            refuse("metadata", rule, key[:MAX_METADATA_KEY])
        check_characters("metadata", key + text)


def _check_length(card: VideoCard, param: str, text: str) -> None:
    check_characters(param, text)
    if len(text) > card.limits.max_prompt_chars:
        refuse(param, f"at most {card.limits.max_prompt_chars} characters", len(text))


def _check_inputs(card: VideoCard, request: ClipRequest) -> None:
    """Refuse frames that the model does not take, and a request without those that it needs."""
    for name in request.inputs:
        # a clip is continued from its last frames, or by a model that takes one image from its last one
        needed = {"overlap", "first_frame"} if name == "video" else {name}
        if not needed & set(card.conditions):
            param = {"first_frame": "input_reference"}.get(name, name)
            refuse(param, f"{card.name} takes {', '.join(card.conditions)}", name)
    if "text" not in card.conditions and not {"first_frame", "video"} & set(request.inputs):
        refuse("input_reference", f"{card.name} makes no clip from text alone: it needs a first frame", None)
    if request.extend is not None and request.extend.anchor:
        refuse("extend.anchor", "is not offered: segments continue from the frames before them alone", True)


def _size(card: VideoCard, request: ClipRequest) -> tuple[int, int]:
    rule = card.size
    asked = rule.default if request.size is None else request.size
    size = parse_size(asked)
    if size is None:
        refuse("size", "must be WIDTHxHEIGHT in pixels", asked)
    for axis, pixels, low, high in zip(("width", "height"), size, rule.min, rule.max, strict=True):
        if pixels % rule.multiple_of:
            refuse("size", f"{axis} must be a multiple of {rule.multiple_of}", asked)
        if not low <= pixels <= high:
            refuse("size", f"{axis} from {low} to {high}", asked)
    if size[0] * size[1] > rule.max_pixels:
        refuse("size", f"at most {rule.max_pixels} pixels", asked)
    return size


def _segment_prompts(card: VideoCard, request: ClipRequest, extend: Segments | None) -> list[str]:
    texts = request.extend.prompts if request.extend else None
    if not texts:
        return []
    count = extend.segments if extend else 1
    if len(texts) != count:
        refuse("extend.prompts", f"one for each of the {count} segments", len(texts))
    for index, text in enumerate(texts):
        _check_prompt(card, f"extend.prompts.{index}", text)
    return texts


def _steps(card: VideoCard, request: ClipRequest) -> int:
    steps = request.num_inference_steps
    if steps is None:
        return card.defaults.num_inference_steps
    if steps > card.limits.max_steps:
        refuse("num_inference_steps", f"at most {card.limits.max_steps}", steps)
    return steps


def _guidance(card: VideoCard, param: str, asked: float | None, default: float) -> float:
    if asked is None:
        return default
    if asked > card.limits.max_guidance_scale:
        refuse(param, f"at most {card.limits.max_guidance_scale:g}", asked)
    return asked


def _second_guidance(card: VideoCard, request: ClipRequest) -> float | None:
    if card.defaults.guidance_scale_2 is None:
        if request.guidance_scale_2 is not None:
            refuse("guidance_scale_2", f"{card.name} has one expert, and so one scale", request.guidance_scale_2)
        return None
    return _guidance(card, "guidance_scale_2", request.guidance_scale_2, card.defaults.guidance_scale_2)


def _attention(card: VideoCard, request: ClipRequest) -> AttentionRequest:
    attention = request.attention or AttentionRequest()
    if attention.mode not in card.attention:
        refuse("attention.mode", f"{card.name} offers {', '.join(card.attention)}", attention.mode)
    if attention.mode == "dense":
        for name in ("density", "dense_steps", "dense_layers"):
            value = getattr(attention, name)
            if value is not None:
                refuse(f"attention.{name}", "needs mode sparse", value)
    return attention
