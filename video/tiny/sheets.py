"""Contact sheets: clips as strips of frames with their captions, for eyes."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw
from torch import Tensor

from video.tiny import captions
from video.tiny.latents import Bucket
from video.tiny.model import FLOW_SHIFT, MAX_TOKENS, build_scheduler
from video.tiny.tokenizer import build_tokenizer
from video.tiny.world import sample_scene

CAPTION_HEIGHT = 28


def sheet(clips: Tensor, lines: list[str], path: Path, *, frames: int = 3, columns: int = 2) -> None:
    """Write clips `[N, T, H, W, 3]` uint8 as strips of evenly spaced frames, each over its line of text."""
    clips = clips.cpu()
    count, length, height, width, _ = clips.shape
    chosen = torch.linspace(0, length - 1, frames).round().long()
    strips = clips[:, chosen].permute(0, 2, 1, 3, 4).reshape(count, height, frames * width, 3).numpy()
    rows = (count + columns - 1) // columns
    image = Image.new("RGB", (columns * (frames * width + 8), rows * (height + CAPTION_HEIGHT)), "white")
    pen = ImageDraw.Draw(image)
    for index, (strip, line) in enumerate(zip(strips, lines, strict=True)):
        x = index % columns * (frames * width + 8)
        y = index // columns * (height + CAPTION_HEIGHT)
        image.paste(Image.fromarray(np.ascontiguousarray(strip)), (x, y))
        pen.text((x + 2, y + height), "\n".join(textwrap.wrap(line, frames * width // 6)[:2]), fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


@torch.no_grad()
def reconstructions(vae: Any, clips: Tensor, path: Path) -> None:
    """Show clips `[N, T, H, W, 3]` uint8 beside what diffusers' own encode and decode make of them, in fp32."""
    decoded = []
    for clip in clips.split(4):
        latents = vae.encode(clip.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).latent_dist.mode()
        video = vae.decode(latents).sample.permute(0, 2, 3, 4, 1)
        decoded.append(((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
    pairs = torch.stack([clips, torch.cat(decoded)], dim=1).flatten(0, 1)
    sheet(pairs, ["drawn", "decoded"] * len(clips), path)


@torch.no_grad()
def generations(
    transformer: Any, vae: Any, text_encoder: Any, bucket: Bucket, path: Path, *, count: int, steps: int = 20
) -> Tensor:
    """Generate clips of the bucket's size for half trained, half unseen scenes, through diffusers' own pipeline.

    Returns:
        The clips, `[count, T, H, W, 3]` uint8.
    """
    scenes = [sample_scene(10_000 + i, "train" if i % 2 == 0 else "unseen") for i in range(count)]
    prompts = [captions.caption(scene, scene.seed) for scene in scenes]
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(captions.WORDS),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer.eval(),
        scheduler=build_scheduler(FLOW_SHIFT),
        expand_timesteps=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        prompts,
        height=bucket.height,
        width=bucket.width,
        num_frames=bucket.num_frames,
        num_inference_steps=steps,
        guidance_scale=3.0,
        max_sequence_length=MAX_TOKENS,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames
    clips = torch.from_numpy((np.asarray(frames) * 255).round().astype(np.uint8))
    sheet(clips, prompts, path)
    return clips
