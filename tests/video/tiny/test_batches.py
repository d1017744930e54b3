"""What the denoiser sees: windows hold their thing, clips from the middle of a motion are always given its frame."""

from functools import cache

import torch
from torch import Tensor

from video.tiny import batches, captions, train_transformer
from video.tiny.alignment import shown
from video.tiny.draw import covers, draw
from video.tiny.forward import Kernels
from video.tiny.latents import Bucket, Encoded, encode_bucket, join
from video.tiny.model import build_autoencoder, build_text_encoder
from video.tiny.train_small import taught_scenes

CPU = torch.device("cpu")
IMAGES = Bucket(96, 160, 1, 48, share=1, late_share=1, material=1, max_clips=24)
SECOND = Bucket(96, 160, 17, 12, share=1, late_share=1, material=1, max_clips=64)
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


def test_a_window_holds_its_thing_all_the_time_and_lies_where_the_clip_has_it() -> None:
    # latents that say where they lie
    column = torch.arange(20.0).expand(12, 20)
    row = torch.arange(12.0)[:, None].expand(12, 20)
    scenes = [scene for part in taught_scenes("train", SEED, 64, 1) for scene in part.scenes]
    generator = torch.Generator().manual_seed(1)
    held, used, corners = [], set(), set()
    for bucket in (IMAGES, SECOND):
        clean = torch.stack([row, column])[None, :, None].expand(64, -1, bucket.latent_frames, -1, -1)
        made = Encoded(bucket, clean, clean, clean, shown(scenes, bucket.num_frames, 96, 160, CPU))
        cover, _ = covers(scenes, bucket.num_frames, 96, 160)
        found = batches.near_of(made)
        assert sorted(index for window in found for index in window.rows.tolist()) == list(range(64))
        for window in found:
            chosen = torch.arange(len(window.rows)).repeat(4)
            places = batches.corners_of(window, chosen, bucket, torch.rand(len(chosen), 2, generator=generator))
            rows = window.rows[chosen]
            parts = batches.cut(clean[rows], places, window)
            height, width = 2 * window.down, 2 * window.across
            assert parts.shape == (len(rows), 2, bucket.latent_frames, height, width)
            for part, clip in zip(parts, cover[rows, 0], strict=True):
                top, left = (int(part[axis, 0, 0, 0]) for axis in (0, 1))
                assert torch.equal(part[0, -1, :, 0], top + torch.arange(height))
                assert torch.equal(part[1, -1, 0], left + torch.arange(width))
                inside = clip[:, 8 * top : 8 * (top + height), 8 * left : 8 * (left + width)].sum()
                held.append(float(inside / clip.sum()))
                corners.add((top, left))
            used.add((window.down, window.across))
    # but for edges that cover next to nothing of a token
    assert min(held) > 0.96
    assert used == set(batches.WINDOWS) and len(corners) > 10


def test_windows_are_chosen_as_often_as_clips_fit_them() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    windows = [batches.Near(4, 5, torch.arange(count), empty, empty) for count in (3, 1)]
    chosen = [batches.choose_near(windows, draw) for draw in (0.0, 0.7, 0.76, 0.999)]
    assert [len(window.rows) for window in chosen] == [3, 3, 1, 1]


def test_windows_are_as_many_more_as_cost_the_same() -> None:
    images, empty = encoded(IMAGES, (0, 0, 0))
    window = batches.near_of(images)[0]
    batch = batches.draw_batch(images, empty, None, torch.Generator().manual_seed(0), window=window)
    assert batch.clean.shape == (144, 16, 1, 8, 10)
    assert batch.shown is None
    whole = batches.draw_batch(images, empty, None, torch.Generator().manual_seed(0))
    assert whole.clean.shape == (48, 16, 1, 12, 20)


def test_the_frame_that_a_clip_ends_with_is_cut_as_the_clip_is() -> None:
    clips, empty = encoded(SHORT, (0,))
    frames = clips.bucket.latent_frames
    assert frames >= 3
    generator = torch.Generator().manual_seed(0)
    seen = 0
    for window in batches.near_of(clips):
        batch = batches.draw_batch(clips, empty, None, generator, window=window)
        is_last = (batch.sigmas[:, -1] == 0) & (batch.sigmas[:, -2] > 0)
        rests = clips.rest.float().unfold(3, 2 * window.down, 2).unfold(4, 2 * window.across, 2)
        for clean in batch.clean[is_last]:
            # somewhere in the rest frame of some clip
            assert (rests[:, :, 0] - clean[None, :, -1, None, None]).abs().amax((1, 4, 5)).min() == 0
            seen += 1
    assert seen > 0


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
