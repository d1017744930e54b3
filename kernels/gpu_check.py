"""Check and time every op on the card that is here: `python -m kernels.gpu_check --out FILE.json --budget-s 60`.

Each op is compared with fp64 at real sizes in bf16 (its error may be twice that of torch's own bf16 path), repeated
bit for bit, and timed over a few launch configurations beside torch's best. The most valuable checks come first and
what the budget does not cover is named as skipped. Without a CUDA device: exit status 2.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from kernels.dispatch import HAS_TRITON, can_run_triton
from kernels.gpu_case import Case, error_of
from kernels.gpu_cases import CASES
from kernels.gpu_cases_decode import BLACKWELL_CASES, DECODE_CASES

MAX_ERROR_RATIO = 2.0
# twice what rounding weights and output to bf16 costs, where torch has no path of its own to compare with
ERROR_FLOOR = 4e-3
COMPILE_SHARE = 0.4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if all passed, 1 if one failed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds for everything, compilation included")
    parser.add_argument("--commit", help="commit to record; asked of git by default")
    parser.add_argument("--only", nargs="*", help="names of checks to run")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_s
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not can_run_triton(device):
        print("gpu_check: no CUDA device that runs Triton kernels here, nothing was checked", file=sys.stderr)
        return 2
    cases = [c for c in _cases(device) if not options.only or c.name in options.only]
    report: dict[str, Any] = {"card": _card(device), "commit": options.commit or _commit(), "checks": {}}
    report["compile_s"] = _compile_ahead(cases, device, options.workers, COMPILE_SHARE * options.budget_s)
    report["ceilings"] = _guarded(lambda: _ceilings(device))
    for case in cases:
        check = _guarded(functools.partial(_run, case, device, report["ceilings"], deadline))
        peers = report["checks"].get(case.peers_of, {}).get("peers", {})
        replaced_us = [peer["us"] for peer in peers.values() if "us" in peer]
        if replaced_us and "best" in check:
            check["speedup_over_best_peer"] = min(replaced_us) / check["best"]["us"]
        report["checks"][case.name] = check
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(report, indent=1, default=str))
    report["wall_s"] = round(options.budget_s - (deadline - time.monotonic()), 1)
    options.out.write_text(json.dumps(report, indent=1, default=str))
    print(_table(report))
    return 0 if all(check.get("passed") or "skipped" in check for check in report["checks"].values()) else 1


def _cases(device: torch.device) -> list[Case]:
    """The cases that this card can run."""
    is_blackwell = torch.cuda.get_device_capability(device) >= (10, 0)
    return [*CASES, *DECODE_CASES, *(BLACKWELL_CASES if is_blackwell else ())]


def _run(case: Case, device: torch.device, ceilings: dict[str, Any], deadline: float) -> dict[str, Any]:
    if time.monotonic() > deadline:
        return {"skipped": "budget"}
    started = time.monotonic()
    inputs = case.make(device, True)
    best: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    want = case.reference(inputs)
    peer_errors = {}
    result: dict[str, Any] = {"shape": case.shape, "configs": rows, "peers": {}}
    for name, peer in case.peers.items():
        def time_peer(name: str = name, peer: Callable[[Any], Any] = peer) -> dict[str, Any]:
            peer_errors[name] = error_of(case.sample(inputs, peer(inputs)), want)
            return {"error": peer_errors[name], "us": _median_us(lambda i: peer(i), inputs, case)}

        result["peers"][name] = _guarded(time_peer)
    allowed = max(MAX_ERROR_RATIO * max(peer_errors.values(), default=0.0), ERROR_FLOOR)
    for config in case.configs:
        if time.monotonic() > deadline:
            result["skipped_configs"] = len(case.configs) - len(rows)
            break

        def measure(config: Any = config) -> dict[str, Any]:
            first = case.launch(inputs, config)
            error = error_of(case.sample(inputs, first), want)
            repeats = [case.launch(inputs, config) for _ in range(3)]
            same = all(_equal(first, again) for again in repeats)
            return {"error": error, "bitwise": same, "us": _median_us(lambda i: case.launch(i, config), inputs, case)}

        row = {"config": _describe(config), **_guarded(measure)}
        rows.append(row)
        good = "us" in row and row["bitwise"] and row["error"] <= allowed
        row["passed"] = good
        if good and (best is None or row["us"] < best["us"]):
            best = row
    peer_us = [p["us"] for p in result["peers"].values() if "us" in p]
    result["allowed_error"] = allowed
    result["passed"] = bool(rows) and all(row["passed"] for row in rows)
    if best is not None:
        floor_us = _floor_us(case, ceilings)
        result["best"] = best
        result["speedup_over_best_peer"] = min(peer_us) / best["us"] if peer_us else None
        result["fraction_of_floor"] = floor_us / best["us"] if floor_us else None
        result["tflops"] = case.flops / best["us"] / 1e6
        result["gb_per_s"] = case.bytes / best["us"] / 1e3
    result["seconds"] = round(time.monotonic() - started, 2)
    return result


def _median_us(function: Callable[[Any], Any], inputs: Any, case: Case) -> float:
    """Time with events for long calls; for short ones replay a graph over input sets that together exceed the L2."""
    import triton.testing

    sets = case.rotate(inputs)
    if len(sets) == 1:
        return 1e3 * float(triton.testing.do_bench(lambda: function(inputs), warmup=10, rep=50, return_mode="median"))
    for one in sets:
        function(one)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function(sets[0])
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for one in sets * 4:
                function(one)
    times: list[float] = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (4 * len(sets)))
    return sorted(times[2:])[len(times[2:]) // 2]


def _ceilings(device: torch.device) -> dict[str, Any]:
    import triton.testing

    source = torch.randn(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy_ms = triton.testing.do_bench(lambda: target.copy_(source), warmup=5, rep=30, return_mode="median")
    read_ms = triton.testing.do_bench(lambda: source.view(torch.int32).amax(), warmup=5, rep=30, return_mode="median")
    a, b = (source[i * 8192 * 8192 :][: 8192 * 8192].view(8192, 8192) for i in range(2))
    gemm_ms = triton.testing.do_bench(lambda: a @ b, warmup=10, rep=40, return_mode="median")
    size = source.numel() * 2
    return {"copy_gb_per_s": 2 * size / copy_ms / 1e6, "torch_read_gb_per_s": size / read_ms / 1e6,
            "gemm_tflops": 2 * 8192**3 / gemm_ms / 1e9}


def _floor_us(case: Case, ceilings: dict[str, Any]) -> float | None:
    if "gemm_tflops" not in ceilings:
        return None
    return float(max(case.flops / ceilings["gemm_tflops"] / 1e6, case.bytes / ceilings["copy_gb_per_s"] / 1e3))


def _compile_ahead(cases: list[Case], device: torch.device, workers: int, limit_s: float) -> float:
    """Fill Triton's cache from processes that compile the same launches on tensors without contents."""
    started = time.monotonic()
    major, minor = torch.cuda.get_device_capability(device)
    jobs = [(c.name, i, major * 10 + minor) for i in range(max(len(c.configs) for c in cases)) for c in cases
            if i < len(c.configs)]
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(_compile_one, *job) for job in jobs]
    wait(futures, timeout=limit_s)
    workers_left = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in workers_left:
        process.terminate()
    return round(time.monotonic() - started, 1)


def _compile_one(name: str, index: int, arch: int) -> None:
    from kernels.dry_launch import dry_launches

    case = next(c for c in (*CASES, *DECODE_CASES, *BLACKWELL_CASES) if c.name == name)
    with dry_launches(arch):
        case.launch(case.make(torch.device("cpu"), False), case.configs[index])


def _guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:  # one failing op must not end the run: it is recorded and fails the check
        torch.cuda.empty_cache()
        return {"failed": f"{type(error).__name__}: {error}"[:2000], "passed": False,
                "trace": traceback.format_exc()[-1500:]}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(torch.equal(a, b))


def _describe(config: Any) -> Any:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config


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


def _table(report: dict[str, Any]) -> str:
    ceilings = report["ceilings"]
    lines = [f"{report['card']['name']}, torch {report['card']['torch']}, triton {report['card']['triton']}, "
             f"commit {report['commit'][:12]}, compiled in {report['compile_s']} s, {report['wall_s']} s in all"]
    lines.append("ceilings: " + ", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}"
                                          for k, v in ceilings.items() if k != "trace"))
    lines.append(f"{'check':<26}{'us':>10}{'x peer':>8}{'floor':>7}{'TFLOP/s':>9}{'GB/s':>7}{'error':>9}  verdict")
    for name, check in report["checks"].items():
        best = check.get("best")
        verdict = "passed" if check.get("passed") else check.get("skipped") or check.get("failed", "FAILED")[:200]
        if best is None:
            errors = [r.get("failed") or f"error {r.get('error')}" for r in check.get("configs", [])]
            lines.append(f"{name:<26} {verdict} {'; '.join(str(e)[:120] for e in errors)}")
            continue
        ratio, floor = check["speedup_over_best_peer"], check["fraction_of_floor"]
        lines.append(f"{name:<26}{best['us']:>10.1f}{ratio or float('nan'):>8.2f}{floor or float('nan'):>7.2f}"
                     f"{check['tflops']:>9.0f}{check['gb_per_s']:>7.0f}{best['error']:>9.1e}  {verdict}")
        peers = {k: f"{v['us']:.1f} us" if "us" in v else v["failed"][:60] for k, v in check["peers"].items()}
        if peers:
            lines.append(f"    peers {peers}")
        for row in check["configs"]:
            values = list(row["config"].values()) if isinstance(row["config"], dict) else row["config"]
            told = row.get("failed", "")[:160]
            if "us" in row:
                told = f"{row['us']:.1f} us, error {row['error']:.1e}, same {row['bitwise']}"
            lines.append(f"    {values}: {told}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
