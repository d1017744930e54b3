"""Model cards, version 1: all that the front must know of a model without loading it.

A card is `card.json` beside the weights; the worker that has loaded the model publishes it to the `models` table.
Sizes are WIDTHxHEIGHT. Fields that a newer worker adds are kept; another version is refused.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from media_server.errors import SchemaVersionError

CARD_VERSION = 1
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class SizeRule(_Part):
    """Which frame sizes the model takes; each is [width, height]."""

    default: str
    multiple_of: int = Field(ge=1)
    min: tuple[int, int]
    max: tuple[int, int]
    max_pixels: int = Field(ge=1)
    # the sizes it was trained on: others work, less well
    trained: list[str] = []

    @field_validator("default")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if parse_size(value) is None:
            raise ValueError("a size is WIDTHxHEIGHT")
        return value


class FrameRule(_Part):
    """How many frames one clip may have: `temporal`k + 1, from min to max."""

    rule: str
    min: int = Field(ge=1)
    max: int = Field(ge=1)
    default: int = Field(ge=1)
    temporal: int = Field(ge=1)

    def fit(self, num_frames: int) -> int:
        """Give the smallest count of the rule that holds `num_frames`: the model makes these, the rest is trimmed."""
        count = -(-max(num_frames - 1, 0) // self.temporal) * self.temporal + 1
        return max(count, self.min)


class ClipDefaults(_Part):
    """What a request that says nothing gets."""

    num_inference_steps: int = Field(ge=1)
    guidance_scale: float
    # only a model of two experts has the second scale
    guidance_scale_2: float | None = None
    seconds: float = Field(gt=0)
    flow_shift: float | None = None
    negative_prompt: str = ""
    scheduler: str = "unipc"


class ClipLimits(_Part):
    """How much one request may ask for."""

    max_prompt_chars: int = Field(ge=1)
    max_steps: int = Field(ge=1)
    max_seconds: float = Field(gt=0)
    max_guidance_scale: float = Field(ge=0)

    def max_frames(self, fps: int) -> int:
        """Give the most frames that a clip may have at this rate."""
        return int(self.max_seconds * fps + 1e-9)


class ClipCost(_Part):
    """Coefficients of time and memory by shape and steps, measured by the worker; zero where unknown."""

    seconds_fixed: float = 0.0
    seconds_per_step_token: float = 0.0
    seconds_per_frame_pixel: float = 0.0
    bytes_fixed: float = 0.0
    bytes_per_token: float = 0.0


class Machine(_Part):
    """Where the worker runs that has measured the cost: the device's name, and its memory, zero where unknown."""

    name: str
    memory_bytes: int = Field(ge=0)


class CaptionStyle(_Part):
    """How the model's prompts are written, so that a storyboard speaks its language."""

    text: str
    examples: list[str] = []
    slots: dict[str, list[str]] | None = None


class _Card(_Part):
    v: Literal[1] = 1
    name: str = Field(min_length=1)
    pool: str = Field(min_length=1)
    revision: str
    hash: str
    license: str
    origin: str


class VideoCard(_Card):
    """The card of a video model."""

    kind: Literal["video"] = "video"
    layout: str
    size: SizeRule
    frames: FrameRule
    fps: int = Field(ge=1)
    fps_range: tuple[int, int]
    defaults: ClipDefaults
    limits: ClipLimits
    cost: ClipCost = ClipCost()
    machine: Machine | None = None
    # what it can be given: text, first_frame, last_frame, overlap, stream
    conditions: list[str] = ["text"]
    attention: list[str] = ["dense"]
    on_drift: list[str] = ["report"]
    caption_style: CaptionStyle | None = None


class TextDefaults(_Part):
    """Sampling of a request that says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None


class TextCard(_Card):
    """The card of a language model; tokenizer and chat template are artifact keys."""

    kind: Literal["text"] = "text"
    context_length: int = Field(ge=1)
    tokenizer: str
    chat_template: str | None = None
    bos: str | None = None
    eos_token_ids: list[int]
    defaults: TextDefaults = TextDefaults()


ModelCard = Annotated[VideoCard | TextCard, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[VideoCard | TextCard] = TypeAdapter(ModelCard)


def parse_card(values: dict[str, Any]) -> VideoCard | TextCard:
    """Read a card. Raises SchemaVersionError if it is of another version or breaks a rule of this one."""
    if values.get("v") != CARD_VERSION:
        raise SchemaVersionError(f"A model card must be of version {CARD_VERSION}, got {values.get('v')!r}.")
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SchemaVersionError(f"The model card's {field}: {first['msg']}.", param=field) from error


def parse_size(text: str) -> tuple[int, int] | None:
    """Read WIDTHxHEIGHT in pixels; `None` if it is not written so."""
    match = _SIZE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None
