"""Make one clip from a request: segments, frames checked as they are decoded, file, pictures, manifest.

Invariants: the file has exactly the frames that were asked for (behind those of a clip that is continued), unless the
chain was stopped by its drift policy, which the manifest then says; frames are held one chunk at a time, segments
lie on disk as FFV1 until the file is written; the manifest and the prompts make the same frames again.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from video import encode
from video.attention import check_mode
from video.checkpoints import Checkpoint
from video.conditions import Given, encode_given
from video.cost import Cost, Pace
from video.drift import Look, LookMeter, check_policy, compare
from video.errors import InvalidClip
from video.extend import Segment, plan_segments
from video.loop import Guidance, decode, denoise, encode_text, noise, schedule
from video.manifest import make_manifest
from video.output import ClipFile, clip_file, write_clip
from video.preview import Preview, Previewer, is_preview_step
from video.probe import FrameGuard
from video.request import ClipInputs, ClipRequest
from video.source import read_inputs


@dataclass(frozen=True)
class SegmentFile:
    """A finished segment: its frames as FFV1, and what is known of them."""

    index: int
    path: Path
    data: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """How far a clip is: step of the stage, segment of segments, percent and seconds to go of the whole."""

    stage: str
    step: int
    total_steps: int
    segment: int
    segments: int
    progress: float
    eta_s: float


@dataclass(frozen=True)
class MadeClip:
    """The finished clip."""

    files: list[ClipFile]
    manifest: dict[str, Any]


@dataclass
class _Chain:
    """What grows from segment to segment."""

    tail: deque[Tensor]
    reference: Look | None
    report: list[dict[str, Any]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    num_frames: int = 0
    stopped_at: int | None = None

    def drift(self, request: ClipRequest) -> dict[str, Any]:
        """Give the report of the whole chain."""
        return {
            "policy": (request.extend or {}).get("on_drift", "report"),
            "stopped_at_segment": self.stopped_at,
            "segments": self.report,
        }


def make_clip(
    checkpoint: Checkpoint,
    card: dict[str, Any],
    request: ClipRequest,
    inputs: ClipInputs,
    out_dir: Path,
    *,
    cost: Cost,
    threads: int,
    report: Callable[[Progress], None],
    keep_segment: Callable[[SegmentFile], None],
    resume: list[SegmentFile] | None = None,
    previewer: Previewer | None = None,
    show: Callable[[Preview], None] | None = None,
    found: Callable[[dict[str, Any]], None] | None = None,
) -> MadeClip:
    """Make a clip.

    Args:
        checkpoint: the model.
        card: its card.
        request: what is asked.
        inputs: files of the request.
        out_dir: an empty folder for the files that come out.
        cost: coefficients, for progress.
        threads: of the encoders.
        report: called between any two steps; raises Cancelled to stop.
        keep_segment: called with each finished segment of a chain.
        resume: segments that an earlier attempt has finished, from the first one on.
        previewer: draws the pictures that `show` is called with while a segment is denoised; None: there are none.
        found: called with the drift of each segment of a chain as soon as it is measured.

    Raises:
        InvalidClip: the model or this release cannot make it.
        InvalidOutput: what came out is no clip that anybody may have.
        Cancelled: `report` raised it.
    """
    given, source = read_inputs(request, inputs, threads)
    segments = _plan(checkpoint, card, request, has_source=inputs.video is not None)
    _check(checkpoint, request, segments, given)
    chain = _Chain(tail=source.tail, reference=source.look)
    pace = Pace(
        cost,
        segments=[
            (checkpoint.num_tokens(segment.made_frames, request.height, request.width), segment.made_frames)
            for segment in segments
        ],
        num_steps=request.num_inference_steps,
        pixels=request.width * request.height,
        num_frames=request.num_frames + source.num_frames,
    )
    guard = FrameGuard()
    finished = {done.index: done for done in resume or []}
    for segment in segments:
        reporter = _Reporter(pace, segment.index, len(segments), report, previewer, show)
        done = finished.get(segment.index)
        if done is not None and _take_over(chain, segment, done, guard, threads):
            pace.skip(segment.index)
            continue
        # what comes after a segment that is made anew continues from another one
        finished.clear()
        path = out_dir / f"segment_{segment.index:03d}.mkv"
        start = _start_frames(chain, segment, given)
        end = given.end if segment.index == len(segments) - 1 else None
        look = _make_segment(checkpoint, request, segment, Given(start, end), path, chain, guard, reporter, threads)
        # a first segment that shows nothing is not waited for; one that fades to black later is fine
        guard.check()
        is_kept = _add_to_chain(chain, segment, look, path, request)
        if found is not None and (len(segments) > 1 or inputs.video is not None):
            found({**chain.report[-1], "is_stopped": not is_kept})
        if not is_kept:
            break
        if len(segments) > 1:
            keep_segment(SegmentFile(segment.index, path, _segment_data(segment, look, path)))
    sources = [*([] if inputs.video is None else [inputs.video]), *chain.files]
    reporter = _Reporter(pace, len(segments) - 1, len(segments), report)
    written = write_clip(out_dir, sources, request, source.num_frames + chain.num_frames, threads, reporter)
    manifest = make_manifest(checkpoint, card, request, inputs, segments, chain.drift(request), written, threads)
    path = out_dir / "manifest.json"
    path.write_text(json.dumps(manifest, indent=1))
    return MadeClip([*written.files, clip_file("manifest", path)], manifest)


class _Reporter:
    """Adds segment, percent and time of arrival to a stage's step, and pictures to some steps."""

    def __init__(
        self,
        pace: Pace,
        segment: int,
        segments: int,
        report: Callable[[Progress], None],
        previewer: Previewer | None = None,
        show: Callable[[Preview], None] | None = None,
    ) -> None:
        self.pace, self.segment, self.segments, self.report = pace, segment, segments, report
        self.previewer, self.show = previewer, show

    def __call__(self, stage: str, step: int, total_steps: int) -> None:
        progress, eta_s = self.pace.at(self.segment, stage, step, total_steps)
        self.report(Progress(stage, step, total_steps, self.segment, self.segments, progress, eta_s))

    def draw(self, step: int, total_steps: int, latents: Tensor) -> None:
        """Show what a step has aimed at, if it is one of those that are shown."""
        if self.previewer is None or self.show is None or not is_preview_step(step, total_steps):
            return
        self.show(Preview(self.segment, step, total_steps, self.previewer.draw(latents)))


def _plan(checkpoint: Checkpoint, card: dict[str, Any], request: ClipRequest, *, has_source: bool) -> list[Segment]:
    extend = request.extend or {}
    return plan_segments(
        request.num_frames,
        request.seed,
        max_frames=int(card["frames"]["max"]),
        segment_frames=extend.get("segment_frames"),
        overlap_frames=int(extend.get("overlap_frames") or 1),
        has_source=has_source,
        temporal=checkpoint.temporal_factor,
    )


def _check(checkpoint: Checkpoint, request: ClipRequest, segments: list[Segment], given: Given) -> None:
    """Refuse what would only fail after some work."""
    check_mode(str(request.attention.get("mode", "dense")))
    encode.check_output(request.output)
    extend = request.extend or {}
    check_policy(str(extend.get("on_drift", "report")))
    if extend.get("anchor"):
        raise InvalidClip("extend.anchor: is not offered; segments continue from the frames before them alone.")
    if request.segment_prompts and len(request.segment_prompts) != len(segments):
        raise InvalidClip(
            f"extend.prompts: must be one for each of the {len(segments)} segments, got {len(request.segment_prompts)}."
        )
    if len(segments) > 1 and checkpoint.layout == "wan-t2v":
        raise InvalidClip("extend: this model makes clips from text alone and cannot continue one.")
    last = segments[-1]
    if given.end is not None and checkpoint.layout == "wan-i2v" and last.made_frames > _made_of(last):
        nearest = request.num_frames + last.made_frames - _made_of(last)
        raise InvalidClip(
            f"num_frames: a clip of this model that ends in a given frame cannot be trimmed; the next length that "
            f"fits is {nearest}, got {request.num_frames}."
        )


def _made_of(segment: Segment) -> int:
    return segment.overlap_frames + segment.num_frames


def _start_frames(chain: _Chain, segment: Segment, given: Given) -> Tensor | None:
    if segment.overlap_frames == 0:
        return given.start
    tail = list(chain.tail)[-segment.overlap_frames :]
    if len(tail) < segment.overlap_frames:
        raise InvalidClip(
            f"extend.overlap_frames: only {len(tail)} frames come before segment {segment.index}, "
            f"{segment.overlap_frames} are to be taken over."
        )
    return torch.stack(tail)


def _make_segment(
    checkpoint: Checkpoint,
    request: ClipRequest,
    segment: Segment,
    given: Given,
    path: Path,
    chain: _Chain,
    guard: FrameGuard,
    reporter: _Reporter,
    threads: int,
) -> Look:
    """Make a segment's frames, write them, and give their look."""
    meter = LookMeter()
    reporter("encode_prompt", 0, 1)
    guidance = Guidance(request.guidance_scale, request.guidance_scale_2)
    prompt = request.segment_prompts[segment.index] if request.segment_prompts else request.prompt
    text = encode_text(checkpoint, prompt, request.negative_prompt if guidance.is_on else None)
    condition = encode_given(checkpoint, given, segment.made_frames, request.height, request.width)
    scheduler = schedule(checkpoint, request.num_inference_steps, request.flow_shift, request.scheduler)
    latents = noise(checkpoint, segment.made_frames, request.height, request.width, segment.seed)
    latents = denoise(checkpoint, latents, scheduler, text, condition, guidance, reporter, reporter.draw)

    def own_frames() -> Iterator[Tensor]:
        """Yield what the segment adds: without its overlap, trimmed to its length."""
        position, end = 0, segment.overlap_frames + segment.num_frames
        for chunk in decode(checkpoint, latents, reporter):
            own = chunk[max(segment.overlap_frames - position, 0) : max(end - position, 0)]
            position += chunk.shape[0]
            if own.shape[0]:
                guard.add(own)
                meter.add(own)
                chain.tail.extend(own)
                yield own

    encode.encode_lossless(path, own_frames(), width=request.width, height=request.height, threads=threads)
    return meter.look()


def _add_to_chain(chain: _Chain, segment: Segment, look: Look, path: Path, request: ClipRequest) -> bool:
    """Measure a segment's drift and take it into the chain; False if the policy stops the chain before it."""
    reference = chain.reference or look
    chain.reference = reference
    measured = {"segment": segment.index, **compare(reference, look)}
    chain.report.append(measured)
    policy = (request.extend or {}).get("on_drift", "report")
    if policy == "stop" and measured["drifted"] and chain.files:
        chain.stopped_at = segment.index
        return False
    chain.files.append(path)
    chain.num_frames += segment.num_frames
    return True


def _segment_data(segment: Segment, look: Look, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"num_frames": segment.num_frames, "seed": segment.seed, "look": asdict(look), "sha256": digest}


def _take_over(chain: _Chain, segment: Segment, done: SegmentFile, guard: FrameGuard, threads: int) -> bool:
    """Take over a segment of an earlier attempt; False, and nothing changed, if its file is not what was kept."""
    known = {"num_frames": segment.num_frames, "seed": segment.seed}
    if any(done.data.get(name) != value for name, value in known.items()) or not done.path.is_file():
        return False
    look = Look(**done.data["look"])
    if _segment_data(segment, look, done.path)["sha256"] != done.data.get("sha256"):
        return False
    for frame in encode.read_frames(done.path, threads):
        guard.add(frame)
        chain.tail.extend(frame)
    reference = chain.reference or look
    chain.reference = reference
    chain.report.append({"segment": segment.index, **compare(reference, look)})
    chain.files.append(done.path)
    chain.num_frames += segment.num_frames
    return True
