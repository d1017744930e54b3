"""What the API answers with: OpenAI's objects with our fields beside theirs, and our own resources.

Times are whole unix seconds, as OpenAI has them; links are paths on this service.
"""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from media_server.jobs.states import Status
from media_server.models.clip import Adjustment

_ID = "0192f0c1a5b07cc2a3f44b6f1d2e3c4d"


class JobFailure(BaseModel):
    """Why a job failed."""

    code: str = Field(examples=["out_of_memory"])
    message: str


class Progress(BaseModel):
    """Where a job stands; each job object has these fields."""

    status: Status
    progress: int = Field(ge=0, le=100, description="Percent; never falls within one attempt.")
    stage: str | None = Field(description="What is being done, such as `denoise`.")
    step: int | None = Field(description="Steps done of `total_steps`.")
    total_steps: int | None
    eta_s: float | None = Field(description="Seconds to the end, waiting included, as far as known.")
    queue_position: int | None = Field(description="How many jobs start before this one; null once it has started.")
    attempt: int = Field(description="How often it has been started; a lost worker starts it again.")
    max_attempts: int
    is_cancel_requested: bool
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None = Field(description="When its files are removed, if ever.")
    gpu_seconds: float | None
    peak_memory_bytes: int | None
    predicted_gpu_seconds: float | None = Field(
        description="What `gpu_seconds` was expected to be when the job was taken, by the model's card and its "
        "finished clips; null where nothing is known."
    )
    predicted_peak_memory_bytes: int | None
    error: JobFailure | None
    metadata: dict[str, str]
    label: str | None = Field(description="Project label of the usage ledger.")


class Video(Progress):
    """A clip: OpenAI's video object and what we know beyond it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": f"video_{_ID}",
                    "object": "video",
                    "model": "tiny-wan",
                    "status": "in_progress",
                    "progress": 45,
                    "stage": "denoise",
                    "step": 9,
                    "total_steps": 20,
                    "eta_s": 6.5,
                    "queue_position": None,
                    "attempt": 1,
                    "max_attempts": 3,
                    "is_cancel_requested": False,
                    "created_at": 1764400000,
                    "started_at": 1764400001,
                    "completed_at": None,
                    "expires_at": None,
                    "gpu_seconds": None,
                    "peak_memory_bytes": None,
                    "predicted_gpu_seconds": 6.5,
                    "predicted_peak_memory_bytes": 1200000000,
                    "error": None,
                    "metadata": {},
                    "label": None,
                    "prompt": "a red ball rolls over a green field",
                    "seconds": "2",
                    "size": "160x96",
                    "remixed_from_video_id": None,
                    "extended_from_video_id": None,
                    "fps": 16,
                    "num_frames": 32,
                    "seed": 7,
                    "parent_id": None,
                    "film_id": None,
                    "adjustments": [],
                    "parameters": {"num_inference_steps": 20, "guidance_scale": 3.0},
                    "report": None,
                    "content_url": None,
                    "manifest_url": None,
                }
            ]
        }
    )

    id: str
    object: Literal["video"]
    model: str
    prompt: str | None = Field(description="Null once prompts have been erased.")
    seconds: str = Field(description="Length of the file, a number in a string as OpenAI has it.")
    size: str = Field(description="WIDTHxHEIGHT")
    remixed_from_video_id: str | None
    extended_from_video_id: str | None = Field(description="The clip that this one continues, if it was made here.")
    fps: int
    num_frames: int = Field(description="Frames of the file; an extension's count the clip that it continues.")
    seed: int
    parent_id: str | None = Field(description="The job that this one was made for.")
    film_id: str | None = Field(description="The film that this clip is a shot of.")
    adjustments: list[Adjustment] = Field(description="What is done otherwise than asked; never in silence.")
    parameters: dict[str, Any] = Field(description="Every parameter the clip is made with.")
    report: dict[str, Any] | None = Field(description="What the worker found: drift, attention, checks.")
    content_url: str | None = Field(description="Where the file is, once it is.")
    manifest_url: str | None = Field(
        description="What makes the same clip again, with the prompts and the input files, once it is made."
    )


class Child(BaseModel):
    """A job that a film consists of."""

    id: str
    kind: Literal["video", "film", "storyboard", "join"]
    status: Status
    progress: int
    stage: str | None
    shot: int | None = Field(description="Which shot it makes, from 0; null for storyboard and joining.")
    retry: int | None = Field(description="How many clips of this shot failed before it.")
    error: JobFailure | None
    url: str


class Film(Progress):
    """A film: an idea, its storyboard, its shots, and the file they are joined to."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": f"film_{_ID}",
                    "object": "film",
                    "model": "tiny-wan",
                    "status": "in_progress",
                    "progress": 34,
                    "stage": "shots",
                    "step": None,
                    "total_steps": None,
                    "eta_s": None,
                    "queue_position": None,
                    "attempt": 0,
                    "max_attempts": 1,
                    "is_cancel_requested": False,
                    "created_at": 1764400000,
                    "started_at": 1764400001,
                    "completed_at": None,
                    "expires_at": None,
                    "gpu_seconds": None,
                    "peak_memory_bytes": None,
                    "predicted_gpu_seconds": 6.5,
                    "predicted_peak_memory_bytes": 1200000000,
                    "error": None,
                    "metadata": {},
                    "label": None,
                    "idea": "a red ball looks for its blue friend",
                    "seconds": 8.0,
                    "num_frames": 128,
                    "shots": 3,
                    "style": None,
                    "size": "160x96",
                    "fps": 16,
                    "seed": 7,
                    "storyboard": None,
                    "children": [],
                    "report": None,
                    "content_url": None,
                }
            ]
        }
    )

    id: str
    object: Literal["film"]
    model: str | None
    idea: str | None = Field(description="Null once prompts have been erased.")
    seconds: float
    num_frames: int = Field(description="Frames of the film: seconds times fps.")
    shots: int | None = Field(description="How many shots were asked for; null leaves it to the storyboard.")
    style: str | None = Field(description="Null if none was asked for, or once prompts have been erased.")
    size: str
    fps: int
    seed: int
    storyboard: dict[str, Any] | None = Field(description="Once it is written.")
    children: list[Child] = Field(description="Its jobs, in the order they were made; empty in lists.")
    report: dict[str, Any] | None = Field(description="What was made of each shot, once the film has ended.")
    content_url: str | None


class Job(Progress):
    """A job of any kind."""

    id: str
    object: Literal["job"]
    kind: Literal["video", "film", "storyboard", "join"]
    model: str | None
    pool: str
    priority: int
    parent_id: str | None
    root_id: str
    result: dict[str, Any] | None = Field(description="What came out, as the worker says it; files are at `url`.")
    url: str = Field(description="Where the job is answered as what it is.")
    events_url: str


class Model(BaseModel):
    """A model: OpenAI's model object, and its card."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: Literal["video", "text"]
    is_ready: bool = Field(description="Whether a worker that has it loaded was seen lately.")
    card: dict[str, Any] = Field(description="What the service knows of it: rules, defaults, limits, licence.")


class UsageLine(BaseModel):
    """What one group used. Only the columns that were grouped by say something; the others are null."""

    key_id: str | None = None
    key_name: str | None = None
    film_id: str | None = None
    shot: int | None = Field(None, description="From 0, within its film.")
    label: str | None = None
    model: str | None = None
    job_id: str | None = Field(None, description="A job, or a request for text.")
    gpu_seconds: float
    prompt_tokens: float
    completion_tokens: float
    storage_bytes: int = Field(description="Bytes of files that are kept at the end of the period.")


class UsagePage(BaseModel):
    """Lines of a usage report; the next ones are at `offset` + `limit`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "list",
                    "data": [
                        {
                            "key_id": f"key_{_ID}",
                            "key_name": "studio",
                            "film_id": f"film_{_ID}",
                            "shot": 0,
                            "label": "spot",
                            "model": None,
                            "job_id": None,
                            "gpu_seconds": 24.5,
                            "prompt_tokens": 0,
                            "completion_tokens": 0,
                            "storage_bytes": 1048576,
                        }
                    ],
                    "has_more": False,
                }
            ]
        }
    )

    object: Literal["list"] = "list"
    data: list[UsageLine]
    has_more: bool


class Deleted(BaseModel):
    """What a DELETE answers."""

    id: str
    object: str = Field(examples=["video.deleted"])
    deleted: Literal[True]


class Part(BaseModel):
    """One part of the service, and whether it is up."""

    name: str = Field(examples=["broker"])
    is_ready: bool
    detail: str


class Health(BaseModel):
    """Whether the service can take work, and what is missing if not."""

    status: Literal["ok", "not_ready"]
    parts: list[Part]


class JobEvent(BaseModel):
    """The data of one server-sent event; its `id` is `seq`, its `event` is `type`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "v": 1,
                    "seq": 42,
                    "job_id": f"video_{_ID}",
                    "root_id": f"video_{_ID}",
                    "attempt": 1,
                    "type": "job.progress",
                    "created_at": 1764400002.25,
                    "data": {"stage": "denoise", "step": 9, "total_steps": 20, "progress": 45.0},
                },
                {
                    "v": 1,
                    "seq": None,
                    "job_id": f"video_{_ID}",
                    "root_id": f"video_{_ID}",
                    "attempt": 0,
                    "type": "job.position",
                    "created_at": 1764400001.5,
                    "data": {"queue_position": 3, "eta_s": 21.5},
                },
            ]
        }
    )

    v: int
    seq: int | None = Field(description="Null of job.position and job.preview, which are of the moment.")
    job_id: str
    root_id: str
    attempt: int
    type: str = Field(
        description="job.queued; job.position (queue_position, eta_s); job.started, and job.attempt for each later "
        "one, which begins at progress 0; job.progress (stage, step, total_steps, progress, eta_s, of a chain segment "
        "and segments, of a storyboard its text); job.preview (segment, step, total_steps, image: a JPEG as data URI); "
        "job.drift (what was measured of a segment); job.cancel_requested; job.released and job.retry, which queue it "
        "again; and last video., film., storyboard. or join. with completed, failed or cancelled.",
    )
    created_at: float
    data: dict[str, Any]


Item = TypeVar("Item", bound=BaseModel)


class ListPage(BaseModel, Generic[Item]):
    """A page of a list, as OpenAI has it; the next page is `after=last_id`."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
