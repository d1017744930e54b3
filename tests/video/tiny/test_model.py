"""The checkpoints load and sample in diffusers' own pipelines."""

from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from transformers import PreTrainedTokenizerFast

from video.tiny.model import MAX_TOKENS, Layout, build_autoencoder, random_checkpoint, rest_latent
from video.tiny.tokenizer import build_tokenizer, split_words, token_ids

SIZE = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": MAX_TOKENS}


@pytest.mark.parametrize("layout", ["t2v", "ti2v"])
def test_text_to_video_checkpoint_samples(tmp_path: Path, layout: Layout) -> None:
    pipeline = WanPipeline.from_pretrained(random_checkpoint(tmp_path, layout))
    frames = pipeline("a red ball", **SIZE, generator=torch.Generator().manual_seed(0)).frames
    assert frames.shape == (1, 9, 32, 48, 3)
    assert pipeline.config.expand_timesteps == (layout == "ti2v")


@pytest.mark.parametrize("layout", ["ti2v", "a14b-i2v"])
def test_image_to_video_checkpoint_samples(tmp_path: Path, layout: Layout) -> None:
    pipeline = WanImageToVideoPipeline.from_pretrained(random_checkpoint(tmp_path, layout))
    image = Image.new("RGB", (48, 32), (200, 30, 30))
    frames = pipeline(image, "a red ball", **SIZE, generator=torch.Generator().manual_seed(0)).frames
    assert frames.shape == (1, 9, 32, 48, 3)


def test_random_checkpoint_is_small_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, second = random_checkpoint(tmp_path / "a"), random_checkpoint(tmp_path / "b")
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert sum(file.stat().st_size for file in first.rglob("*") if file.is_file()) < 300_000


def test_tokenizer_strips_punctuation_and_keeps_unknown_words(tmp_path: Path) -> None:
    built = build_tokenizer(["red", "ball", "left"])
    built.save_pretrained(tmp_path)
    for tokenizer in (built, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert tokenizer("A RED ball, moves left!").input_ids == [2, 3, 4, 2, 5, 1]
        assert tokenizer("").input_ids == [1]
    texts = ["A RED ball, moves left!", "", "red " * 100, "close-up"]
    padded = built(texts, padding="max_length", max_length=64, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(token_ids(texts, built.get_vocab()), padded)
    assert split_words("Close-up: red, ball.") == ["close", "up", "red", "ball"]
    with pytest.raises(ValueError, match="a-z"):
        build_tokenizer(["Red"])


def test_rest_latent_has_one_latent_frame() -> None:
    vae = build_autoencoder(base_dim=4, decoder_base_dim=4)
    assert rest_latent(vae, torch.zeros(2, 3, 32, 48)).shape == (2, 16, 1, 4, 6)
