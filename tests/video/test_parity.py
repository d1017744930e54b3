"""Our loop against diffusers' own pipelines: the same weights and seed give the same clip.

The reference is `WanPipeline` and `WanImageToVideoPipeline`, as loaded by diffusers from the same folder, on plain
torch convolutions and diffusers' attention processor. Tolerances: latents 1e-5 (rounding through the steps: another
order of sums in the patch embedding, the rotary product and one batch for both passes of guidance), frames one of 255.
"""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from video import loop
from video.checkpoints import Checkpoint, load_checkpoint
from video.conditions import Given, encode_given
from video.loop import Guidance, decode, denoise, encode_text, noise, schedule
from video.tiny.model import Layout, random_checkpoint

PROMPT, NEGATIVE = "a red ball moves left over snow", "blue car"
LATENTS_ATOL = 1e-5
# its lazy classes carry no types
library: Any = diffusers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    layouts: tuple[Layout, ...] = ("t2v", "ti2v", "a14b-i2v")
    return {layout: random_checkpoint(root / layout, layout) for layout in layouts}


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def frames_of(image: Image.Image | None) -> Tensor | None:
    return None if image is None else torch.from_numpy(np.array(image))[None]


def ours(
    checkpoint: Checkpoint,
    *,
    width: int,
    height: int,
    num_frames: int,
    steps: int,
    guidance: Guidance,
    flow_shift: float | None = None,
    scheduler: str | None = None,
    first: Image.Image | None = None,
    last: Image.Image | None = None,
) -> tuple[Tensor, Tensor]:
    text = encode_text(checkpoint, PROMPT, NEGATIVE)
    condition = encode_given(checkpoint, Given(frames_of(first), frames_of(last)), num_frames, height, width)
    latents = denoise(
        checkpoint,
        noise(checkpoint, num_frames, height, width, seed=7),
        schedule(checkpoint, steps, flow_shift, scheduler),
        text,
        condition,
        guidance,
        lambda *_: None,
    )
    return latents, torch.cat(list(decode(checkpoint, latents, lambda *_: None)))


def theirs(pipeline: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    pipeline.set_progress_bar_config(disable=True)
    common = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "max_sequence_length": pipeline.tokenizer.model_max_length}
    generator = torch.Generator("cpu").manual_seed(7)
    latents = pipeline(**common, **arguments, generator=generator, output_type="latent").frames
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        video = pipeline.vae.decode(latents * std + mean).sample
    frames = ((video[0].permute(1, 2, 3, 0) * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return latents, frames


def assert_same(mine: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    assert mine[0].shape == reference[0].shape
    assert mine[1].shape == reference[1].shape
    difference = (mine[0] - reference[0]).abs().max().item()
    print(f"latents differ by {difference:.1e} at most")
    assert difference < LATENTS_ATOL
    assert (mine[1].int() - reference[1].int()).abs().max() <= 1


@pytest.mark.parametrize("layout", ["t2v", "ti2v"])
@pytest.mark.parametrize(
    ("width", "height", "num_frames", "steps", "scale", "scheduler", "shift"),
    [
        (48, 32, 9, 4, 3.0, "unipc", 5.0),
        (80, 112, 5, 3, 5.0, "flow_match_euler", 3.0),
        (16, 16, 1, 2, 1.0, "unipc", 3.0),
        (64, 48, 33, 2, 1.0, "flow_match_euler", 8.0),
    ],
)
def test_text_to_video(
    folders: dict[str, Path],
    layout: str,
    width: int,
    height: int,
    num_frames: int,
    steps: int,
    scale: float,
    scheduler: str,
    shift: float,
) -> None:
    pipeline = library.WanPipeline.from_pretrained(folders[layout], dtype=torch.float32)
    if scheduler == "unipc":
        pipeline.scheduler = library.UniPCMultistepScheduler.from_config(pipeline.scheduler.config, flow_shift=shift)
    else:
        pipeline.scheduler = library.FlowMatchEulerDiscreteScheduler(shift=shift)
    size: dict[str, Any] = {"width": width, "height": height, "num_frames": num_frames}
    reference = theirs(pipeline, **size, num_inference_steps=steps, guidance_scale=scale)
    checkpoint = load_checkpoint(folders[layout])
    mine = ours(checkpoint, **size, steps=steps, guidance=Guidance(scale), flow_shift=shift, scheduler=scheduler)
    assert_same(mine, reference)


def test_guidance_in_one_batch_and_in_two_passes_agree(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(folders["ti2v"])
    clip: dict[str, Any] = {"width": 48, "height": 32, "num_frames": 9, "steps": 3, "guidance": Guidance(4.0)}
    batched = ours(checkpoint, **clip)
    monkeypatch.setattr(loop, "BATCHED_GUIDANCE_TOKENS", 0)
    assert_same(ours(checkpoint, **clip), batched)


def test_first_frame_with_a_timestep_a_token(folders: dict[str, Path]) -> None:
    pipeline = library.WanImageToVideoPipeline.from_pretrained(folders["ti2v"], dtype=torch.float32)
    size: dict[str, Any] = {"width": 48, "height": 64, "num_frames": 13}
    first = picture(48, 64, 1)
    reference = theirs(pipeline, image=first, **size, num_inference_steps=4, guidance_scale=3.0)
    checkpoint = load_checkpoint(folders["ti2v"])
    mine = ours(checkpoint, **size, steps=4, guidance=Guidance(3.0), first=first)
    assert_same(mine, reference)


@pytest.mark.parametrize("with_last", [False, True])
def test_image_joined_as_channels_with_two_experts(folders: dict[str, Path], with_last: bool) -> None:
    pipeline = library.WanImageToVideoPipeline.from_pretrained(folders["a14b-i2v"], dtype=torch.float32)
    size: dict[str, Any] = {"width": 64, "height": 32, "num_frames": 9}
    first, last = picture(64, 32, 1), picture(64, 32, 2) if with_last else None
    reference = theirs(
        pipeline, image=first, last_image=last, **size, num_inference_steps=6, guidance_scale=3.5, guidance_scale_2=2.0
    )
    checkpoint = load_checkpoint(folders["a14b-i2v"])
    timesteps = schedule(checkpoint, 6).timesteps
    assert {bool(t >= 900) for t in timesteps} == {True, False}, "both experts must be at work"
    mine = ours(checkpoint, **size, steps=6, guidance=Guidance(3.5, 2.0), first=first, last=last)
    assert_same(mine, reference)


def test_image_encoder_of_wan_2_1(folders: dict[str, Path], tmp_path: Path) -> None:
    base = library.WanImageToVideoPipeline.from_pretrained(folders["a14b-i2v"], dtype=torch.float32)
    torch.manual_seed(3)
    config = dict(base.transformer.config) | {"image_dim": 24, "added_kv_proj_dim": 32}
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    # Wan 2.1's attention counts back 512 text tokens to find the image's
    base.tokenizer.model_max_length = 512
    pipeline = library.WanImageToVideoPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        vae=base.vae,
        scheduler=base.scheduler,
        transformer=library.WanTransformer3DModel.from_config(config),
        image_encoder=CLIPVisionModel(vision),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    )
    pipeline.save_pretrained(tmp_path)
    size: dict[str, Any] = {"width": 48, "height": 48, "num_frames": 5}
    first = picture(48, 48, 4)
    reference = theirs(pipeline, image=first, **size, num_inference_steps=2, guidance_scale=5.0)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.layout == "wan-i2v"
    mine = ours(checkpoint, **size, steps=2, guidance=Guidance(5.0), first=first)
    assert_same(mine, reference)


@pytest.mark.parametrize("layout", ["ti2v", "a14b-i2v"])
def test_bf16_as_on_a_gpu(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The dtypes of a GPU, on the CPU: bf16 but for the autoencoder and the modules that diffusers keeps in fp32."""
    pipeline = library.WanImageToVideoPipeline.from_pretrained(folders[layout], dtype=torch.bfloat16)
    pipeline.vae = library.AutoencoderKLWan.from_pretrained(folders[layout] / "vae", dtype=torch.float32)
    size: dict[str, Any] = {"width": 48, "height": 32, "num_frames": 9}
    first = picture(48, 32, 1)
    reference = theirs(pipeline, image=first, **size, num_inference_steps=4, guidance_scale=3.0)
    checkpoint = load_checkpoint(folders[layout], dtype=torch.bfloat16)
    kept = {name for name, weight in checkpoint.transformer.named_parameters() if weight.dtype == torch.float32}
    assert kept == {name for name, weight in pipeline.transformer.named_parameters() if weight.dtype == torch.float32}
    assert any("scale_shift_table" in name for name in kept)
    # one after the other, as diffusers runs them: a batch rounds bf16 products in another order
    monkeypatch.setattr(loop, "BATCHED_GUIDANCE_TOKENS", 0)
    mine = ours(checkpoint, **size, steps=4, guidance=Guidance(3.0), first=first)
    # bf16 has 8 bits: the patch embedding's sums may fall on either side of one
    assert (mine[0] - reference[0]).abs().max() < 0.05
    assert (mine[0] - reference[0]).abs().mean() < 0.005
