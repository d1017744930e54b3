"""The encoded clips that the denoiser trains on: latents and caption embeddings by size of clip.

Invariants: latents are normalised; a clip's `rest` is `rest_latent` of its frame -4 (see video/tiny/model.py); a
caption's embedding has zeros after `</s>`, as in the Wan pipelines. A clip of less than `FEWEST_FOR_REST` latent frames
has zeros for its `rest`: between its first and its last frame there is nothing to learn.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any

import torch
from torch import Tensor, nn

from video.tiny import bank, forward
from video.tiny.alignment import Shown, shown
from video.tiny.draw import draw
from video.tiny.forward import Kernels
from video.tiny.model import PATCH, SPATIAL_FACTOR, TEMPORAL_FACTOR
from video.tiny.optim import Budget
from video.tiny.train_text import embed

FEWEST_FOR_REST = 3


@dataclass(frozen=True)
class Bucket:
    """A size of clip: `batch` clips a step; its share of the steps goes from `share` to `late_share`.

    max_clips: encoded at most; material: its share of the time for encoding.
    """

    height: int
    width: int
    num_frames: int
    batch: int
    share: float
    late_share: float
    material: float
    max_clips: int

    @property
    def latent_frames(self) -> int:
        """Give the latent frames of a clip."""
        return (self.num_frames - 1) // TEMPORAL_FACTOR + 1

    @property
    def tokens_a_frame(self) -> int:
        """Give the tokens of a latent frame."""
        return self.height * self.width // (SPATIAL_FACTOR * PATCH) ** 2

    @property
    def tokens(self) -> int:
        """Give the tokens of a clip."""
        return self.latent_frames * self.tokens_a_frame

    @property
    def name(self) -> str:
        """Give its size as `HEIGHTxWIDTHxFRAMES`."""
        return f"{self.height}x{self.width}x{self.num_frames}"


@dataclass
class Encoded:
    """The clips of a bucket: latents `[N, 16, F, h, w]`, rest `[N, 16, 1, h, w]`, text `[N, K, L, D]`.

    is_late: `[N]` bool, true where a clip begins in the middle of its motion; None: nowhere.
    """

    bucket: Bucket
    latents: Tensor
    rest: Tensor
    text: Tensor
    shown: Shown | None = None
    is_late: Tensor | None = None


def join(parts: Sequence[Encoded]) -> list[Encoded]:
    """Join the parts of each bucket, which stand one after another; all know what they show. Texts become halves."""
    joined = []
    for bucket, group in itertools.groupby(parts, key=lambda part: part.bucket):
        some = list(group)
        columns = [torch.cat([getattr(part, name) for part in some]) for name in ("latents", "rest")]
        columns.append(torch.cat([part.text.half() for part in some]))
        seen = [part.shown for part in some if part.shown is not None]
        shown_all = Shown(*(torch.cat([getattr(part, name) for part in seen]) for name in vars(seen[0])))
        late = torch.cat([part.is_late for part in some if part.is_late is not None])
        joined.append(Encoded(bucket, columns[0], columns[1], columns[2], shown_all, late))
    return joined


def request(pool: Pool | None, buckets: tuple[Bucket, ...], captions_each: int) -> list[Iterator[bank.Said]]:
    """Ask the workers for the scenes and captions of all buckets; they run while other things go on."""
    return [
        bank.say_all(pool, bank.jobs("train", 1_000_000 * index, bucket.max_clips, captions_each))
        for index, bucket in enumerate(buckets)
    ]


@torch.no_grad()
def encode_bucket(
    bucket: Bucket,
    said: Iterator[bank.Said],
    vae: Any,
    encoder: Any,
    kernels: Kernels,
    seconds: float | None,
    starts: Sequence[int] = (0,),
) -> Encoded:
    """Draw and encode clips until the seconds or the bucket's `max_clips` are used up.

    Args:
        bucket: size and count.
        said: scenes and captions in order.
        vae, encoder: trained, on one device.
        kernels: compiled or not.
        seconds: wall clock; None for no limit.
        starts: frames of their motions at which the clips begin, each part of `said` at the next one.
    """
    device = next(vae.parameters()).device
    dtype = kernels.dtype
    mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
    latents: list[Tensor] = []
    rests: list[Tensor] = []
    texts: list[Tensor] = []
    seen: list[Shown] = []
    limit = Budget(seconds=seconds) if seconds is not None else Budget(steps=bucket.max_clips)
    # what a GPU needs to be busy; a CPU is fastest while a layer's activations stay in its caches
    pixels_at_once = 64 * 33 * 96 * 160 if device.type == "cuda" else 8 * 17 * 64 * 96
    clips_at_once = max(1, pixels_at_once // (bucket.num_frames * bucket.height * bucket.width))
    count = 0
    late: list[Tensor] = []
    for part, start in zip(said, itertools.cycle(starts), strict=False):
        clips = draw(part.scenes, bucket.num_frames, bucket.height, bucket.width, device=device, start_frame=start)
        late.append(torch.full((len(clips),), start > 0, device=device))
        for some in clips.split(clips_at_once):
            encoded, _ = forward.encode(vae, some, kernels, dtype)
            latents.append(((encoded - mean) / std).to(dtype))
            if bucket.latent_frames < FEWEST_FOR_REST:
                rests.append(torch.zeros_like(latents[-1][:, :, :1]))
                continue
            still = some[:, -TEMPORAL_FACTOR, None].expand(-1, 1 + TEMPORAL_FACTOR, -1, -1, -1)
            resting, _ = forward.encode(vae, still, kernels, dtype)
            rests.append(((resting[:, :, 1:] - mean) / std).to(dtype))
        seen.append(shown(part.scenes, bucket.num_frames, bucket.height, bucket.width, device, start))
        rows = torch.from_numpy(part.ids).to(device)
        texts.append(embed(encoder, rows.flatten(0, 1), dtype).unflatten(0, rows.shape[:2]))
        count += len(part.scenes)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if limit.progress(count) >= 1:
            break
    all_shown = Shown(*(torch.cat([getattr(part, name) for part in seen]) for name in ("cover", "things", "backdrop")))
    return Encoded(bucket, torch.cat(latents), torch.cat(rests), torch.cat(texts), all_shown, torch.cat(late))


def encode_all(
    buckets: tuple[Bucket, ...],
    said: list[Iterator[bank.Said]],
    vae: nn.Module,
    encoder: nn.Module,
    kernels: Kernels,
    seconds: float | None,
) -> list[Encoded]:
    """Encode every bucket, each within its share of the seconds."""
    total = sum(bucket.material for bucket in buckets)
    return [
        encode_bucket(b, s, vae, encoder, kernels, None if seconds is None else seconds * b.material / total)
        for b, s in zip(buckets, said, strict=True)
    ]
