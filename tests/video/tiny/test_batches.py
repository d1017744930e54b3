"""What the denoiser sees: windows hold their thing, clips from the middle of a motion are always given its frame."""

from functools import cache

import torch
from torch import Tensor

from video.tiny import batches, captions, train_transformer
from video.tiny.alignment import Shown, shown
from video.tiny.draw import covers, draw
from video.tiny.forward import Kernels
from video.tiny.latents import Bucket, Encoded, encode_bucket, join
from video.tiny.model import build_autoencoder, build_text_encoder
from video.tiny.train_small import taught_scenes
from video.tiny.world import Scene

CPU = torch.device("cpu")
IMAGES = Bucket(96, 160, 1, 48, share=1, late_share=1, material=1, max_clips=24)
SHORT = Bucket(96, 160, 9, 32, share=1, late_share=1, material=1, max_clips=8)
LONGER = Bucket(96, 160, 9, 32, share=1, late_share=1, material=1, max_clips=16)
SEED = 5_000_000


@cache
def encoded(bucket: Bucket, starts: tuple[int, ...]) -> tuple[Encoded, Tensor]:
    torch.manual_seed(0)
    vae = build_autoencoder(base_dim=8, decoder_base_dim=8)
    encoder = build_text_encoder(len(captions.WORDS) + 3).eval()
    # one part of `said` a start
    said = (part for index in range(len(starts)) for part in taught_scenes("train", SEED + 10_000 * index, 8, 2))
    made = encode_bucket(bucket, said, vae, encoder, Kernels(), None, starts)
    return made, train_transformer.empty_text(encoder, CPU)


def test_a_window_holds_its_thing_and_lies_where_the_clip_has_it() -> None:
    # latents that say where they lie
    column = torch.arange(20.0).expand(12, 20)
    row = torch.arange(12.0)[:, None].expand(12, 20)
    scenes = [scene for part in taught_scenes("train", SEED, 64, 1) for scene in part.scenes]
    seen = shown(scenes, 1, 96, 160, CPU)
    clean = torch.stack([row, column])[None, :, None].expand(64, -1, -1, -1, -1)
    held = torch.stack([near_share(clean, seen, scenes, torch.full((64,), draw)) for draw in range(6)])
    assert held.mean() > 0.97
    assert held.min() > 0.6
    corners = {tuple(batches.near(clean, seen, IMAGES, torch.full((64,), draw))[0, :, 0, 0, 0]) for draw in range(6)}
    assert len(corners) > 2


def near_share(clean: Tensor, seen: Shown, scenes: list[Scene], draws: Tensor) -> Tensor:
    """Say how much of each thing's pixels lies in its window."""
    cut = batches.near(clean, seen, IMAGES, draws)
    assert cut.shape == (len(scenes), 2, 1, 8, 10)
    cover, _ = covers(scenes, 1, 96, 160)
    shares = []
    for index, pixels in enumerate(cover[:, 0, 0]):
        top, left = (8 * int(cut[index, axis, 0, 0, 0]) for axis in (0, 1))
        assert torch.equal(cut[index, 0, 0, :, 0], cut[index, 0, 0, 0, 0] + torch.arange(8.0))
        assert torch.equal(cut[index, 1, 0, 0], cut[index, 1, 0, 0, 0] + torch.arange(10.0))
        shares.append(pixels[top : top + 64, left : left + 80].sum() / pixels.sum())
    return torch.stack(shares)


def test_windows_are_as_many_more_as_cost_the_same() -> None:
    images, empty = encoded(IMAGES, (0, 0, 0))
    batch = batches.draw_batch(images, empty, None, torch.Generator().manual_seed(0), is_near=True)
    assert batch.clean.shape == (144, 16, 1, 8, 10)
    assert batch.shown is None
    whole = batches.draw_batch(images, empty, None, torch.Generator().manual_seed(0))
    assert whole.clean.shape == (48, 16, 1, 12, 20)


def test_more_noise_where_asked() -> None:
    images, empty = encoded(IMAGES, (0, 0, 0))
    means = [
        batches.draw_batch(images, empty, None, torch.Generator().manual_seed(0), noise_shift=shift).sigmas.mean()
        for shift in (1.0, 2.5)
    ]
    assert 0.5 < means[0] < 0.65
    assert 0.7 < means[1] < 0.85


def test_a_clip_from_the_middle_of_a_motion_is_drawn_there_and_always_has_its_first_frame_given() -> None:
    clips, empty = encoded(LONGER, (0, 16))
    assert clips.is_late is not None
    assert clips.is_late.tolist() == [False] * 8 + [True] * 8
    late, _ = encoded(SHORT, (16,))
    assert late.is_late is not None
    assert late.is_late.all()
    scenes = next(taught_scenes("train", SEED, 8, 2)).scenes
    frames = draw(scenes, 9, 96, 160, start_frame=16)
    assert not torch.equal(frames, draw(scenes, 9, 96, 160))
    batch = batches.draw_batch(late, empty, None, torch.Generator().manual_seed(0))
    assert (batch.sigmas[:, 0] == 0).all()
    early, _ = encoded(SHORT, (0,))
    batch = batches.draw_batch(early, empty, None, torch.Generator().manual_seed(0))
    assert (batch.sigmas[:, 0] > 0).any()


def test_parts_of_one_size_are_joined_in_order() -> None:
    early, _ = encoded(SHORT, (0,))
    late, _ = encoded(SHORT, (16,))
    images, _ = encoded(IMAGES, (0, 0, 0))
    joined = join([early, late, images])
    assert [one.bucket for one in joined] == [SHORT, IMAGES]
    assert joined[0].is_late is not None
    assert joined[0].is_late.tolist() == [False] * 8 + [True] * 8
    assert torch.equal(joined[0].latents, torch.cat([early.latents, late.latents]))
    assert joined[0].shown is not None
    assert joined[0].shown.cover.shape[0] == 16
    torch.testing.assert_close(joined[0].text[8:].float(), late.text, atol=1e-2, rtol=1e-2)
