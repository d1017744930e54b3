"""Training: forwards equal diffusers', short runs lower the loss and resume bit for bit, runs become checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from video.tiny import bank, batches, captions, forward, train_autoencoder, train_text, train_transformer
from video.tiny.convert import convert, unpack
from video.tiny.draw import draw
from video.tiny.forward import Kernels
from video.tiny.latents import Bucket, Encoded, encode_all, request
from video.tiny.model import MAX_TOKENS, build_autoencoder, build_text_encoder, build_transformer, rest_latent
from video.tiny.optim import Budget, learning_rate_scale, orthogonalize
from video.tiny.runs import Log, load_weights, save_weights
from video.tiny.tokenizer import build_tokenizer

CPU = torch.device("cpu")
KERNELS = Kernels()
BUCKET = Bucket(32, 48, 17, batch=4, share=1, late_share=1, material=1, max_clips=6)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def assert_equal_weights(first: Path, second: Path, name: str) -> None:
    ours, theirs = load_weights(first, name)[0], load_weights(second, name)[0]
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


@torch.no_grad()
def test_whole_clip_autoencoder_equals_diffusers() -> None:
    torch.manual_seed(0)
    vae: Any = build_autoencoder(base_dim=8, decoder_base_dim=8).eval()
    clips = torch.randint(0, 256, (2, 13, 32, 48, 3), dtype=torch.uint8)
    mean, log_variance = forward.encode(vae, clips, KERNELS)
    theirs = vae.encode(clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).latent_dist
    torch.testing.assert_close(mean, theirs.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(log_variance, theirs.logvar, atol=1e-5, rtol=1e-4)
    latents = torch.randn(2, 16, 4, 4, 6)
    video = forward.decode(vae, latents, KERNELS).clamp(-1, 1).permute(0, 4, 1, 2, 3)
    torch.testing.assert_close(video, vae.decode(latents).sample, atol=1e-5, rtol=1e-4)
    single = forward.encode(vae, clips[:, :1], KERNELS)[0]
    torch.testing.assert_close(single, theirs.mean[:, :, :1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_counts_as_often_as_it_is_left_out() -> None:
    torch.manual_seed(0)
    model: Any = build_transformer(num_attention_heads=2, attention_head_dim=16, text_dim=32, ffn_dim=64, num_layers=2)
    latents, timesteps = torch.randn(2, 16, 3, 4, 6), torch.tensor([[500.0] * 3, [900.0] * 3])
    text = torch.randn(2, MAX_TOKENS, 32)
    text[0, 9:] = 0
    text[1, 12:] = 0
    whole = forward.denoise(model, latents, timesteps, text, KERNELS)
    cropped = forward.denoise(model, latents, timesteps, text[:, :13], KERNELS, text_tokens=MAX_TOKENS)
    torch.testing.assert_close(cropped, whole, atol=1e-5, rtol=1e-4)
    assert (forward.denoise(model, latents, timesteps, text[:, :13], KERNELS) - whole).abs().max() > 1e-3


@torch.no_grad()
def test_denoiser_equals_diffusers_with_a_timestep_a_token() -> None:
    torch.manual_seed(0)
    model: Any = build_transformer(num_attention_heads=2, attention_head_dim=16, text_dim=32, ffn_dim=64, num_layers=2)
    latents, text = torch.randn(2, 16, 3, 4, 6), torch.randn(2, MAX_TOKENS, 32)
    timesteps = torch.tensor([[0.0, 500.0, 500.0], [900.0, 900.0, 0.0]])
    ours = forward.denoise(model, latents, timesteps, text, KERNELS)
    theirs = model(latents, timesteps.repeat_interleave(6, 1), text, return_dict=False)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_causal_mask_hides_later_latent_frames() -> None:
    model = build_transformer(num_attention_heads=2, attention_head_dim=16, text_dim=32, ffn_dim=64, num_layers=2)
    mask = batches.causal_mask(Bucket(32, 48, 13, 1, 1, 1, 1, 1), CPU)
    latents, text, timesteps = torch.randn(1, 16, 4, 4, 6), torch.randn(1, MAX_TOKENS, 32), torch.full((1, 4), 300.0)
    before = forward.denoise(model, latents, timesteps, text, KERNELS, mask)
    latents[:, :, 2:] = 7.0
    after = forward.denoise(model, latents, timesteps, text, KERNELS, mask)
    torch.testing.assert_close(after[:, :, :2], before[:, :, :2])
    assert not torch.allclose(after[:, :, 2:], before[:, :, 2:])


@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 24, 8), (2, 8, 40)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_schedule_warms_up_holds_and_falls() -> None:
    assert learning_rate_scale(0.0, 0) == 0.01
    assert learning_rate_scale(0.2, 1000) == 1.0
    assert learning_rate_scale(0.675, 1000) == pytest.approx(0.5)
    assert learning_rate_scale(1.0, 1000) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="steps or seconds"):
        Budget()


def test_weights_come_back_from_shards(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1500, 1500), "b": torch.randn(1500, 1500), "c": torch.arange(3.0)}
    save_weights(tmp_path, "part", tensors, {"steps": 3})
    assert {path.name for path in tmp_path.iterdir()} == {"part-0.safetensors", "part-1.safetensors"}
    loaded, about = load_weights(tmp_path, "part")
    assert about == {"steps": 3}
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    with pytest.raises(FileNotFoundError, match="other"):
        load_weights(tmp_path, "other")


def train_autoencoder_for(out: Path, steps: int, *, resume: bool = False) -> None:
    banks = train_autoencoder.draw_banks(None, {"wide": (8, 9, 32, 48)}, CPU)
    vae = train_autoencoder.fresh_autoencoder(0, base_dim=8, decoder_base_dim=8)
    crops = (train_autoencoder.Crop("wide", 5, 2, 0.6), train_autoencoder.Crop("wide", 9, 1, 0.4))
    out.mkdir(exist_ok=True)
    budget = Stopped(steps=40, stop_after=steps)
    log = Log(out / "log.jsonl")
    arguments: dict[str, Any] = {"held_out": banks["wide"][:1], "log_every": 4, "save_every": 2, "resume": resume}
    arguments["learning_rate"] = 1e-2
    train_autoencoder.train(vae, banks, crops, budget, out, log, KERNELS, **arguments)


class Stopped(Budget):
    """A budget of steps that ends early, as a killed run does."""

    def __init__(self, steps: int, stop_after: int) -> None:
        super().__init__(steps=steps)
        self.stop_after = stop_after

    def progress(self, step: int) -> float:
        return 1.0 if step >= self.stop_after else super().progress(step)


def test_autoencoder_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    train_autoencoder_for(tmp_path / "whole", 24)
    train_autoencoder_for(tmp_path / "parts", 10)
    train_autoencoder_for(tmp_path / "parts", 24, resume=True)
    assert_equal_weights(tmp_path / "whole", tmp_path / "parts", "vae")
    values = losses(tmp_path / "whole")
    assert values[-1] < 0.9 * values[0]


def train_text_for(out: Path, steps: int, *, resume: bool = False) -> None:
    ids, labels = bank.label_all(None, bank.jobs("train", 0, 64, 1, 0.3))
    torch.manual_seed(0)
    reader = train_text.Reader(len(captions.WORDS) + 3)
    log = Log(out / "log.jsonl")
    arguments: dict[str, Any] = {"check": (ids, labels), "batch": 8, "log_every": 4, "save_every": 2, "resume": resume}
    train_text.train(reader, ids, labels, Stopped(steps=40, stop_after=steps), out, log, **arguments)


def test_text_encoder_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    train_text_for(tmp_path / "whole", 16)
    train_text_for(tmp_path / "parts", 6)
    train_text_for(tmp_path / "parts", 16, resume=True)
    assert_equal_weights(tmp_path / "whole", tmp_path / "parts", "text")
    values = losses(tmp_path / "whole")
    assert values[-1] < 0.9 * values[0]


def test_embedding_equals_the_pipelines() -> None:
    torch.manual_seed(0)
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    said = bank.say(bank.Job("train", 0, 2, 1))
    text = captions.caption(said.scenes[1], said.scenes[1].seed * 1000)
    ours = train_text.embed(encoder, torch.from_numpy(said.ids[1]), torch.float32)
    pipeline = WanPipeline.__new__(WanPipeline)
    pipeline.tokenizer, pipeline.text_encoder = build_tokenizer(captions.WORDS), encoder
    theirs = pipeline._get_t5_prompt_embeds(text, max_sequence_length=MAX_TOKENS, device=CPU)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def encoded_material() -> tuple[list[Encoded], Tensor]:
    torch.manual_seed(0)
    vae = build_autoencoder(base_dim=8, decoder_base_dim=8)
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    material = encode_all((BUCKET,), request(None, (BUCKET,), 2), vae, encoder, KERNELS, None)
    return material, train_transformer.empty_text(encoder, CPU)


def test_encoded_clips_follow_the_rules_of_the_model() -> None:
    material, _ = encoded_material()
    assert material[0].latents.shape == (6, 16, 5, 4, 6)
    assert material[0].text.shape == (6, 2, MAX_TOKENS, 192)
    torch.manual_seed(0)
    vae = build_autoencoder(base_dim=8, decoder_base_dim=8)
    scenes = bank.say(bank.Job("train", 0, 6, 0)).scenes
    frames = draw(scenes, 17, 32, 48)[:, -4].permute(0, 3, 1, 2).float() / 127.5 - 1
    torch.testing.assert_close(material[0].rest, rest_latent(vae, frames).detach(), atol=1e-5, rtol=1e-4)


def test_conditions_are_clean_and_everything_else_is_noisy() -> None:
    material, empty = encoded_material()
    wide = Encoded(Bucket(32, 48, 17, 256, 1, 1, 1, 6), material[0].latents, material[0].rest, material[0].text)
    batch = batches.draw_batch(wide, empty, None, torch.Generator().manual_seed(0))
    clean = batch.sigmas == 0
    patterns = {tuple(row) for row in clean.long().tolist()}
    assert patterns == {(0,) * 5, (1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 1, 1, 0, 0), (1, 1, 1, 1, 0), (1, 0, 0, 0, 1)}
    assert 0.4 < (clean.sum(1) == 0).float().mean() < 0.7
    rests = clean[:, -1]
    distances = (batch.clean[rests][:, None, :, -1:] - material[0].rest[None]).abs().amax((2, 3, 4, 5)).amin(1)
    assert distances.max() == 0
    mask = batches.causal_mask(wide.bucket, CPU)
    causal = batches.draw_batch(wide, empty, mask, torch.Generator().manual_seed(0)).sigmas
    assert (causal[:, -1] > 0).all()
    assert len(causal[0].unique()) > 2


def test_short_clips_have_something_to_learn_in_every_row() -> None:
    material, empty = encoded_material()
    for frames in (1, 2):
        bucket = Bucket(32, 48, 4 * frames - 3, 256, 1, 1, 1, 6)
        short = Encoded(bucket, material[0].latents[:, :, :frames], material[0].rest, material[0].text)
        batch = batches.draw_batch(short, empty, None, torch.Generator().manual_seed(0))
        patterns = {tuple(row) for row in (batch.sigmas == 0).long().tolist()}
        assert patterns == ({(0,)} if frames == 1 else {(0, 0), (1, 0)})
        drawn = short.latents[None].expand(256, -1, -1, -1, -1, -1) - batch.clean[:, None]
        assert drawn.abs().amax((2, 3, 4, 5)).amin(1).max() == 0


def train_transformer_for(out: Path, steps: int, *, resume: bool = False) -> None:
    material, empty = encoded_material()
    model = train_transformer.fresh_transformer(0, num_layers=2, attention_head_dim=32, ffn_dim=128)
    log = Log(out / "log.jsonl")
    arguments: dict[str, Any] = {"log_every": 4, "save_every": 2, "resume": resume, "causal_share": 0.3, "align": 0.1}
    arguments["learning_rate"] = 2e-2
    budget = Stopped(steps=40, stop_after=steps)
    train_transformer.train(model, material, empty, budget, out, log, KERNELS, **arguments)


def test_denoiser_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    train_transformer_for(tmp_path / "whole", 32)
    train_transformer_for(tmp_path / "parts", 12)
    train_transformer_for(tmp_path / "parts", 32, resume=True)
    assert_equal_weights(tmp_path / "whole", tmp_path / "parts", "transformer")
    values = losses(tmp_path / "whole")
    assert values[-1] < 0.9 * values[0]


def test_a_run_becomes_a_checkpoint_below_thirty_megabytes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    vae = train_autoencoder.fresh_autoencoder(0)
    about = {"latents_mean": [0.1] * 16, "latents_std": [0.9] * 16, "words": list(captions.WORDS)}
    save_weights(run, "vae", vae.state_dict(), about)
    save_weights(run, "text", build_text_encoder(len(captions.WORDS) + 3).state_dict(), about)
    save_weights(run, "transformer", train_transformer.fresh_transformer(0).state_dict(), about)
    assert all(file.stat().st_size < 16 * 2**20 for file in run.iterdir())
    assert convert(run, tmp_path / "checkpoint") < 30_000_000
    unpack(tmp_path / "checkpoint", tmp_path / "again")
    for name in ("vae", "text", "transformer"):
        ours, theirs = load_weights(run, name)[0], load_weights(tmp_path / "again", name)[0]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key].bfloat16(), theirs[key].bfloat16()) for key in ours)
    assert load_weights(tmp_path / "again", "vae")[1]["latents_mean"] == pytest.approx([0.1] * 16)
    pipeline = WanPipeline.from_pretrained(tmp_path / "checkpoint")
    assert pipeline.vae.config.latents_mean == pytest.approx([0.1] * 16)
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 1, "max_sequence_length": MAX_TOKENS}
    assert pipeline("a red ball", **size).frames.shape == (1, 5, 32, 32, 3)
