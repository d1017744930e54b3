"""What the drawing knows of every token, and a linear probe that holds the denoiser's middle to it while it trains.

A denoiser learns late which token belongs to which phrase. The probe reads the hidden state in the middle of the
denoiser and says of each token how much of a thing it shows, which kind, colour and motion the thing has, and which
backdrop lies behind; its loss is added to the flow's and the probe is dropped afterwards. The idea is that of
representation alignment (arXiv 2410.06940), with the ground truth in place of a pretrained encoder.

Invariant: a token is 4 frames (the first latent frame: one) of 16x16 pixels, in the order of the denoiser's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from video.tiny.draw import covers
from video.tiny.model import PATCH, SPATIAL_FACTOR, TEMPORAL_FACTOR
from video.tiny.vocabulary import BACKDROPS, COLORS, KINDS, MOTIONS
from video.tiny.world import Scene

_SIDE = SPATIAL_FACTOR * PATCH
_COUNTS = (1, len(KINDS), len(COLORS), len(MOTIONS), len(BACKDROPS))


@dataclass(frozen=True)
class Shown:
    """What n clips show. cover: `[n, 2, N]` half, 0..1, of the first and second thing; things: `[n, 2, 3]` int64, the
    indices of kind, colour and motion, -1 where there is no second thing; backdrop: `[n]` int64."""

    cover: Tensor
    things: Tensor
    backdrop: Tensor

    def __getitem__(self, rows: Tensor) -> "Shown":
        return Shown(self.cover[rows], self.things[rows], self.backdrop[rows])


def shown(
    scenes: Sequence[Scene], num_frames: int, height: int, width: int, device: torch.device, start_frame: int = 0
) -> Shown:
    """Say what each token of the scenes' clips shows; sizes as for `video.tiny.draw.draw`."""
    cover, _ = covers(scenes, num_frames, height, width, device=device, start_frame=start_frame)
    # the first latent frame is one frame: repeat it, so that all are means of four
    cover = torch.cat([cover[:, :, :1].expand(-1, -1, TEMPORAL_FACTOR - 1, -1, -1), cover], dim=2)
    cover = reduce(cover, "n k (f t) (h p) (w q) -> n k (f h w)", "mean", t=TEMPORAL_FACTOR, p=_SIDE, q=_SIDE)
    rows = [
        [
            [KINDS.index(thing.kind), COLORS.index(thing.color), MOTIONS.index(thing.motion)] if thing else [-1] * 3
            for thing in (*scene.things, None)[:2]
        ]
        for scene in scenes
    ]
    backdrop = [BACKDROPS.index(scene.backdrop) for scene in scenes]
    return Shown(cover.half(), torch.tensor(rows, device=device), torch.tensor(backdrop, device=device))


class Probe(nn.Module):
    """Reads hidden states `[B, N, D]`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, sum(_COUNTS))

    def loss(self, hidden: Tensor, seen: Shown) -> Tensor:
        """Compare what the probe reads with what the clips show: the sum of five mean entropies, a scalar."""
        cover_logits, *scores = self.head(self.norm(hidden)).split(_COUNTS, dim=-1)
        cover = seen.cover.float()
        covered = cover.sum(1).clamp(max=1)
        total = F.binary_cross_entropy_with_logits(cover_logits.squeeze(-1), covered)
        weights = cover.clamp_min(0) * (seen.things[:, :, :1] >= 0)
        for index, score in enumerate(scores[:3]):
            for slot in (0, 1):
                wanted = seen.things[:, slot, index].clamp_min(0)[:, None].expand(-1, score.shape[1])
                entropy = F.cross_entropy(score.flatten(0, 1), wanted.flatten(), reduction="none").view_as(covered)
                total = total + (entropy * weights[:, slot]).sum() / weights.sum().clamp_min(1)
        wanted = seen.backdrop[:, None].expand(-1, scores[3].shape[1])
        entropy = F.cross_entropy(rearrange(scores[3], "b n c -> (b n) c"), wanted.flatten(), reduction="none")
        return total + (entropy.view_as(covered) * (1 - covered)).mean()
