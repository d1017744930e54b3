"""A clip's request against a model's card: defaults filled in, each rule checked, nothing clamped in silence.

`num_frames` (or `seconds` times `fps`) is the length that comes out, exactly: the video program makes the next count
of the model's frame rule and trims. A clip longer than the model's longest becomes chained segments, each continuing
from the last frames of the one before; the answer says so in `adjusted`.
"""

import secrets
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from media_server.errors import InvalidRequest
from media_server.models.card import VideoCard, parse_size
from media_server.validation import parse_request

MAX_SEED = 2**53
_MAX_METADATA = 16


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AttentionRequest(_Part):
    """How attention is computed: all of it, or the densest blocks."""

    mode: Literal["dense", "sparse"] = "dense"
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    dense_steps: Annotated[int, Field(ge=0)] | None = None
    dense_layers: Annotated[int, Field(ge=0)] | None = None


class ExtendRequest(_Part):
    """A chained clip: in how many segments, or how long in all; further prompts, one a segment."""

    segments: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    prompts: list[str] | None = None
    overlap_frames: Annotated[int, Field(ge=1)] | None = None
    anchor: bool = False
    on_drift: Literal["stop", "correct", "retry", "report"] = "report"


class OutputRequest(_Part):
    """The file that comes out."""

    container: Literal["mp4"] = "mp4"
    codec: Literal["h264"] = "h264"
    crf: Annotated[int, Field(ge=0, le=51)] | None = None
    image_sequence: Literal["png"] | None = None


class ClipRequest(_Part):
    """What a caller may say about a clip; None is the model's default. `inputs` are artifact keys, set by the API."""

    prompt: str
    model: str | None = None
    size: str | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[int, Field(ge=1)] | None = None
    negative_prompt: str | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    guidance_scale_2: Annotated[float, Field(ge=0)] | None = None
    attention: AttentionRequest | None = None
    extend: ExtendRequest | None = None
    output: OutputRequest = OutputRequest()
    inputs: dict[Literal["first_frame", "last_frame", "video"], str] = {}
    webhook_url: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] = {}
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


class Adjustment(_Part):
    """Something that is done otherwise than asked, and the rule that made it so."""

    param: str
    rule: str
    asked: float | int | str
    given: str


class Segments(_Part):
    """A clip in chained segments; `segment_frames` are the frames that each one adds, and sum to `num_frames`."""

    segments: int
    segment_frames: list[int]
    overlap_frames: int
    anchor: bool
    on_drift: str


class ClipParams(_Part):
    """A clip that the model can make: every parameter is set. `params()` goes into the row, `prompts()` apart."""

    prompt: str
    negative_prompt: str
    segment_prompts: list[str]
    size: str
    width: int
    height: int
    fps: int
    num_frames: int
    seconds: float
    seed: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float | None
    attention: AttentionRequest
    extend: Segments | None
    output: OutputRequest
    inputs: dict[str, str]
    model_hash: str
    adjusted: list[Adjustment]

    def params(self) -> dict[str, Any]:
        """Give the job's parameters, as JSON and without a word of the caller's."""
        return self.model_dump(mode="json", exclude={"prompt", "negative_prompt", "segment_prompts"})

    def prompts(self) -> dict[str, str]:
        """Give the job's prompts: `prompt`, `negative_prompt` and `segment.<i>` for each segment's own."""
        texts = {"prompt": self.prompt}
        if self.negative_prompt:
            texts["negative_prompt"] = self.negative_prompt
        return texts | {f"segment.{index}": text for index, text in enumerate(self.segment_prompts)}


class Cost(_Part):
    """What a clip is predicted to take."""

    seconds: float
    peak_memory_bytes: float


def parse_clip_request(values: dict[str, Any]) -> ClipRequest:
    """Read a request's fields. Raises InvalidRequest that names the field, the rule and the value."""
    return parse_request(ClipRequest, values)


def validate_clip(card: VideoCard, request: ClipRequest) -> ClipParams:
    """Fill in a clip's request from the card and check it against the card's rules.

    Raises InvalidRequest with the field, the rule and the value.
    """
    _check_prompt(card, "prompt", request.prompt)
    negative = card.defaults.negative_prompt if request.negative_prompt is None else request.negative_prompt
    _check_length(card, "negative_prompt", negative)
    for key, text in request.metadata.items():
        if len(key) > 64 or len(text) > 512:
            _refuse("metadata", "keys have at most 64 characters, values at most 512", key[:64])
        check_characters("metadata", key + text)
    for name in request.inputs:
        needed = "overlap" if name == "video" else name
        if needed not in card.conditions:
            param = {"first_frame": "input_reference"}.get(name, name)
            _refuse(param, f"{card.name} takes {', '.join(card.conditions)}", name)
    width, height = _size(card, request)
    fps = card.fps if request.fps is None else request.fps
    if not card.fps_range[0] <= fps <= card.fps_range[1]:
        _refuse("fps", f"from {card.fps_range[0]} to {card.fps_range[1]}", fps)
    overlap = _overlap(card, request)
    num_frames = _num_frames(card, request, fps, overlap)
    extend, adjusted = _segments(card, request, num_frames, overlap)
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


def estimate_cost(card: VideoCard, params: ClipParams) -> Cost:
    """Predict a clip's GPU seconds and peak memory from the card's coefficients."""
    lengths = [params.num_frames]
    if params.extend is not None:
        first, *rest = params.extend.segment_frames
        lengths = [first, *(count + params.extend.overlap_frames for count in rest)]
    seconds, tokens = 0.0, 0
    for length in lengths:
        latent_frames = (card.frames.fit(length) - 1) // card.frames.temporal + 1
        tokens = latent_frames * (params.width // card.size.multiple_of) * (params.height // card.size.multiple_of)
        pixels = card.frames.fit(length) * params.width * params.height
        seconds += params.num_inference_steps * tokens * card.cost.seconds_per_step_token
        seconds += pixels * card.cost.seconds_per_frame_pixel
    return Cost(
        seconds=card.cost.seconds_fixed + seconds,
        peak_memory_bytes=card.cost.bytes_fixed + tokens * card.cost.bytes_per_token,
    )


def _refuse(param: str, rule: str, value: object) -> NoReturn:
    raise InvalidRequest(f"{param}: {rule}, got {value!r}.", param=param, rule=rule, value=value)


def _check_prompt(card: VideoCard, param: str, text: str) -> None:
    if not text.strip():
        _refuse(param, "must not be empty", text)
    _check_length(card, param, text)


def check_characters(param: str, text: str) -> None:
    """Raise InvalidRequest if a text holds what UTF-8 or PostgreSQL cannot: half a surrogate pair, or NUL."""
    for index, character in enumerate(text):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            _refuse(param, "must hold neither NUL nor half a surrogate pair", f"U+{ord(character):04X} at {index}")


def _check_length(card: VideoCard, param: str, text: str) -> None:
    check_characters(param, text)
    if len(text) > card.limits.max_prompt_chars:
        _refuse(param, f"at most {card.limits.max_prompt_chars} characters", len(text))


def _size(card: VideoCard, request: ClipRequest) -> tuple[int, int]:
    rule = card.size
    asked = rule.default if request.size is None else request.size
    size = parse_size(asked)
    if size is None:
        _refuse("size", "must be WIDTHxHEIGHT in pixels", asked)
    for axis, pixels, low, high in zip(("width", "height"), size, rule.min, rule.max, strict=True):
        if pixels % rule.multiple_of:
            _refuse("size", f"{axis} must be a multiple of {rule.multiple_of}", asked)
        if not low <= pixels <= high:
            _refuse("size", f"{axis} from {low} to {high}", asked)
    if size[0] * size[1] > rule.max_pixels:
        _refuse("size", f"at most {rule.max_pixels} pixels", asked)
    return size


def _overlap(card: VideoCard, request: ClipRequest) -> int:
    """Frames that a segment takes over from the one before: its last frame, or as many as the model can hold."""
    asked = request.extend.overlap_frames if request.extend else None
    if asked is None:
        return card.frames.temporal + 1 if "overlap" in card.conditions else 1
    if asked > 1 and "overlap" not in card.conditions:
        _refuse("extend.overlap_frames", f"{card.name} continues from one frame", asked)
    if asked != card.frames.fit(asked) and asked != 1:
        _refuse("extend.overlap_frames", f"must follow the frame rule {card.frames.rule}", asked)
    if asked >= card.frames.max:
        _refuse("extend.overlap_frames", f"must be below {card.frames.max}", asked)
    return asked


def _num_frames(card: VideoCard, request: ClipRequest, fps: int, overlap: int) -> int:
    """Find the one length that was asked for; all ways of saying it must agree."""
    asked: dict[str, int] = {}
    if request.num_frames is not None:
        asked["num_frames"] = request.num_frames
    if request.seconds is not None:
        asked["seconds"] = round(request.seconds * fps)
    if request.extend is not None and request.extend.seconds is not None:
        asked["extend.seconds"] = round(request.extend.seconds * fps)
    if len(set(asked.values())) > 1:
        _refuse(next(iter(asked)), f"lengths must agree at {fps} fps", asked)
    if asked:
        param, num_frames = next(iter(asked.items()))
    else:
        param, num_frames = "seconds", round(card.defaults.seconds * fps)
        if request.extend is not None and request.extend.segments is not None:
            # each segment as long as a clip of its own
            param = "extend.segments"
            single = min(num_frames, card.frames.max)
            num_frames = single + (request.extend.segments - 1) * max(single - overlap, 1)
    if num_frames < 1:
        _refuse(param, f"at least one frame at {fps} fps", getattr(request, param, None))
    most = int(card.limits.max_seconds * fps + 1e-9)
    if num_frames > most:
        _refuse(param, f"at most {card.limits.max_seconds:g} s, which is {most} frames at {fps} fps", num_frames)
    return num_frames


def _segments(
    card: VideoCard, request: ClipRequest, num_frames: int, overlap: int
) -> tuple[Segments | None, list[Adjustment]]:
    longest = card.frames.max
    asked = request.extend.segments if request.extend else None
    needed = 1 if num_frames <= longest else 1 + -(-(num_frames - longest) // (longest - overlap))
    if asked is not None and asked < needed:
        _refuse("extend.segments", f"{num_frames} frames need at least {needed} segments", asked)
    if asked is not None and asked > num_frames:
        _refuse("extend.segments", f"at most one segment a frame, of {num_frames}", asked)
    count = asked or needed
    on_drift = request.extend.on_drift if request.extend else "report"
    if on_drift not in card.on_drift:
        _refuse("extend.on_drift", f"{card.name} offers {', '.join(card.on_drift)}", on_drift)
    if count == 1:
        return None, []
    if not {"first_frame", "overlap"} & set(card.conditions):
        _refuse("seconds", f"{card.name} cannot continue a clip: at most {longest} frames", num_frames)
    # equal lengths as generated: the first segment has no overlap to repeat
    total = num_frames + (count - 1) * overlap
    made = [total // count + (index < total % count) for index in range(count)]
    frames = [made[0], *(length - overlap for length in made[1:])]
    if min(frames) < 1:
        _refuse("extend.segments", f"{num_frames} frames are too few with an overlap of {overlap}", count)
    adjusted = []
    if request.extend is None:
        adjusted.append(
            Adjustment(
                param="num_frames" if request.num_frames is not None else "seconds",
                rule=f"{card.name} makes at most {longest} frames in one piece",
                asked=num_frames if request.num_frames is not None else num_frames / (request.fps or card.fps),
                given=f"{count} chained segments, {num_frames} frames in all",
            )
        )
    segments = Segments(
        segments=count,
        segment_frames=frames,
        overlap_frames=overlap,
        anchor=request.extend.anchor if request.extend else False,
        on_drift=on_drift,
    )
    return segments, adjusted


def _segment_prompts(card: VideoCard, request: ClipRequest, extend: Segments | None) -> list[str]:
    texts = request.extend.prompts if request.extend else None
    if not texts:
        return []
    count = extend.segments if extend else 1
    if len(texts) != count:
        _refuse("extend.prompts", f"one for each of the {count} segments", len(texts))
    for index, text in enumerate(texts):
        _check_prompt(card, f"extend.prompts.{index}", text)
    return texts


def _steps(card: VideoCard, request: ClipRequest) -> int:
    steps = request.num_inference_steps
    if steps is None:
        return card.defaults.num_inference_steps
    if steps > card.limits.max_steps:
        _refuse("num_inference_steps", f"at most {card.limits.max_steps}", steps)
    return steps


def _guidance(card: VideoCard, param: str, asked: float | None, default: float) -> float:
    if asked is None:
        return default
    if asked > card.limits.max_guidance_scale:
        _refuse(param, f"at most {card.limits.max_guidance_scale:g}", asked)
    return asked


def _second_guidance(card: VideoCard, request: ClipRequest) -> float | None:
    if card.defaults.guidance_scale_2 is None:
        if request.guidance_scale_2 is not None:
            _refuse("guidance_scale_2", f"{card.name} has one expert, and so one scale", request.guidance_scale_2)
        return None
    return _guidance(card, "guidance_scale_2", request.guidance_scale_2, card.defaults.guidance_scale_2)


def _attention(card: VideoCard, request: ClipRequest) -> AttentionRequest:
    attention = request.attention or AttentionRequest()
    if attention.mode not in card.attention:
        _refuse("attention.mode", f"{card.name} offers {', '.join(card.attention)}", attention.mode)
    if attention.mode == "dense":
        for name in ("density", "dense_steps", "dense_layers"):
            value = getattr(attention, name)
            if value is not None:
                _refuse(f"attention.{name}", "needs mode sparse", value)
    return attention
