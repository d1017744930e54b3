"""A clip as it is asked for, and as a model can make it: the request's fields, and the parameters that they become.

Invariant: a caller's words stand in `prompts()` alone, so that they can be erased; `params()` holds none of them.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from media_server.validation import RequestModel, parse_request

MAX_SEED = 2**53
_MAX_METADATA = 16


class _Part(RequestModel):
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
    inputs: dict[Literal["first_frame", "last_frame", "video"], str] = Field(default_factory=dict)
    webhook_url: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=_MAX_METADATA)
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

    @property
    def work(self) -> float:
        """Denoise steps x pixels x frames: what a clip counts against its key's quota."""
        return float(self.num_inference_steps * self.width * self.height * self.num_frames)

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
