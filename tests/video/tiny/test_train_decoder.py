"""The decoder's last training: latents that a denoiser gave back, windows of them, and a loss that falls."""

import json
from pathlib import Path

import pytest
import torch

from video.tiny import train_decoder
from video.tiny.draw import draw
from video.tiny.forward import Kernels
from video.tiny.model import build_autoencoder, build_transformer
from video.tiny.optim import Budget
from video.tiny.runs import Log
from video.tiny.train_decoder import Material, draw_windows, roll_out
from video.tiny.train_small import AUTOENCODER, TRANSFORMER
from video.tiny.world import compose

KERNELS = Kernels(dtype=torch.float32)


class Straight(torch.nn.Module):
    """Stands for a denoiser that knows the clean latents."""


def test_a_denoiser_that_knows_the_clip_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    clean = torch.randn(3, 16, 2, 4, 6, generator=generator)
    asked = []

    def velocity(_: object, latents: torch.Tensor, times: torch.Tensor, words: torch.Tensor, *rest: object) -> object:
        asked.append((times, words))
        # towards the clean latents, with the words and without
        return (latents - clean.repeat(2, 1, 1, 1, 1)) / (times[:, None, :, None, None] / 1000)

    monkeypatch.setattr("video.tiny.forward.denoise", velocity)
    text, empty = torch.ones(3, 5, 8), torch.zeros(5, 8)
    made = roll_out(Straight(), clean, text, empty, KERNELS, generator)
    assert torch.allclose(made, clean, atol=1e-4)
    assert len(asked) == train_decoder.STEPS
    times = torch.stack([call[0] for call in asked]) / 1000
    low, high = train_decoder.NOISE
    assert low <= times[0].min() and times[0].max() <= high
    assert torch.all(times.diff(dim=0) < 0) and times[-1].min() > 0
    assert asked[0][1][:3].eq(1).all() and asked[0][1][3:].eq(0).all()


def test_a_rollout_is_the_models_own_and_depends_on_the_words() -> None:
    torch.manual_seed(0)
    model = build_transformer(**{**TRANSFORMER, "num_layers": 1}).eval()
    clean = torch.randn(2, 16, 2, 4, 6)
    text, empty = torch.randn(2, 5, 192), torch.zeros(5, 192)

    def made(words: torch.Tensor) -> torch.Tensor:
        return roll_out(model, clean, words, empty, KERNELS, torch.Generator().manual_seed(1))

    assert torch.equal(made(text), made(text))
    assert not torch.equal(made(text), made(-text))


def material(count: int = 2) -> Material:
    scenes = [compose([("ball", "red", "large", "still")], "blue", seed=seed) for seed in range(count)]
    pixels = draw(scenes, 5, 96, 160)
    clean = torch.arange(count * 16 * 2 * 12 * 20, dtype=torch.float32).view(count, 16, 2, 12, 20)
    return Material(pixels, clean, -clean, torch.tensor([[3, 5]] * count))


def test_windows_of_latents_and_pixels_are_of_one_place() -> None:
    some = material()
    # pixels that say where they are
    rows, columns = torch.arange(96).view(1, 1, 96, 1, 1), torch.arange(160).view(1, 1, 1, 160, 1)
    where = torch.cat([rows.expand(2, 5, 96, 160, 1), columns.expand(2, 5, 96, 160, 1)], dim=-1)
    some = Material(where, some.clean, some.made, some.token)
    latents, pixels = draw_windows(some, 40, torch.Generator().manual_seed(0))
    assert latents.shape == (40, 16, 2, 8, 8) and pixels.shape == (40, 5, 64, 64, 2)
    first = latents[:, 0, 0, 0, 0].abs() % (12 * 20)
    assert torch.equal(pixels[:, 0, 0, 0, 0], (first // 20 * 8).long())
    assert torch.equal(pixels[:, 0, 0, 0, 1], (first % 20 * 8).long())
    is_clean = latents[:, 0, 0, 0, 1] > 0
    assert 3 < is_clean.sum() < 25


def test_training_lowers_the_loss_and_leaves_the_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = build_autoencoder(**AUTOENCODER)
    some = material()
    with torch.no_grad():
        clean = vae.encode(some.pixels.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).latent_dist.mode()
    some = Material(some.pixels, clean, clean + 0.1 * torch.randn(clean.shape), some.token)
    encoder = {name: tensor.clone() for name, tensor in vae.encoder.state_dict().items()}
    decoder = {name: tensor.clone() for name, tensor in vae.decoder.state_dict().items()}
    log = Log(tmp_path / "log.jsonl")
    train_decoder.train(vae, [some], Budget(steps=24), log, KERNELS, learning_rate=3e-3, frames_a_step=20, log_every=8)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()[:3]]
    assert losses[2] < 0.8 * losses[0]
    assert all(torch.equal(encoder[name], tensor) for name, tensor in vae.encoder.state_dict().items())
    assert any(not torch.equal(decoder[name], tensor) for name, tensor in vae.decoder.state_dict().items())
