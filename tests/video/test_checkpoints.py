"""Loading: what is read, which layout it is, and what a broken folder is told."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from video.checkpoints import hash_weights, load_checkpoint
from video.errors import CheckpointError
from video.tiny.model import Layout, random_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), "ti2v")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.mark.parametrize(
    ("layout", "expected", "experts"), [("t2v", "wan-t2v", 1), ("ti2v", "wan-ti2v", 1), ("a14b-i2v", "wan-i2v", 2)]
)
def test_layouts_are_told_apart(tmp_path: Path, layout: Layout, expected: str, experts: int) -> None:
    checkpoint = load_checkpoint(random_checkpoint(tmp_path, layout))
    assert checkpoint.layout == expected
    assert (checkpoint.transformer_2 is None) == (experts == 1)
    assert (checkpoint.size_multiple, checkpoint.temporal_factor, checkpoint.text_tokens) == (16, 4, 64)
    assert checkpoint.latent_shape(17, 32, 48) == (1, 16, 5, 4, 6)
    assert checkpoint.num_tokens(17, 32, 48) == 5 * 2 * 3
    assert {p.dtype for p in checkpoint.transformer.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in checkpoint.vae.parameters())


def test_the_hash_covers_weights_and_configuration_and_not_the_card(folder: Path, tmp_path: Path) -> None:
    first = hash_weights(folder)
    (folder / "card.json").write_text("{}")
    assert hash_weights(folder) == first
    cache = tmp_path / "hashes.json"
    assert hash_weights(folder, cache) == first
    assert hash_weights(folder, cache) == first
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text() + "\n")
    changed = hash_weights(folder, cache)
    assert changed == hash_weights(folder) != first
    cache.write_text("[1")
    assert hash_weights(folder, cache) == changed
    # one that cannot be written is done without
    assert hash_weights(folder, tmp_path / "no folder" / "hashes.json") == changed


def test_the_card_is_read(folder: Path) -> None:
    assert load_checkpoint(folder).card is None
    (folder / "card.json").write_text(json.dumps({"v": 1, "name": "x"}))
    assert load_checkpoint(folder).card == {"v": 1, "name": "x"}


WEIGHTS = "diffusion_pytorch_model.safetensors"


def truncate(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(folder: Path) -> None:
    path = folder / "vae" / WEIGHTS
    tensors = load_file(path)
    tensors.pop("decoder.conv_in.weight")
    save_file(tensors, path, {"format": "pt"})


def drop_a_text_tensor(folder: Path) -> None:
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("encoder.final_layer_norm.weight")
    save_file(tensors, path, {"format": "pt"})


def misshape(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    tensors = load_file(path)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].repeat(2, 1)
    save_file(tensors, path, {"format": "pt"})


def pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "vae" / WEIGHTS), folder / "vae" / "diffusion_pytorch_model.bin")
    (folder / "vae" / WEIGHTS).unlink()


def edit(name: str, **values: object) -> object:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "transformer: the weights do not load"),
        (drop_a_tensor, "vae: the weights lack decoder.conv_in.weight"),
        (drop_a_text_tensor, "text_encoder: the weights lack encoder.final_layer_norm.weight"),
        (misshape, "transformer: the weights do not load.*proj_out.weight"),
        (pickle_only, "vae: must hold its weights as safetensors"),
        (lambda folder: (folder / "model_index.json").unlink(), "model_index.json: is missing"),
        (lambda folder: (folder / "vae" / "config.json").write_text("{"), "vae/config.json: is not JSON"),
        (edit("scheduler/scheduler_config.json", _class_name="DDIMScheduler"), "scheduler: must be one of.*'DDIM"),
        (edit("vae/config.json", _class_name="AutoencoderKL"), "vae: must be a AutoencoderKLWan"),
        (edit("model_index.json", boundary_ratio=0.9), "transformer_2 and boundary_ratio come together"),
    ],
)
def test_a_broken_folder_is_refused_by_name(folder: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(folder)
    assert str(folder) not in str(raised.value)
