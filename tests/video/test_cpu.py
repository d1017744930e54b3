"""The faster convolutions give what torch's own give."""

from typing import Any

import pytest
import torch
from torch import nn

from video.cpu import speed_up_convolutions
from video.tiny.model import build_autoencoder


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((3, 3, 3), 1, 0), ((3, 1, 1), (2, 1, 1), 0), ((1, 2, 2), (1, 2, 2), 0), ((1, 1, 1), 1, 0), ((3, 3, 3), 1, 1)],
)
@torch.no_grad()
def test_convolutions_are_equal(kernel: tuple[int, int, int], stride: int | tuple[int, int, int], padding: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(5, 7, kernel, stride=stride, padding=padding)
    x = torch.randn(2, 5, 5, 8, 6)
    expected = convolution(x)
    assert speed_up_convolutions(convolution) == 1
    assert convolution(x).shape == expected.shape
    assert (convolution(x) - expected).abs().max() < 1e-5


def test_convolutions_of_groups_are_left_alone() -> None:
    assert speed_up_convolutions(nn.Conv3d(4, 4, 3, groups=2)) == 0


@torch.no_grad()
def test_autoencoder_is_equal() -> None:
    torch.manual_seed(0)
    vae: Any = build_autoencoder(base_dim=4, decoder_base_dim=4)
    vae.eval()
    clip = torch.rand(1, 3, 9, 32, 48) * 2 - 1
    latents = vae.encode(clip).latent_dist.mode()
    frames = vae.decode(latents).sample
    assert speed_up_convolutions(vae) > 20
    assert (vae.encode(clip).latent_dist.mode() - latents).abs().max() < 1e-5
    assert (vae.decode(latents).sample - frames).abs().max() < 1e-5
