"""What `gpu_check` makes of measurements, and that one launch which takes its process down costs its own row only."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu_case import Case
from kernels.gpu_check import check_all, judge, main, sanitize, write
from kernels.gpu_measure import guarded
from kernels.gpu_report import summary
from kernels.gpu_worker import Measurer
from tests.kernels.stub_measurer import row as _row
from tests.kernels.stub_measurer import serve

CEILINGS = {"gemm_tflops": 500.0, "copy_gb_per_s": 4000.0}


def _case(name: str = "op", num_configs: int = 4, **options: Any) -> Case:
    return Case(name, "8 x 8", lambda device, filled: {}, lambda x, c: None, tuple(range(num_configs)),
                lambda x: torch.zeros(1), lambda x, out: out, {"sdpa": lambda x: None}, 1e9, 4e6, **options)


def _measured(*rows: dict[str, Any], **peers: dict[str, Any]) -> dict[str, Any]:
    return {"peers": peers or {"sdpa": {"error": 1e-3, "us": 4.0}}, "rows": list(rows)}


def test_the_fastest_right_launch_is_compared_with_the_fastest_peer_and_the_floor() -> None:
    measured = _measured(_row(0), _row(1, us=5.0), flash={"error": 2e-3, "us": 6.0}, cudnn={"failed": "not here"})
    found = judge(_case(num_configs=2), measured, CEILINGS, {})
    assert found["passed"] and found["best"]["config"] == 1 and found["allowed_error"] == 4e-3
    # 1e9 operations take 2 us, 4e6 bytes 1 us
    assert found["speedup_over_best_peer"] == 6.0 / 5.0 and found["fraction_of_floor"] == 2.0 / 5.0


@pytest.mark.parametrize(("row", "passed"), [
    (_row(error=5e-3), False), (_row(error=math.inf), False), (_row(bitwise=False), False),
    ({"config": 0, "failed": "RuntimeError: no"}, False), ({"config": 0, "failed": "large", "refused": True}, True),
])
def test_one_wrong_launch_fails_its_check_and_a_refused_one_does_not(row: dict[str, Any], passed: bool) -> None:
    found = judge(_case(num_configs=2), _measured(_row(1), row), CEILINGS, {})
    assert found["passed"] is passed and found["best"]["config"] == 1
    assert not judge(_case(num_configs=1), _measured(row), CEILINGS, {})["passed"]


def test_a_peer_that_is_wrong_allows_nothing() -> None:
    measured = _measured(_row(error=0.1), flash={"error": math.inf, "us": 1.0})
    assert not judge(_case(num_configs=1), measured, CEILINGS, {})["passed"]


def test_what_must_be_exact_is_and_what_need_not_repeat_may_differ() -> None:
    assert not judge(_case(num_configs=1, is_exact=True), _measured(_row(error=1e-9)), CEILINGS, {})["passed"]
    assert judge(_case(num_configs=1, is_exact=True), _measured(_row(error=0.0)), CEILINGS, {})["passed"]
    assert judge(_case(num_configs=1, is_repeatable=False), _measured(_row(bitwise=False)), CEILINGS, {})["passed"]


def test_an_op_that_replaces_another_is_compared_with_that_ones_peers() -> None:
    checks = {"dense": {"peers": {"flash": {"us": 80.0, "error": 0.0}}}}
    assert judge(_case(peers_of="dense"), _measured(_row()), CEILINGS, checks)["speedup_over_best_peer"] == 10.0
    assert judge(_case(peers_of="dense"), _measured(_row()), {}, {})["speedup_over_best_peer"] is None


def test_what_a_card_has_no_room_for_is_refused() -> None:
    class OutOfResources(Exception):
        pass

    def launch() -> dict[str, Any]:
        raise OutOfResources("shared memory")

    assert guarded(launch)["refused"] and "refused" not in guarded(lambda: 1 / 0)  # type: ignore[arg-type,return-value]


def test_a_launch_that_takes_its_process_down_costs_its_own_row(tmp_path: Path) -> None:
    measurer = Measurer(90, serve)
    names = ["sound", "launch dies", "peer dies", "context is lost", "sound again"]
    report: dict[str, Any] = {"checks": {}, "ceilings": CEILINGS}
    try:
        check_all(measurer, [_case(name) for name in names], report, time.monotonic() + 300, tmp_path / "out.json")
    finally:
        measurer.close()
    written = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert {name: check["passed"] for name, check in written.items()} == {
        "sound": True, "launch dies": False, "peer dies": True, "context is lost": False, "sound again": True}
    for name in ("launch dies", "context is lost"):
        assert [row["passed"] for row in written[name]["configs"]] == [True, False, True, True]
        assert written[name]["speedup_over_best_peer"] == 0.5
    assert "ended with status -6" in written["launch dies"]["configs"][1]["failed"]
    assert "ended with status 3" in written["peer dies"]["peers"]["sdpa"]["failed"]
    assert measurer.num_starts == 4


def test_a_launch_that_hangs_is_ended() -> None:
    measurer = Measurer(90, serve, stage_limit_s=4.0)
    try:
        measured = measurer.check(_case("launch hangs"), time.monotonic() + 300)
    finally:
        measurer.close()
    assert [row.get("failed") for row in measured["rows"]] == [None, "no answer in 4 s", None, None]


def test_no_time_left_is_said(tmp_path: Path) -> None:
    report: dict[str, Any] = {"checks": {}, "ceilings": {}}
    check_all(Measurer(90, serve), [_case()], report, time.monotonic() - 1, tmp_path / "out.json")
    assert report["checks"] == {"op": {"skipped": "time is up"}}


def test_the_file_is_json_whatever_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "out.json"
    write(path, {"a": math.inf, "b": (math.nan, 1.5), "c": torch.bfloat16})
    assert json.loads(path.read_text()) == {"a": "inf", "b": ["nan", 1.5], "c": "torch.bfloat16"}
    assert not list(path.parent.glob("*.new"))


def test_the_summary_names_what_passed_failed_and_was_skipped() -> None:
    checks = {"dense Wan 480p": judge(_case(num_configs=2), _measured(_row(), {"config": 1, "failed": "no"}), CEILINGS,
                                      {}),
              "late": {"skipped": "time is up"}, "lost": {"failed": "reference: no memory", "passed": False}}
    told = summary({"card": {"name": "card", "torch": "2", "triton": "3"}, "commit": "abc", "compile_s": 1.0,
                    "wall_s": 2.0, "ceilings": CEILINGS, "checks": checks,
                    "sanitizers": {"memcheck": {"skipped": "compute-sanitizer is not installed"}}})
    assert "0.50" in told and "late" in told and "reference: no memory" in told
    assert "goal dense Wan 480p: speedup_over_best_peer at least 0.9: 0.50, MISSED" in told
    assert "goal decode B64, page 64: fraction_of_floor at least 0.8: not measured" in told


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "out.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_a_check_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "dense Wan 4800p"])
    assert "no check is named ['dense Wan 4800p']" in capsys.readouterr().err


def test_launches_compile_for_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["--dry", "90", "--only", "norm by head 8192", "silu_mul"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all("'stack_bytes': 0" in line for line in told), told


def test_a_checker_that_is_not_there_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    assert sanitize("memcheck", time.monotonic() + 300) == {"skipped": "compute-sanitizer is not installed"}
    monkeypatch.setattr(shutil, "which", lambda *args, **options: "compute-sanitizer")
    assert sanitize("memcheck", time.monotonic()) == {"skipped": "time is up"}
