"""Check and time every op on the card that is here: `python -m kernels.gpu_check --out FILE.json`.

Each op is compared with fp64 at real sizes in bf16 (its error may be twice that of torch's own bf16 path), repeated
bit for bit under load, and timed over a few launch configurations beside torch's best; small sizes go through
compute-sanitizer where it is installed. The most valuable checks come first and what the time does not cover is named
as skipped. A launch that takes its process down costs its own row only; the file is written after each check.
Without a CUDA device: exit status 2. `--dry ARCH` compiles every launch for a card that is not here instead.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.dispatch import HAS_TRITON, can_run_triton
from kernels.gpu_case import Case, error_of
from kernels.gpu_cases import SMALL_CASES, cases
from kernels.gpu_measure import guarded
from kernels.gpu_report import summary, verdict
from kernels.gpu_worker import Measurer, compile_ahead, compile_launch

MAX_ERROR_RATIO = 2.0
# twice what rounding weights and output to bf16 costs, where torch has no path of its own to compare with
ERROR_FLOOR = 4e-3
COMPILE_SHARE = 0.4
SANITIZERS = ("memcheck", "racecheck")
SANITIZER_MIN_S = 45.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if all passed, 1 if one failed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds for everything, compilation included")
    parser.add_argument("--commit", help="commit to record; asked of git by default")
    parser.add_argument("--only", nargs="*", help="names of checks to run")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead")
    parser.add_argument("--small", action="store_true", help="small sizes in this process, without times or a file")
    parser.add_argument("--dry", type=int, metavar="ARCH", help="compile for a card that is not here (90, 100, 120)")
    options = parser.parse_args(arguments)
    known = {case.name for sm in ((9, 0), (10, 0), (12, 0)) for case in (*cases(sm), *SMALL_CASES)}
    if unknown := set(options.only or ()) - known:
        parser.error(f"--only: no check is named {sorted(unknown)}")
    if options.dry:
        return _dry(options.dry, options.only)
    started = time.monotonic()
    deadline = started + options.budget_s
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not can_run_triton(device):
        print("gpu_check: no CUDA device that runs Triton kernels here, nothing was checked", file=sys.stderr)
        return 2
    if options.small:
        return check_small(device)
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    chosen = [case for case in cases((major, minor)) if not options.only or case.name in options.only]
    report: dict[str, Any] = {"card": _card(device), "commit": options.commit or _commit(), "checks": {}}
    write(options.out, report)
    small = set() if options.only else {case.name for case in SMALL_CASES}
    report["compile_s"] = compile_ahead({case.name for case in chosen} | small, arch,
                                        min(options.workers, os.cpu_count() or 1),
                                        started + COMPILE_SHARE * options.budget_s)
    measurer = Measurer(arch)
    try:
        report["ceilings"] = measurer.ceilings(deadline)
        check_all(measurer, chosen, report, deadline, options.out)
    finally:
        measurer.close()
    report["processes"] = measurer.num_starts
    report["sanitizers"] = {} if options.only else {tool: sanitize(tool, deadline) for tool in SANITIZERS}
    report["wall_s"] = round(time.monotonic() - started, 1)
    write(options.out, report)
    print(summary(report), flush=True)
    done = [*report["checks"].values(), *report["sanitizers"].values()]
    return 0 if all(check.get("passed") or "skipped" in check for check in done) else 1


def check_all(
    measurer: Measurer, chosen: Sequence[Case], report: dict[str, Any], deadline: float, out: Path
) -> None:
    """Measure and judge each case in turn; the file holds it before the next begins."""
    for case in chosen:
        if time.monotonic() > deadline:
            report["checks"][case.name] = {"skipped": "time is up"}
            continue
        started = time.monotonic()
        check = judge(case, measurer.check(case, deadline), report["ceilings"], report["checks"])
        check["seconds"] = round(time.monotonic() - started, 2)
        report["checks"][case.name] = check
        print(f"{case.name}: {verdict(check)} ({check['seconds']} s)", flush=True)
        write(out, report)


def judge(
    case: Case, measured: Mapping[str, Any], ceilings: Mapping[str, Any], checks: Mapping[str, Any]
) -> dict[str, Any]:
    """Say whether a case passed and how its best launch compares with torch's best and with the card's limits.

    It passes if a launch is right and none is wrong; a launch that the card refuses for its size is neither.
    """
    peers, rows = measured["peers"], [dict(row) for row in measured["rows"]]
    errors = [peer["error"] for peer in peers.values() if math.isfinite(peer.get("error", math.inf))]
    allowed = 0.0 if case.is_exact else max(MAX_ERROR_RATIO * max(errors, default=0.0), ERROR_FLOOR)
    for row in rows:
        is_same = row.get("bitwise", False) or not case.is_repeatable
        row["passed"] = "failed" not in row and is_same and row["error"] <= allowed
    good = [row for row in rows if row["passed"]]
    wrong = [row for row in rows if not row["passed"] and not row.get("refused")]
    result: dict[str, Any] = {"shape": case.shape, "allowed_error": allowed, "configs": rows, "peers": dict(peers),
                              "passed": bool(good) and not wrong and "failed" not in measured}
    for key in ("failed", "trace"):
        if measured.get(key):
            result[key] = measured[key]
    if len(rows) < len(case.configs):
        result["skipped_configs"] = len(case.configs) - len(rows)
    if not rows and "failed" not in measured:
        result["skipped"] = "time is up"
    if good:
        best = min(good, key=lambda row: float(row["us"]))
        replaced = checks.get(case.peers_of, {}).get("peers", {}) if case.peers_of else peers
        peer_us = [peer["us"] for peer in replaced.values() if "us" in peer]
        result |= {"best": best, "speedup_over_best_peer": min(peer_us) / best["us"] if peer_us else None,
                   "fraction_of_floor": _floor_us(case, ceilings) / best["us"] if "gemm_tflops" in ceilings else None,
                   "tflops": case.flops / best["us"] / 1e6, "gb_per_s": case.bytes / best["us"] / 1e3}
    return result


def _floor_us(case: Case, ceilings: Mapping[str, Any]) -> float:
    return float(max(case.flops / ceilings["gemm_tflops"] / 1e6, case.bytes / ceilings["copy_gb_per_s"] / 1e3))


def check_small(device: torch.device) -> int:
    """Compare every kernel with its reference at small sizes, for a tool that watches this process."""
    wrong = 0
    for case in SMALL_CASES:
        torch.manual_seed(0)
        inputs = case.make(device, True)
        want = case.reference(inputs)
        for config in case.configs:
            error = error_of(case.sample(inputs, case.launch(inputs, config)), want)
            wrong += error > 1e-2
            print(f"{case.name}: error {error:.1e}", flush=True)
    return int(wrong > 0)


def sanitize(tool: str, deadline: float) -> dict[str, Any]:
    """Run the small sizes under one of compute-sanitizer's tools, where it is installed and time is left."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    limit_s = deadline - time.monotonic()
    if found is None:
        return {"skipped": "compute-sanitizer is not installed"}
    if limit_s < SANITIZER_MIN_S:
        return {"skipped": "time is up"}
    # each tensor an allocation of its own, or what lies outside of one would lie in the next
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "kernels.gpu_check", "--small"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(limit_s, 2 * SANITIZER_MIN_S),
                              env=environment, cwd=Path(__file__).parents[1], check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done in {min(limit_s, 2 * SANITIZER_MIN_S):.0f} s"}
    passed = done.returncode == 0
    return {"passed": passed} if passed else {"passed": False, "failed": (done.stdout + done.stderr)[-3000:]}


def _dry(arch: int, only: Sequence[str] | None) -> int:
    status = 0
    for case in (*cases(divmod(arch, 10)), *SMALL_CASES):
        for i in range(len(case.configs)) if not only or case.name in only else ():
            found = guarded(lambda case=case, i=i: compile_launch(case, i, arch))  # type: ignore[misc]
            print(f"sm_{arch} {case.name}: {case.configs[i]}: {found.get('failed', found)}", flush=True)
            status |= "failed" in found and not found.get("refused")
    return status


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Replace the file by the report; what is no number in JSON becomes text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(_plain(report), indent=1, default=str, allow_nan=False))
    new.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _card(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        smi = f"unknown: {error}"
    import triton

    return {"name": properties.name, "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory,
            "driver_and_clocks": smi, "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__ if HAS_TRITON else None,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}


def _commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
