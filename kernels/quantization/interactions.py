"""A quadratic picture of a model's loss: what each move costs alone, and what pairs add or cancel.

L(S) = L(nothing) + sum of single costs + sum of pair terms, pair(i, j) = L({i, j}) - L({i}) - L({j}) + L(nothing), as
in IMPQ (arXiv 2509.15455). It only proposes: what it proposes is measured before it counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Move = tuple[str, str]
MAX_STEPS = 1000


@dataclass(frozen=True)
class Interactions:
    """Hold moves (group, format) with bytes saved `[M]`, single costs `[M]`, pair terms `[M, M]`, zero diagonal."""

    moves: Sequence[Move]
    saved: torch.Tensor
    single: torch.Tensor
    pair: torch.Tensor
    base: float

    def propose(
        self, start: Mapping[str, str], *, max_loss: float | None, min_saved_bytes: int | None
    ) -> dict[str, str]:
        """Improve an assignment by adding, leaving out and exchanging moves until no single step helps.

        The goal comes first (bytes saved, or loss kept), then the other quantity. Ties go to the earlier move.
        """
        m = len(self.moves)
        group = torch.tensor([list(dict.fromkeys(g for g, _ in self.moves)).index(g) for g, _ in self.moves] + [-1])
        # the last index is no move at all: leaving out is exchanging for it, adding is exchanging it
        cost = torch.cat([self.single, torch.zeros(1)]).double()
        saved = torch.cat([self.saved, torch.zeros(1)]).double()
        pair = torch.zeros(m + 1, m + 1, dtype=torch.float64)
        pair[:m, :m] = self.pair
        taken = torch.tensor([start.get(g) == name for g, name in self.moves] + [False])
        for _ in range(MAX_STEPS):
            load = cost + pair @ taken.double()
            loss = self.base + float(((cost + load) / 2)[taken].sum())
            bytes_saved = float(saved[taken].sum())
            losses = loss - load[:, None] + load[None, :] - pair
            totals = bytes_saved - saved[:, None] + saved[None, :]
            is_out = taken.clone()
            is_out[m] = True
            held = torch.zeros(m + 1, dtype=torch.int64)
            held[:m] = (group[:m, None] == group[None, :m])[:, taken[:m]].sum(1)
            # in goes only what is not taken, and its group is free or is the one that goes out
            free = ~taken[None, :] & ((held[None, :] == 0) | (group[:, None] == group[None, :]))
            allowed = is_out[:, None] & free
            allowed[m, m] = False
            current = _rank(torch.tensor(loss), torch.tensor(bytes_saved), max_loss, min_saved_bytes)
            step = _best(_rank(losses, totals, max_loss, min_saved_bytes), allowed)
            if step is None or [float(r[step]) for r in _rank(losses, totals, max_loss, min_saved_bytes)] >= [
                    float(r) - 1e-12 * abs(float(r)) for r in current]:
                break
            out, into = divmod(step[0] * (m + 1) + step[1], m + 1)
            taken[out], taken[into] = False, True
            taken[m] = False
        return {g: name for (g, name), is_in in zip(self.moves, taken.tolist(), strict=False) if is_in}


def _rank(
    loss: torch.Tensor, saved: torch.Tensor, max_loss: float | None, min_saved_bytes: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if max_loss is not None:
        return (loss - max_loss).clamp(min=0), -saved, loss
    assert min_saved_bytes is not None
    return (min_saved_bytes - saved).clamp(min=0), loss, -saved


def _best(ranks: Sequence[torch.Tensor], allowed: torch.Tensor) -> tuple[int, int] | None:
    if not bool(allowed.any()):
        return None
    kept = allowed
    for rank in ranks:
        values = torch.where(kept, rank, float("inf"))
        kept = kept & (values == values.min())
    i, j = kept.nonzero()[0].tolist()
    return i, j
