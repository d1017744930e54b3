"""Whole clips on tiny random models: exact lengths, conditions, chains, resumption, the manifest's promise."""

import dataclasses
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from video import clip as clip_module
from video import loop
from video.card import derive_card
from video.checkpoints import Checkpoint, load_checkpoint
from video.clip import MadeClip, Progress, SegmentFile, make_clip
from video.conditions import Given, encode_given
from video.cost import Cost
from video.drift import compare
from video.encode import encode_h264, read_frames
from video.errors import Cancelled, InvalidClip, InvalidOutput
from video.loop import decode
from video.probe import probe
from video.request import ClipInputs, ClipRequest, read_request
from video.tiny.model import Layout, random_checkpoint, rest_latent

COST = Cost(0.01, 1e-5, 1e-7, 0.0, 0.0)
VALUES: dict[str, Any] = {
    "prompt": "a red ball moves left",
    "negative_prompt": "",
    "width": 48,
    "height": 32,
    "num_frames": 9,
    "fps": 16,
    "seed": 5,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Checkpoint]:
    loaded: dict[str, Checkpoint] = {}

    def get(layout: Layout) -> Checkpoint:
        if layout not in loaded:
            loaded[layout] = load_checkpoint(random_checkpoint(tmp_path_factory.mktemp(layout), layout))
        return loaded[layout]

    return get


def make(
    model: Checkpoint,
    out_dir: Path,
    inputs: ClipInputs | None = None,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    keep_segment: Callable[[SegmentFile], None] = lambda segment: None,
    resume: list[SegmentFile] | None = None,
    found: Callable[[dict[str, Any]], None] | None = None,
    max_frames: int = 81,
    **values: Any,
) -> MadeClip:
    out_dir.mkdir()
    card = derive_card(model)
    card["frames"]["max"] = max_frames
    return make_clip(
        model,
        card,
        read_request({**VALUES, **values}),
        inputs or ClipInputs(),
        out_dir,
        cost=COST,
        threads=1,
        report=report,
        keep_segment=keep_segment,
        resume=resume,
        found=found,
    )


def frames_of(made: MadeClip) -> Tensor:
    (path,) = (file.path for file in made.files if file.name == "video")
    return torch.cat(list(read_frames(path)))


def write_picture(path: Path, width: int = 48, height: int = 32) -> Path:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 16), (2, 24), (7, 1), (9, 30), (12, 60)])
def test_the_file_has_what_was_asked(
    models: Callable[[Layout], Checkpoint], tmp_path: Path, num_frames: int, fps: int
) -> None:
    made = make(models("ti2v"), tmp_path / "out", num_frames=num_frames, fps=fps)
    files = {file.name: file for file in made.files}
    assert set(files) == {"video", "thumbnail", "spritesheet", "spritesheet_vtt", "last_frame", "manifest"}
    facts = probe(files["video"].path)
    assert (facts.num_frames, facts.fps, facts.width, facts.height) == (num_frames, Fraction(fps), 48, 32)
    assert json.loads(files["manifest"].path.read_text()) == made.manifest
    assert made.manifest["file"]["num_frames"] == num_frames
    (segment,) = made.manifest["segments"]
    assert segment["made_frames"] % 4 == 1 and 0 <= segment["made_frames"] - num_frames < 4


def test_progress_rises_through_all_stages_to_the_end(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    seen: list[Progress] = []
    make(models("ti2v"), tmp_path / "out", report=seen.append, num_inference_steps=3)
    assert [progress.progress for progress in seen] == sorted(progress.progress for progress in seen)
    assert seen[-1].progress == pytest.approx(100.0)
    assert all(progress.eta_s >= 0 for progress in seen)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["encode_prompt", "denoise", "decode", "encode_video"]
    denoise = [(p.step, p.total_steps) for p in seen if p.stage == "denoise"]
    assert denoise == [(0, 3), (1, 3), (2, 3), (3, 3)]
    # one report a latent frame, and one when all are done
    assert [(p.step, p.total_steps) for p in seen if p.stage == "decode"] == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("stage", ["encode_prompt", "denoise", "decode", "encode_video"])
def test_cancel_between_any_two_steps_leaves_the_model_clean(
    models: Callable[[Layout], Checkpoint], tmp_path: Path, stage: str
) -> None:
    model = models("ti2v")
    before = make(model, tmp_path / "before").manifest["frames_sha256"]
    reports: list[str] = []

    def cancel(progress: Progress) -> None:
        reports.append(progress.stage)
        if progress.stage == stage and (progress.step == 1 or stage in ("encode_prompt", "encode_video")):
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        make(model, tmp_path / "cancelled", report=cancel)
    assert reports[-1] == stage
    assert make(model, tmp_path / "after").manifest["frames_sha256"] == before


def test_the_same_manifest_makes_the_same_frames_in_any_order(
    models: Callable[[Layout], Checkpoint], tmp_path: Path
) -> None:
    model = models("ti2v")
    first = make(model, tmp_path / "a")
    other = make(model, tmp_path / "b", seed=6, num_frames=17, width=64, prompt="a blue car", guidance_scale=1.0)
    # from the manifest's own parameters, with the prompts that it names by their hashes
    values = first.manifest["parameters"] | {"prompt": VALUES["prompt"], "negative_prompt": ""}
    again = make(model, tmp_path / "c", **values)
    assert again.manifest == first.manifest
    assert torch.equal(frames_of(again), frames_of(first))
    assert other.manifest["frames_sha256"] != first.manifest["frames_sha256"]
    reloaded = make(load_checkpoint(model.path), tmp_path / "d", **values)
    assert reloaded.manifest == first.manifest
    assert "red ball" not in json.dumps(first.manifest)


def test_each_parameter_matters(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    base = make(models("ti2v"), tmp_path / "base").manifest["frames_sha256"]
    changes: list[dict[str, Any]] = [
        {"seed": 6},
        {"num_inference_steps": 3},
        {"guidance_scale": 2.5},
        {"flow_shift": 9.0},
        {"scheduler": "flow_match_euler"},
        {"prompt": "a blue car"},
        {"negative_prompt": "snow"},
    ]
    hashes = {
        make(models("ti2v"), tmp_path / str(index), **change).manifest["frames_sha256"]
        for index, change in enumerate(changes)
    }
    assert len(hashes | {base}) == len(changes) + 1


def test_first_and_last_frame_stand_in_the_clip(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    model = models("ti2v")
    picture = write_picture(tmp_path / "picture.png")
    image = torch.from_numpy(np.array(Image.open(picture)))[None]
    # the latents that are known decode alone to what the clip shows there
    known = encode_given(model, Given(start=image, end=image), 13, 32, 48)
    assert known.known is not None and known.free is not None
    assert known.free.flatten().tolist() == [0, 1, 1, 0]
    pixels = (image.permute(0, 3, 1, 2).float() / 255) * 2 - 1
    assert torch.allclose(known.known[:, :, -1:], rest_latent(model.vae, pixels), atol=1e-5)
    alone = next(iter(decode(model, known.known[:, :, :1], lambda *_: None)))
    made = make(model, tmp_path / "out", ClipInputs(first_frame=picture, last_frame=picture), num_frames=13)
    first = next(read_frames(tmp_path / "out" / "segment_000.mkv"))
    assert torch.equal(first, alone)
    text_only = make(model, tmp_path / "text", num_frames=13)
    assert made.manifest["frames_sha256"] != text_only.manifest["frames_sha256"]
    assert set(made.manifest["inputs_sha256"]) == {"first_frame", "last_frame"}


def test_several_frames_of_overlap_are_known_latents(models: Callable[[Layout], Checkpoint]) -> None:
    model = models("ti2v")
    frames = torch.randint(0, 256, (9, 32, 48, 3), dtype=torch.uint8)
    condition = encode_given(model, Given(start=frames), 17, 32, 48)
    assert condition.known is not None and condition.free is not None
    assert condition.free.flatten().tolist() == [0, 0, 0, 1, 1]
    pixels = (frames.permute(3, 0, 1, 2)[None].float() / 255) * 2 - 1
    reference = model.vae.encode(pixels).latent_dist.mode()
    assert torch.allclose(condition.known[:, :, :3], reference, atol=1e-6)


@pytest.mark.parametrize("overlap", [1, 5])
def test_a_chain_has_every_frame_once(
    models: Callable[[Layout], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    """The decoder is replaced by one that writes its position into the frames, so a joint can be seen."""
    counter = {"start": 0}

    def count(checkpoint: Checkpoint, latents: Tensor, report: Any) -> Any:
        total = (latents.shape[2] - 1) * 4 + 1
        for position in range(total):
            level = counter["start"] + position
            frame = torch.full((1, 32, 48, 3), 4 * level, dtype=torch.uint8)
            frame[:, ::2] = 0
            yield frame

    segments: list[SegmentFile] = []

    def kept(segment: SegmentFile) -> None:
        segments.append(segment)
        # the next segment's first frame is `overlap` frames before the end of this one
        counter["start"] += segment.data["num_frames"] - (overlap if segment.index == 0 else 0)
        if segment.index > 0:
            counter["start"] += 0

    monkeypatch.setattr(clip_module, "decode", count)
    extend = {"segments": 3, "segment_frames": [10, 8, 7], "overlap_frames": overlap, "on_drift": "report"}
    made = make(models("ti2v"), tmp_path / "out", num_frames=25, extend=extend, keep_segment=kept, output={"crf": 0})
    levels = frames_of(made)[:, 1].float().mean((1, 2)) / 4
    assert levels.round().int().tolist() == list(range(25))
    assert [segment.index for segment in segments] == [0, 1, 2]
    assert [entry["segment"] for entry in made.manifest["drift"]["segments"]] == [0, 1, 2]


CHAIN: dict[str, Any] = {
    "num_frames": 21,
    "extend": {"segments": 3, "segment_frames": [9, 6, 6], "overlap_frames": 5, "on_drift": "report"},
}


def test_a_later_attempt_continues_after_the_last_finished_segment(
    models: Callable[[Layout], Checkpoint], tmp_path: Path
) -> None:
    model = models("ti2v")
    whole = make(model, tmp_path / "whole", **CHAIN)
    kept: list[SegmentFile] = []

    def die(progress: Progress) -> None:
        if progress.segment == 2 and progress.stage == "denoise":
            raise Cancelled("the worker is gone")

    with pytest.raises(Cancelled):
        make(model, tmp_path / "first", report=die, keep_segment=kept.append, **CHAIN)
    assert [segment.index for segment in kept] == [0, 1]
    # what a checkpoint's row carries is JSON
    resume = [dataclasses.replace(segment, data=json.loads(json.dumps(segment.data))) for segment in kept]
    seen: list[Progress] = []
    second = make(model, tmp_path / "second", report=seen.append, resume=resume, **CHAIN)
    assert {progress.segment for progress in seen} == {2}
    assert second.manifest == whole.manifest
    # a file that was damaged is made again, and so is all that comes after it
    kept[0].path.write_bytes(kept[0].path.read_bytes()[:-50])
    seen.clear()
    third = make(model, tmp_path / "third", report=seen.append, resume=resume, **CHAIN)
    assert {progress.segment for progress in seen} == {0, 1, 2}
    assert third.manifest["frames_sha256"] == whole.manifest["frames_sha256"]


def test_each_segment_has_its_own_prompt(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    model = models("ti2v")
    kept: list[SegmentFile] = []
    make(model, tmp_path / "a", keep_segment=kept.append, **CHAIN)
    prompts = [VALUES["prompt"], "a blue car", "green boat at night"]
    make(model, tmp_path / "b", keep_segment=kept.append, segment_prompts=prompts, **CHAIN)
    assert kept[0].data["sha256"] == kept[3].data["sha256"]
    assert kept[1].data["sha256"] != kept[4].data["sha256"]


def test_policy_stop_ends_the_chain_before_the_drifted_segment(
    models: Callable[[Layout], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def darker(reference: Any, look: Any) -> dict[str, Any]:
        report = compare(reference, look)
        return {**report, "drifted": ["luma"] if look != reference else []}

    monkeypatch.setattr(clip_module, "compare", darker)
    stop = {**CHAIN, "extend": {**CHAIN["extend"], "on_drift": "stop"}}
    found: list[dict[str, Any]] = []
    made = make(models("ti2v"), tmp_path / "out", found=found.append, **stop)
    assert made.manifest["drift"]["stopped_at_segment"] == 1
    # told as it is measured, in the words of the report
    assert [finding.pop("is_stopped") for finding in found] == [False, True]
    assert found == made.manifest["drift"]["segments"]
    assert len(made.manifest["drift"]["segments"]) == 2
    assert frames_of(made).shape[0] == 9
    reported = make(models("ti2v"), tmp_path / "report", **CHAIN)
    assert reported.manifest["drift"]["stopped_at_segment"] is None
    assert frames_of(reported).shape[0] == 21


def test_an_uploaded_clip_is_continued(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    source = tmp_path / "source.mp4"
    ramp = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 32, 48, 3) * 8 + 40
    encode_h264(source, [ramp], width=48, height=32, fps=Fraction(16), crf=1)
    extend = {"overlap_frames": 5, "on_drift": "report"}
    made = make(
        models("ti2v"), tmp_path / "out", ClipInputs(video=source), num_frames=6, extend=extend, output={"crf": 1}
    )
    frames = frames_of(made)
    assert frames.shape[0] == 26
    assert (frames[:20].int() - ramp.int()).abs().float().mean() < 2
    (segment,) = made.manifest["segments"]
    assert (segment["overlap_frames"], segment["num_frames"], segment["made_frames"]) == (5, 6, 13)


def test_nan_and_black_are_no_output(
    models: Callable[[Layout], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("ti2v")

    def broken(*_: Any) -> Tensor:
        return torch.full((1, 16, 3, 4, 6), float("nan"))

    monkeypatch.setattr(clip_module, "denoise", broken)
    with pytest.raises(InvalidOutput, match="not finite"):
        make(model, tmp_path / "nan")
    monkeypatch.setattr(clip_module, "decode", lambda *_: iter([torch.zeros(9, 32, 48, 3, dtype=torch.uint8)]))
    with pytest.raises(InvalidOutput, match="black"):
        make(model, tmp_path / "black")


def test_what_cannot_be_made_is_refused_before_any_step(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    picture = write_picture(tmp_path / "picture.png")
    wide = write_picture(tmp_path / "wide.png", width=64)
    (tmp_path / "text.png").write_text("no image")
    both = ClipInputs(first_frame=picture, last_frame=picture)
    cases: list[tuple[Layout, ClipInputs, dict[str, Any], str]] = [
        ("t2v", ClipInputs(first_frame=picture), {}, "first_frame, last_frame: this model makes clips from text alone"),
        ("t2v", ClipInputs(), CHAIN, "extend: this model makes clips from text alone"),
        ("a14b-i2v", ClipInputs(), {}, "first_frame: this model needs one"),
        ("a14b-i2v", both, {"num_frames": 10}, "the next length that fits is 13, got 10"),
        ("ti2v", ClipInputs(first_frame=wide), {}, "first_frame: must be 48x32, got 64x32"),
        ("ti2v", ClipInputs(first_frame=tmp_path / "text.png"), {}, "first_frame: is no image that decodes"),
        ("ti2v", ClipInputs(video=tmp_path / "text.png"), {}, "video: the file does not decode"),
        ("ti2v", ClipInputs(), {"width": 50}, "size: sides must be multiples of 16, got 50x32"),
        ("ti2v", ClipInputs(), {"num_frames": 82}, "num_frames: at most 81 in one piece"),
        ("ti2v", ClipInputs(), {"scheduler": "ddim"}, "scheduler: must be unipc or flow_match_euler, got 'ddim'"),
        ("ti2v", ClipInputs(), {"attention": {"mode": "sparse"}}, "attention.mode: must be one of dense"),
        ("ti2v", ClipInputs(), {"output": {"codec": "vp9"}}, "output.codec: must be one of h264"),
        ("ti2v", ClipInputs(), {"extend": {**CHAIN["extend"], "anchor": True}, "num_frames": 21}, "extend.anchor"),
        ("ti2v", ClipInputs(), {**CHAIN, "segment_prompts": ["a"]}, "one for each of the 3 segments, got 1"),
    ]
    for index, (layout, inputs, values, message) in enumerate(cases):
        seen: list[Progress] = []
        with pytest.raises(InvalidClip, match=message):
            make(models(layout), tmp_path / str(index), inputs, report=seen.append, **values)
        assert not any(progress.stage == "denoise" and progress.step > 0 for progress in seen), message


def test_requests_are_read_strictly() -> None:
    request = read_request({**VALUES, "fps": "30000/1001"})
    assert isinstance(request, ClipRequest) and request.fps == Fraction(30000, 1001)
    for change, message in (
        ({"seed": 2**53}, r"seed: must be from 0 to 2\*\*53 - 1"),
        ({"num_inference_steps": 0}, "num_inference_steps: must be at least 1"),
        ({"fps": 0}, "fps: must be"),
        ({"width": "wide"}, "request: invalid literal"),
    ):
        with pytest.raises(InvalidClip, match=message):
            read_request({**VALUES, **change})
    without = {name: value for name, value in VALUES.items() if name != "seed"}
    with pytest.raises(InvalidClip, match="seed: this field is required"):
        read_request(without)


def test_image_to_video_in_two_experts_runs_through(models: Callable[[Layout], Checkpoint], tmp_path: Path) -> None:
    picture = write_picture(tmp_path / "picture.png")
    made = make(
        models("a14b-i2v"),
        tmp_path / "out",
        ClipInputs(first_frame=picture, last_frame=picture),
        num_inference_steps=4,
        guidance_scale_2=1.0,
        output={"image_sequence": "png"},
    )
    assert frames_of(made).shape[0] == 9
    assert "frames" in {file.name for file in made.files}


def test_batching_of_guidance_is_a_rule_of_the_length_alone() -> None:
    assert loop.is_guidance_batched(loop.BATCHED_GUIDANCE_TOKENS)
    assert not loop.is_guidance_batched(loop.BATCHED_GUIDANCE_TOKENS + 1)
