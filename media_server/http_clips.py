"""From a clip's request to its job: checked against the card first, then its inputs, then files and row are written.

Invariant: a request that is refused leaves nothing behind: no file is stored before everything stands, and the files
of a row that could not be written are removed. A job owns copies of its inputs, under `inputs/`, so that it does not
depend on the job or the URL that they came from.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from anyio import to_thread
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State, UploadFile
from starlette.requests import Request

from media_server.admission import Limits, admit_clip
from media_server.artifacts.inputs import MAX_IMAGE_BYTES, image_too_large, prepare_image, read_image_url
from media_server.artifacts.store import ArtifactStore
from media_server.auth import Caller
from media_server.errors import Conflict, InvalidRequest, NotFound
from media_server.http_content import find_artifact
from media_server.http_context import request_context
from media_server.http_fetch import check_url
from media_server.http_requests import ImageReference
from media_server.ids import new_id
from media_server.jobs import store
from media_server.jobs.database import Database, Transaction
from media_server.jobs.idempotency import Hold
from media_server.jobs.spec import Job, JobSpec, Place
from media_server.models.card import VideoCard
from media_server.models.clip import ClipParams, ExtendRequest, Segments
from media_server.models.clip_length import find_overlap
from media_server.models.clip_request import Cost
from media_server.models.pricing import predictions
from media_server.models.registry import ClipRequest, validate_clip
from media_server.settings import Settings

logger = logging.getLogger(__name__)

InputName = Literal["first_frame", "last_frame", "video"]
CONTENT_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".mkv": "video/x-matroska", ".avi": "video/x-msvideo"}
# the field that a caller sends for an image
FIELDS: Mapping[InputName, str] = {"first_frame": "input_reference", "last_frame": "last_frame"}


@dataclass(frozen=True)
class InputFile:
    """A file that becomes a job's input: its suffix and type, and its bytes or where they lie."""

    suffix: str
    content_type: str
    content: bytes | Path


@dataclass(frozen=True)
class Inputs:
    """Where a clip's inputs come from: images uploaded or referred to, and files that are checked already."""

    uploads: Mapping[InputName, UploadFile] = field(default_factory=dict)
    references: Mapping[InputName, ImageReference] = field(default_factory=dict)
    files: Mapping[InputName, InputFile] = field(default_factory=dict)

    def keys(self, job_id: str) -> dict[InputName, str]:
        """Name the file of each input there is."""
        images: list[InputName] = [*self.uploads, *self.references]
        suffixes = {**dict.fromkeys(images, ".png"), **{name: file.suffix for name, file in self.files.items()}}
        return {name: f"{job_id}/inputs/{name}{suffix}" for name, suffix in suffixes.items()}


@dataclass(frozen=True)
class Extras:
    """What a job carries beside the clip's own parameters."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook_url: str | None = None
    priority: int = 0
    label: str | None = None
    remixed_from_id: str | None = None
    idempotency_key: Hold | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


async def submit_clip(
    request: Request, owner: Caller, card: VideoCard, clip: ClipRequest, inputs: Inputs, extras: Extras
) -> Job:
    """Make the job of a clip.

    Raises InvalidRequest, UnsupportedMedia or TooLarge for what the card, the service's limits or an input's rule
    forbids, RateLimited if the queue is full, RateLimited or Forbidden for what is more than the key may have,
    NotFound or Conflict for a clip that is referred to and does not exist or is not ready.
    """
    state, settings = request.app.state, request.app.state.settings
    if extras.webhook_url is not None:
        check_url(extras.webhook_url, param="webhook_url", allow_private=settings.allow_private_urls)
    job_id = new_id("video")
    keys = inputs.keys(job_id)
    params = validate_clip(card, clip.model_copy(update={"inputs": keys}))
    admit = partial(
        admit_clip,
        limits=Limits.of(settings),
        card=card,
        params=params,
        owner_key_id=owner.owner_key_id,
        priority=extras.priority,
    )
    if inputs.uploads or inputs.references:
        # before an image is fetched or decoded for nothing; the row's own transaction asks again
        await run_in_threadpool(_ask, state.db, admit)
    adjusted = [item.model_dump(mode="json") for item in params.adjusted]
    files = dict(inputs.files)
    for name in [*inputs.uploads, *inputs.references]:
        content = await _read_image(state, owner, name, inputs)
        decode = partial(prepare_image, content, param=FIELDS[name], width=params.width, height=params.height)
        image = await to_thread.run_sync(decode, limiter=state.decoders)
        files[name] = InputFile(".png", "image/png", image.png)
        if image.adjustments:
            asked = f"{image.source_width}x{image.source_height}"
            adjusted.append(
                {"param": FIELDS[name], "rule": "; ".join(image.adjustments), "asked": asked, "given": params.size}
            )
    spec = JobSpec(
        id=job_id,
        kind="video",
        pool=card.pool,
        model=card.name,
        params={**params.params(), **_continuation(card, clip, params), "adjusted": adjusted, **extras.params},
        prompts=params.prompts(),
        priority=extras.priority,
        owner_key_id=owner.owner_key_id,
        metadata=extras.metadata,
        label=extras.label,
        traceparent=request_context(request).traceparent,
        webhook_url=extras.webhook_url,
        max_attempts=settings.max_attempts,
        retention_s=settings.retention_s,
        answer_s=owner.answer_s(settings),
        remixed_from_id=extras.remixed_from_id,
        idempotency_key=extras.idempotency_key,
        work=params.work,
    )
    job = await run_in_threadpool(_store, state.db, state.artifacts, spec, keys, files, admit)
    logger.info(
        "job %s: queued (%s, %s, %d frames, predicted GPU seconds: %s)",
        job.id,
        card.name,
        params.size,
        params.num_frames,
        "unknown" if job.predicted_gpu_seconds is None else f"{job.predicted_gpu_seconds:.1f}",
        extra={"job_id": job.id, "request_id": request_context(request).request_id},
    )
    return job


def ready_clip(db: Database, clip_id: str, owner: Caller, *, param: str) -> Job:
    """Read a completed clip of the caller's that a request refers to.

    Raises NotFound if there is none, Conflict if it has not completed.
    """
    try:
        job = owner.check(store.get(db, clip_id))
    except NotFound as error:
        raise NotFound(f"{param}: no clip has the id {clip_id!r}.", param=param, value=clip_id) from error
    if job.kind != "video":
        raise InvalidRequest(f"{param}: must be the id of a clip, got a {job.kind}.", param=param, value=clip_id)
    if job.status != "completed":
        raise Conflict(
            f"{param}: {clip_id} must have completed; it is {job.status}.",
            code="not_ready",
            param=param,
            rule="a completed clip",
            value=job.status.value,
        )
    return job


def input_files(artifacts: ArtifactStore, job: Job) -> dict[InputName, InputFile]:
    """Read the inputs that another job was given, so that a new one may have copies; blocking.

    Raises NotFound if they are gone.
    """
    files: dict[InputName, InputFile] = {}
    for name, key in (job.params.get("inputs") or {}).items():
        suffix = Path(key).suffix
        content = artifacts.local_path(key) or b"".join(artifacts.read(key))
        files[name] = InputFile(suffix, CONTENT_TYPES.get(suffix, "application/octet-stream"), content)
    return files


@contextmanager
def artifact_file(db: Database, artifacts: ArtifactStore, job: Job, name: str) -> Iterator[Path]:
    """Give a file of a job as a local path, copied from the store if need be; blocking.

    Raises NotFound if the job has no such file.
    """
    record = find_artifact(db, job, name)
    if (path := artifacts.local_path(record.key)) is not None:
        yield path
        return
    with tempfile.NamedTemporaryFile() as copy:
        for chunk in artifacts.read(record.key):
            copy.write(chunk)
        copy.flush()
        yield Path(copy.name)


@contextmanager
def upload_file(upload: UploadFile) -> Iterator[Path]:
    """Give an upload as a local path; blocking. The uploader's name for it is not used."""
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(upload.file, copy)
        copy.flush()
        yield Path(copy.name)


def _continuation(card: VideoCard, clip: ClipRequest, params: ClipParams) -> dict[str, Any]:
    """Say how a clip that is continued in one piece is joined: to the card a single segment is no chain."""
    if "video" not in params.inputs or params.extend is not None:
        return {}
    asked = clip.extend or ExtendRequest()
    segments = Segments(
        segments=1,
        segment_frames=[params.num_frames],
        overlap_frames=overlap_of(card, clip),
        anchor=asked.anchor,
        on_drift=asked.on_drift,
    )
    return {"extend": segments.model_dump(mode="json")}


def overlap_of(card: VideoCard, clip: ClipRequest) -> int:
    """Give the number of frames that a continuation takes over: what is asked, or what the model holds best."""
    return find_overlap(card, clip)


async def _read_image(state: State, owner: Caller, name: InputName, inputs: Inputs) -> bytes:
    settings: Settings = state.settings
    if (upload := inputs.uploads.get(name)) is not None:
        content = await upload.read(MAX_IMAGE_BYTES + 1)
        if len(content) > MAX_IMAGE_BYTES:
            raise image_too_large(FIELDS[name], upload.size or len(content))
        return content
    reference = inputs.references[name]
    if reference.image_url is not None:
        return await read_image_url(reference.image_url, param=FIELDS[name], allow_private=settings.allow_private_urls)
    return await run_in_threadpool(_last_frame, state, owner, reference.file_id or "", FIELDS[name])


def _last_frame(state: State, owner: Caller, clip_id: str, param: str) -> bytes:
    job = ready_clip(state.db, clip_id, owner, param=f"{param}.file_id")
    with artifact_file(state.db, state.artifacts, job, "last_frame") as path:
        return path.read_bytes()


def _ask(db: Database, admit: Callable[[Transaction], tuple[Cost, Place]]) -> None:
    with db.read() as tx:
        admit(tx)


def _store(
    db: Database,
    artifacts: ArtifactStore,
    spec: JobSpec,
    keys: Mapping[InputName, str],
    files: Mapping[InputName, InputFile],
    admit: Callable[[Transaction], tuple[Cost, Place]],
) -> Job:
    input_bytes = 0
    prefix = f"{spec.id}/"
    if files:
        store.hold_files(db, prefix)
    try:
        for name, file in files.items():
            if isinstance(file.content, Path):
                stored = artifacts.put_file(keys[name], file.content, file.content_type)
            else:
                stored = artifacts.put_bytes(keys[name], file.content, file.content_type)
            input_bytes += stored.size_bytes
        with db.write("accept") as tx:
            tx.lock(f"admission:{spec.pool}")
            if files:
                store.keep_files(tx, prefix)
            cost, place = admit(tx)
            job = store.submit_in(tx, replace(spec, input_bytes=input_bytes, **predictions(cost)))
            return replace(job, place=place)
    except BaseException:
        if files:
            artifacts.delete_prefix(prefix)
            # without this the sweeper does both again
            with suppress(OperationalError):
                store.forget_garbage(db, prefix)
        raise
