"""What runs on a card, small and in the interpreter: references, peers, and the measurement itself but its times."""

import math
import time
from typing import Any

import pytest
import torch

from kernels.gpu_case import Case, error_of
from kernels.gpu_cases import SMALL_CASES, cases
from kernels.gpu_check import judge
from kernels.gpu_measure import measure_case

CPU = torch.device("cpu")
# backends that torch has on cards alone
CARD_PEERS = ("flash", "cudnn")


def _timer(function: Any, sets: list[Any]) -> dict[str, Any]:
    for one in sets:
        function(one)
    return {"us": 2.0, "timed": "not"}


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_what_runs_on_a_card_agrees_with_its_reference(case: Case) -> None:
    stages: list[str] = []
    measured = measure_case(case, CPU, _timer, time.monotonic() + 300, lambda now: stages.append(now["stage"]))
    assert stages[:2] == ["inputs", "reference"] and measured["stage"] == "done"
    assert len(measured["rows"]) == len(case.configs)
    for row in measured["rows"]:
        assert "failed" not in row, row
        assert row["error"] == 0.0 if case.is_exact else row["error"] < 1e-2
        assert row["bitwise"]
    for name, peer in measured["peers"].items():
        assert name in CARD_PEERS or peer["error"] < 1e-2, (name, peer)
    checked = judge(case, measured, {"gemm_tflops": 700.0, "copy_gb_per_s": 4000.0}, {})
    assert checked["passed"] and math.isfinite(checked["fraction_of_floor"])


def test_what_nobody_writes_is_not_right() -> None:
    case = Case("none", "", lambda device, filled: {}, lambda x, c: torch.empty(4), (None,), lambda x: torch.zeros(4),
                lambda x, out: out, {}, 0.0, 1.0)
    measured = measure_case(case, CPU, _timer, time.monotonic() + 300, lambda now: None)
    assert measured["rows"][0]["error"] == math.inf
    assert not judge(case, measured, {}, {})["passed"]


def test_several_parts_count_by_their_worst_and_a_peer_may_give_fewer() -> None:
    want = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    assert error_of((torch.tensor([3.0, 4.5]), torch.tensor([1.2])), want) == pytest.approx(0.2)
    assert error_of(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"must be \[2\] like its reference, got \[1\]"):
        error_of(torch.tensor([3.0]), want)


@pytest.mark.parametrize("sm", [(9, 0), (10, 0), (12, 0)])
def test_names_are_not_used_twice(sm: tuple[int, int]) -> None:
    names = [case.name for case in (*cases(sm), *SMALL_CASES)]
    assert len(set(names)) == len(names)
    assert {case.peers_of for case in cases(sm)} - {None} <= set(names)
