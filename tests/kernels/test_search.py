import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantization.search import Trial, search_formats

Formats = Mapping[str, str]


def quadratic(errors: torch.Tensor, names: list[str]) -> Any:
    """Loss of the summed error vectors: those that point apart cancel."""

    def measure(formats: Formats) -> float:
        chosen = [errors[names.index(group)] for group in formats]
        return float(torch.stack(chosen).sum(0).square().sum()) if chosen else 0.0

    return measure


def test_errors_that_cancel_are_found() -> None:
    # alone a and b are the worst, together they are the best: scores that add up would leave both out
    errors = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 2.0], [0.0, 2.1], [0.5, 1.0]])
    names = ["a", "b", "c", "d", "e"]
    result = search_formats({n: {"nvfp4": 100} for n in names}, quadratic(errors, names), min_saved_bytes=200)
    assert set(result.best.formats) == {"a", "b"} and result.best.loss == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 100))
def test_close_to_the_best_of_all_assignments(seed: int, groups: int, percent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    names = [f"g{i}" for i in range(groups)]
    savings = {n: {"fp8": int(torch.randint(5, 50, (), generator=generator)),
                   "nvfp4": int(torch.randint(50, 100, (), generator=generator))} for n in names}
    errors = {(n, f): torch.randn(4, generator=generator) * (1 if f == "fp8" else 3) for n in names
              for f in ("fp8", "nvfp4")}

    def measure(formats: Formats) -> float:
        return float(sum((errors[move] for move in formats.items()), torch.zeros(4)).square().sum())

    wanted = sum(f["nvfp4"] for f in savings.values()) * percent // 100
    result = search_formats(savings, measure, min_saved_bytes=wanted)
    assert result.best.saved_bytes >= wanted
    assert result.best.loss == measure(result.best.formats)
    everything = []
    for choice in itertools.product(("", "fp8", "nvfp4"), repeat=groups):
        formats = {n: f for n, f in zip(names, choice, strict=True) if f}
        if sum(savings[n][f] for n, f in formats.items()) >= wanted:
            everything.append(measure(formats))
    single_worst = max(float(e.square().sum()) for e in errors.values())
    assert min(everything) - 1e-5 <= result.best.loss <= max(4 * min(everything), min(everything) + single_worst)


def test_as_much_as_a_loss_allows() -> None:
    errors = torch.eye(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    names = list("abcd")
    result = search_formats({n: {"nvfp4": 10} for n in names}, quadratic(errors, names), max_loss=5.5)
    assert set(result.best.formats) == {"a", "b"} and result.best.saved_bytes == 20
    # 13 = 4 + 9 buys no third group, 14 = 1 + 4 + 9 does
    assert search_formats({n: {"nvfp4": 10} for n in names}, quadratic(errors, names),
                          max_loss=14.0).best.saved_bytes == 30


def test_a_group_may_get_the_smaller_format_where_the_smallest_costs_too_much() -> None:
    loss = {"fp8": 1.0, "nvfp4": 10.0}
    result = search_formats({"a": {"fp8": 5, "nvfp4": 8}, "b": {"fp8": 5, "nvfp4": 8}},
                            lambda formats: sum(loss[f] for f in formats.values()), max_loss=2.0)
    assert result.best.formats == {"a": "fp8", "b": "fp8"}


def test_no_assignment_is_measured_twice_and_the_search_is_the_same_again() -> None:
    errors = torch.randn(6, 3)
    names = [f"g{i}" for i in range(6)]
    seen: list[tuple[tuple[str, str], ...]] = []

    def measure(formats: Formats) -> float:
        seen.append(tuple(sorted(formats.items())))
        return float(quadratic(errors, names)(formats))

    savings = {n: {"nvfp4": 10} for n in names}
    first = search_formats(savings, measure, min_saved_bytes=30)
    assert len(seen) == len(set(seen)) == len(first.trials)
    assert search_formats(savings, measure, min_saved_bytes=30) == first


def test_an_end_by_measurements_is_said() -> None:
    result = search_formats({n: {"nvfp4": 10} for n in "abcdef"}, lambda formats: float(len(formats)), max_loss=9.0,
                            max_measurements=8)
    assert result.ended_by == "max_measurements" and len(result.trials) == 8
    assert search_formats({"a": {"nvfp4": 1}}, lambda formats: 0.0, max_loss=9.0).ended_by == "done"


def test_frontier() -> None:
    result = search_formats({n: {"nvfp4": 10} for n in "ab"}, lambda f: {"": 0.0, "a": 1.0, "b": 2.0, "ab": 3.0}[
        "".join(sorted(f))], max_loss=9.0)
    assert [(t.saved_bytes, t.loss) for t in result.frontier()] == [(0, 0.0), (10, 1.0), (20, 3.0)]
    assert isinstance(result.best, Trial)


@pytest.mark.parametrize(("arguments", "rule"), [
    ({}, "exactly one of max_loss and min_saved_bytes"),
    ({"max_loss": 1.0, "min_saved_bytes": 1}, "exactly one of max_loss and min_saved_bytes"),
    ({"min_saved_bytes": 11}, "min_saved_bytes must be at most 10, what all groups save, got 11"),
    ({"max_loss": -1.0}, "max_loss must be at least the unquantised model's, got -1.0 below 0.0"),
    ({"max_loss": 1.0, "max_measurements": 0}, "max_measurements and shortlist must be at least 1"),
    ({"max_loss": 1.0, "savings": {"a": {"fp8": 0}}}, "a's formats must save bytes"),
    ({"max_loss": 1.0, "measure": lambda _: float("nan")}, "measure must give a number, got nan"),
    ({"min_saved_bytes": 10, "max_measurements": 1}, "max_measurements must be enough to meet the goal, got 1"),
])
def test_bad_goals_are_named(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"search_formats: {rule}"):
        search_formats(**{"savings": {"a": {"fp8": 10}}, "measure": lambda _: 0.0, **arguments})
