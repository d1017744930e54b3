"""What callers send: the fields of each body, as OpenAI names them and as we name the rest.

The same models read JSON and forms: numbers and booleans may be strings, and an object may be JSON text in one field.
The model's own rules (sizes, lengths, limits) are the card's and are checked by models.clip.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from starlette.datastructures import UploadFile

from media_server.films import FilmRequest
from media_server.http_errors import invalid_from
from media_server.models.clip import MAX_SEED, AttentionRequest, ExtendRequest, OutputRequest
from media_server.validation import RequestModel

# ids of other services may be looked up too: they are answered with 404
ID_PATTERN = r"^[A-Za-z0-9_-]{1,80}$"
_ID = "video_0192f0c1a5b07cc2a3f44b6f1d2e3c4d"


def _json_text(value: object) -> object:
    """Read an object that a form sent as JSON text; what is no JSON stays text and fails by its type."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value, object_pairs_hook=_unique_names)
        except (json.JSONDecodeError, RecursionError):
            return value
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("each name stands once in one object")
    return values


def _image_text(value: object) -> object:
    """Take a bare string as the URL of an image."""
    value = _json_text(value)
    return {"image_url": value} if isinstance(value, str) else value


def _video_text(value: object) -> object:
    """Take a bare string as the id of a clip."""
    value = _json_text(value)
    return {"id": value} if isinstance(value, str) else value


class _Body(RequestModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ImageReference(_Body):
    """An image that is not uploaded: an https URL or data URI, or the last frame of a clip made here."""

    image_url: str | None = Field(
        None,
        description="An https URL, or data:image/png;base64,… within the limit of JSON bodies (1 MiB unless "
        "`max_body_bytes` says otherwise): larger images are uploaded as multipart/form-data.",
    )
    file_id: str | None = Field(None, description="The id of a clip; its last frame is taken.", pattern=ID_PATTERN)

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.image_url is None) == (self.file_id is None):
            raise ValueError("exactly one of image_url and file_id")
        return self


class VideoReference(_Body):
    """A clip made here."""

    id: str = Field(pattern=ID_PATTERN)


Image = Annotated[ImageReference | None, BeforeValidator(_image_text)]
# OpenAI has it as a string
Seconds = Annotated[
    float,
    Field(gt=0),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["4"]}]}),
]
Metadata = Annotated[dict[str, str], Field(default_factory=dict, max_length=16), BeforeValidator(_json_text)]
Label = Annotated[str | None, Field(max_length=128, description="Project label of the usage ledger.")]
WebhookUrl = Annotated[str | None, Field(description="An https URL that is told when the job has ended.")]
Priority = Annotated[int, Field(ge=-100, le=100, description="Higher starts earlier, among one owner's jobs.")]
Seed = Annotated[int | None, Field(ge=0, lt=MAX_SEED, description="The same seed makes the same clip again.")]


class VideoRequest(_Body):
    """A clip to be made. What is left out is the model's default."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "a red ball rolls over a green field", "seconds": "2", "size": "160x96", "seed": 7},
                {
                    "prompt": "the ball comes to rest",
                    "input_reference": {"image_url": "https://example.com/ball.png"},
                    "num_frames": 33,
                    "metadata": {"project": "demo"},
                },
            ]
        }
    )

    prompt: str
    model: str | None = Field(None, max_length=200)
    seconds: Seconds | None = None
    size: str | None = Field(None, max_length=20, description="WIDTHxHEIGHT", examples=["160x96"])
    input_reference: Image = Field(
        None, description="First frame. Cropped to the clip's aspect around its centre and scaled; the answer says how."
    )
    last_frame: Image = Field(None, description="Last frame, for models that take one; treated as the first one is.")
    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[int, Field(ge=1)] | None = None
    negative_prompt: str | None = None
    seed: Seed = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    guidance_scale_2: Annotated[float, Field(ge=0)] | None = None
    attention: Annotated[AttentionRequest | None, BeforeValidator(_json_text)] = None
    extend: Annotated[ExtendRequest | None, BeforeValidator(_json_text)] = None
    output: Annotated[OutputRequest, BeforeValidator(_json_text)] = OutputRequest()
    webhook_url: WebhookUrl = None
    metadata: Metadata
    priority: Priority = 0
    label: Label = None


class ExtensionRequest(_Body):
    """A clip to be continued from its last frames; the file that comes out begins with the clip given."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "the ball stops", "seconds": "2", "video": {"id": _ID}}]}
    )

    prompt: str
    seconds: Seconds = Field(description="How much is added.")
    video: Annotated[VideoReference | None, BeforeValidator(_video_text)] = Field(
        None, description="The id of a completed clip, or an uploaded file."
    )
    model: str | None = Field(None, max_length=200, description="For an uploaded clip; one made here keeps its own.")
    negative_prompt: str | None = None
    seed: Seed = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    guidance_scale_2: Annotated[float, Field(ge=0)] | None = None
    attention: Annotated[AttentionRequest | None, BeforeValidator(_json_text)] = None
    extend: Annotated[ExtendRequest | None, BeforeValidator(_json_text)] = None
    output: Annotated[OutputRequest, BeforeValidator(_json_text)] = OutputRequest()
    webhook_url: WebhookUrl = None
    metadata: Metadata
    priority: Priority = 0
    label: Label = None


class RemixRequest(_Body):
    """A clip to be made again with another prompt: same model, shape, steps, frames given, and seed unless named."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "a blue ball rolls over a green field"}]})

    prompt: str
    negative_prompt: str | None = None
    seed: Seed = None
    webhook_url: WebhookUrl = None
    metadata: Metadata
    priority: Priority = 0
    label: Label = None


class FilmBody(FilmRequest):
    """A film to be made from an idea. What is left out, the storyboard or the model's card decides."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"idea": "a red ball looks for its blue friend", "seconds": 8, "shots": 3, "seed": 7}]
        }
    )

    metadata: Metadata


BodyT = TypeVar("BodyT", bound=BaseModel)

BODIES: list[type[BaseModel]] = [VideoRequest, ExtensionRequest, RemixRequest, FilmBody]


def parse_body(model: type[BodyT], values: Mapping[str, Any]) -> BodyT:
    """Read a body's fields. Raises InvalidRequest that names the field, the rule and the value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_from(error) from error


def take_files(values: dict[str, Any], *names: str) -> dict[str, UploadFile]:
    """Take the uploads of these fields out of a body."""
    return {name: values.pop(name) for name in names if isinstance(values.get(name), UploadFile)}
