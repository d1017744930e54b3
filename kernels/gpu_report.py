"""What `gpu_check` prints at its end: a line a check, the launches tried, torch's own ways, the goals."""

from collections.abc import Mapping
from typing import Any

# check, its figure, what it is to reach
GOALS = (
    ("dense Wan 480p", "speedup_over_best_peer", 0.9),
    ("sparse Wan 480p, 128", "speedup_over_best_peer", 6.0),
    ("decode B64, page 64", "fraction_of_floor", 0.8),
    ("NVFP4 GEMV 14336x4096", "fraction_of_floor", 0.8),
)


def goals(checks: Mapping[str, Any]) -> list[str]:
    """Compare the figures with the goals; a goal missed fails nothing."""
    lines = []
    for name, figure, goal in GOALS:
        got = checks.get(name, {}).get(figure)
        told = "not measured" if got is None else f"{got:.2f}, {'reached' if got >= goal else 'MISSED'}"
        lines.append(f"goal {name}: {figure} at least {goal}: {told}")
    return lines


def summary(report: Mapping[str, Any]) -> str:
    """Write the whole report for people."""
    ceilings = report["ceilings"]
    lines = [f"{report['card']['name']}, torch {report['card']['torch']}, triton {report['card']['triton']}, "
             f"commit {report['commit'][:12]}, compiled in {report['compile_s']} s, {report['wall_s']} s in all"]
    lines.append("ceilings: " + ", ".join(f"{key} {value:.0f}" if isinstance(value, float) else f"{key} {value}"
                                          for key, value in ceilings.items() if key != "trace"))
    lines.append(f"{'check':<34}{'us':>10}{'x peer':>8}{'floor':>7}{'TFLOP/s':>9}{'GB/s':>7}{'error':>9}  verdict")
    for name, check in report["checks"].items():
        lines += _check(name, check)
    lines += goals(report["checks"])
    lines += [f"{tool}: {verdict(found)}" for tool, found in report["sanitizers"].items()]
    return "\n".join(lines)


def _check(name: str, check: Mapping[str, Any]) -> list[str]:
    best = check.get("best")
    line = f"{name:<34} {verdict(check)}"
    if best is not None:
        ratio, floor = (check[key] or float("nan") for key in ("speedup_over_best_peer", "fraction_of_floor"))
        line = (f"{name:<34}{best['us']:>10.1f}{ratio:>8.2f}{floor:>7.2f}{check['tflops']:>9.0f}"
                f"{check['gb_per_s']:>7.0f}{best['error']:>9.1e}  {verdict(check)}")
    peers = {key: f"{peer['us']:.1f} us" if "us" in peer else str(peer.get("failed"))[:60]
             for key, peer in check.get("peers", {}).items()}
    return [line, *([f"    peers {peers}"] if peers else []), *(_row(row) for row in check.get("configs", []))]


def _row(row: Mapping[str, Any]) -> str:
    config = list(row["config"].values()) if isinstance(row["config"], dict) else row["config"]
    if "us" in row:
        return (f"    {config}: {row['us']:.1f} us ({row.get('timed')}), error {row['error']:.1e}, "
                f"same {row['bitwise']}")
    return f"    {config}: {'refused, ' if row.get('refused') else ''}{str(row.get('failed'))[:160]}"


def verdict(check: Mapping[str, Any]) -> str:
    """Write in a word or a line what came of a check."""
    return "passed" if check.get("passed") else str(check.get("skipped") or check.get("failed", "FAILED"))[:200]
