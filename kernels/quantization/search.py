"""Which groups of layers to quantise: a search over what the caller measures on its whole model.

Errors of layers can cancel, so scores of single groups do not add up (QEP 2504.09629, IMPQ 2509.15455). Every step
is measured on the whole assignment: groups are quantised one after the other, the cheapest in loss for the bytes it
saves first; pairs are measured, as far as measurements go, and assignments that they promise tried (`interactions`);
the best is improved by exchanges for as long as one helps. Knows no model: `measure` and `savings` are the caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from kernels.dispatch import require
from kernels.quantization.interactions import Interactions

Assignment = Mapping[str, str]
FULL = "full"
SEEDS = 8


@dataclass(frozen=True)
class Trial:
    """Hold one measured assignment: what is quantised and how, its loss, the bytes that it saves."""

    formats: dict[str, str]
    loss: float
    saved_bytes: int


@dataclass(frozen=True)
class SearchResult:
    """Hold the best assignment within the limits, why the search ended, and everything that was measured."""

    best: Trial
    ended_by: str
    trials: list[Trial] = field(repr=False)

    def frontier(self) -> list[Trial]:
        """Return the trials that none beats in both loss and bytes, by bytes saved."""
        kept: list[Trial] = []
        for trial in sorted(self.trials, key=lambda t: (-t.saved_bytes, t.loss)):
            if not kept or trial.loss < kept[-1].loss:
                kept.append(trial)
        return kept[::-1]


class _OutOfMeasurements(Exception):
    pass


def search_formats(
    savings: Mapping[str, Mapping[str, int]], measure: Callable[[Assignment], float], *, max_loss: float | None = None,
    min_saved_bytes: int | None = None, max_measurements: int = 1000, shortlist: int = 4,
) -> SearchResult:
    """Choose a format for each group.

    savings: group to format to bytes saved (above 0); a group left alone saves nothing. Groups are what must share a
    format. measure(group to format, without those left alone): the loss of the whole model, lower is better, the same
    for the same assignment (KL of the logits, say).
    Exactly one goal: max_loss, save as much as possible with at most this loss; or min_saved_bytes, the least loss
    that saves at least so much. max_measurements: calls of measure at most. shortlist: how many of the next groups,
    best first by what they cost alone, are measured together with those already taken.
    Deterministic: ties go to the group that comes first. Raises ValueError for goals that contradict or cannot be met.
    """
    op = "search_formats"
    require((max_loss is None) != (min_saved_bytes is None), op, "exactly one of max_loss and min_saved_bytes must be "
            "given", (max_loss, min_saved_bytes))
    require(max_measurements >= 1 and shortlist >= 1, op, "max_measurements and shortlist must be at least 1",
            (max_measurements, shortlist))
    for group, formats in savings.items():
        require(bool(formats) and all(saved > 0 for saved in formats.values()) and FULL not in formats, op,
                f"{group}'s formats must save bytes", dict(formats))
    reachable = sum(max(formats.values()) for formats in savings.values())
    require(min_saved_bytes is None or min_saved_bytes <= reachable, op,
            f"min_saved_bytes must be at most {reachable}, what all groups save", min_saved_bytes)
    trials: list[Trial] = []
    known: dict[tuple[tuple[str, str], ...], Trial] = {}

    def trial_of(formats: Mapping[str, str]) -> Trial:
        key = tuple((group, formats[group]) for group in savings if group in formats)
        if key not in known:
            if len(trials) >= max_measurements:
                raise _OutOfMeasurements
            loss = float(measure(dict(key)))
            require(loss == loss, op, "measure must give a number", loss)
            known[key] = Trial(dict(key), loss, sum(savings[group][name] for group, name in key))
            trials.append(known[key])
        return known[key]

    def is_met(trial: Trial) -> bool:
        if max_loss is not None:
            return trial.loss <= max_loss
        assert min_saved_bytes is not None
        return trial.saved_bytes >= min_saved_bytes

    def can_win(formats: Mapping[str, str], current: Trial) -> bool:
        saved = sum(savings[group][name] for group, name in formats.items())
        return saved >= (current.saved_bytes if min_saved_bytes is None else min_saved_bytes)

    def rank(trial: Trial) -> tuple[float, float]:
        if max_loss is not None:
            return -float(trial.saved_bytes), trial.loss
        return trial.loss, -float(trial.saved_bytes)

    ended_by = "done"
    try:
        full = trial_of({})
        require(max_loss is None or full.loss <= max_loss, op, "max_loss must be at least the unquantised model's",
                f"{max_loss} below {full.loss}")
        moves = [(group, name) for group, formats in savings.items() for name in formats]
        alone = {move: (trial_of({move[0]: move[1]}).loss - full.loss) / savings[move[0]][move[1]] for move in moves}
        order = sorted(moves, key=lambda move: alone[move])
        current = _grow(full, order, savings, trial_of, is_met, max_loss is not None, shortlist)
        pictured = _picture(order, full, savings, trial_of, max_measurements - len(trials))
        goals = {"max_loss": max_loss, "min_saved_bytes": min_saved_bytes}
        for start in [current.formats, *_cancelling_pairs(pictured)]:
            trial = trial_of(pictured.propose(start, **goals))  # type: ignore[arg-type]
            if is_met(trial) and (not is_met(current) or rank(trial) < rank(current)):
                current = trial
        _exchange(current, order, trial_of, can_win, is_met, rank)
    except _OutOfMeasurements:
        ended_by = "max_measurements"
    met = [trial for trial in trials if is_met(trial)]
    require(bool(met), op, "max_measurements must be enough to meet the goal", max_measurements)
    return SearchResult(min(met, key=rank), ended_by, trials)


def _grow(
    current: Trial, order: Sequence[tuple[str, str]], savings: Mapping[str, Mapping[str, int]],
    trial_of: Callable[[Mapping[str, str]], Trial], is_met: Callable[[Trial], bool], is_loss_bound: bool,
    shortlist: int,
) -> Trial:
    while True:
        if not is_loss_bound and is_met(current):
            return current
        # a group not yet taken, or taken in a format that saves less
        open_moves = [(group, name) for group, name in order
                      if savings[group][name] > (savings[group][current.formats[group]]
                                                 if group in current.formats else 0)]
        best: Trial | None = None
        best_price = float("inf")
        tried = 0
        for group, name in open_moves:
            trial = trial_of({**current.formats, group: name})
            if is_loss_bound and not is_met(trial):
                continue  # a later one may still fit
            price = (trial.loss - current.loss) / (trial.saved_bytes - current.saved_bytes)
            if price < best_price:
                best, best_price = trial, price
            tried += 1
            if tried == shortlist:
                break
        if best is None:
            return current
        current = best


def _picture(
    order: Sequence[tuple[str, str]], full: Trial, savings: Mapping[str, Mapping[str, int]],
    trial_of: Callable[[Mapping[str, str]], Trial], measurements_left: int,
) -> Interactions:
    """Measure pairs with half of what is left, those of the costliest moves first: they have most to cancel."""
    moves = list(order)
    single = torch.tensor([trial_of({g: name}).loss - full.loss for g, name in moves], dtype=torch.float64)
    pair = torch.zeros(len(moves), len(moves), dtype=torch.float64)
    costly = sorted(range(len(moves)), key=lambda i: -float(single[i]))
    pairs = [(a, b) for a, b in combinations(range(len(moves)), 2) if moves[costly[a]][0] != moves[costly[b]][0]]
    pairs.sort(key=lambda ab: (ab[1], ab[0]))
    for a, b in pairs[: measurements_left // 2]:
        i, j = costly[a], costly[b]
        loss = trial_of(dict([moves[i], moves[j]])).loss
        pair[i, j] = pair[j, i] = loss - full.loss - float(single[i] + single[j])
    saved = torch.tensor([savings[g][name] for g, name in moves], dtype=torch.float64)
    return Interactions(moves, saved, single, pair, full.loss)


def _cancelling_pairs(pictured: Interactions) -> list[dict[str, str]]:
    pairs = sorted((float(pictured.pair[i, j]), i, j) for i, j in combinations(range(len(pictured.moves)), 2))
    return [dict([pictured.moves[i], pictured.moves[j]]) for term, i, j in pairs[:SEEDS] if term < 0]


def _exchange(
    current: Trial, order: Sequence[tuple[str, str]], trial_of: Callable[[Mapping[str, str]], Trial],
    can_win: Callable[[Mapping[str, str], Trial], bool], is_met: Callable[[Trial], bool],
    rank: Callable[[Trial], tuple[float, float]],
) -> None:
    improved = True
    while improved:
        improved = False
        for out in list(current.formats):
            without = {group: name for group, name in current.formats.items() if group != out}
            candidates = [without, *({**without, group: name} for group, name in order
                                     if group not in without and current.formats.get(group) != name)]
            for formats in candidates:
                if not can_win(formats, current):
                    continue
                trial = trial_of(formats)
                if is_met(trial) and rank(trial) < rank(current):
                    current, improved = trial, True
                    break
            if improved:
                break
