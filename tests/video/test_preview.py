"""Previews: which steps have one, and how near a picture comes to what the autoencoder makes of the same latents."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from video.checkpoints import Checkpoint, load_checkpoint
from video.conditions import Condition, encode_frames
from video.loop import Guidance, decode, denoise, encode_text, noise, schedule
from video.preview import PICTURES, Previewer, fit_previewer, is_preview_step, neighbourhoods

EMBEDDED = Path(__file__).parents[2] / "assets" / "tiny_wan"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(EMBEDDED, "cpu")


@pytest.fixture(scope="module")
def previewer(checkpoint: Checkpoint) -> Previewer:
    return fit_previewer(checkpoint)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 9, 10, 40, 50, 200])
def test_a_few_steps_have_a_picture_and_the_last_has_none(num_steps: int) -> None:
    shown = [step for step in range(1, num_steps + 1) if is_preview_step(step, num_steps)]
    assert len(shown) <= PICTURES and num_steps not in shown
    assert len(shown) >= min(num_steps - 1, PICTURES // 2)


def test_a_picture_has_the_colours_that_the_autoencoder_decodes(checkpoint: Checkpoint, previewer: Previewer) -> None:
    text = encode_text(checkpoint, "a red ball rolls over a green field", "")
    shown: list[torch.Tensor] = []

    def show(step: int, total: int, latents: torch.Tensor) -> None:
        shown.append(latents)

    def report(*_: Any) -> None:
        pass

    made = denoise(
        checkpoint, noise(checkpoint, 9, 96, 160, seed=3), schedule(checkpoint, 6, 3.0), text, Condition(),
        Guidance(3.0), report, show,
    )  # fmt: skip
    assert len(shown) == 6
    # what the last step aims at is what it arrives at
    assert torch.allclose(shown[-1], made, atol=1e-4)
    frames = list(decode(checkpoint, made, report))[1].float().mean(0) / 255
    wanted = avg_pool2d(frames.permute(2, 0, 1)[None], checkpoint.spatial_factor)[0].flatten(1).T
    drawn = (neighbourhoods(made[0, :, 1]) @ previewer.later.weight + previewer.later.bias).clamp(0, 1)
    explained = 1 - ((wanted - drawn) ** 2).sum() / ((wanted - wanted.mean(0)) ** 2).sum()
    assert explained > 0.5
    picture = Image.open(io.BytesIO(previewer.draw(made)))
    assert (picture.format, picture.size) == ("JPEG", (160, 96))
    assert len(previewer.draw(made)) < 8000


def test_plain_colours_come_out_plain(checkpoint: Checkpoint, previewer: Previewer) -> None:
    for colour in ((200, 30, 30), (40, 170, 60), (30, 60, 200), (128, 128, 128)):
        frames = torch.tensor(colour, dtype=torch.uint8).expand(1, 64, 64, 3)
        picture = Image.open(io.BytesIO(previewer.draw(encode_frames(checkpoint, frames)))).convert("RGB")
        middle = torch.tensor(picture.getpixel((picture.width // 2, picture.height // 2)))
        assert (middle - torch.tensor(colour)).abs().max() < 70, (colour, middle)


def test_a_large_clip_has_a_small_picture(previewer: Previewer, checkpoint: Checkpoint) -> None:
    latents = torch.randn(checkpoint.latent_shape(5, 704, 1280), generator=torch.Generator().manual_seed(0))
    picture = Image.open(io.BytesIO(previewer.draw(latents)))
    assert max(picture.size) == 320 and picture.size == (320, 176)
