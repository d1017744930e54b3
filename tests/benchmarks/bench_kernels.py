"""The kernel library's CPU paths beside plain torch, in one run: `make bench-kernels` or

    python -m tests.benchmarks.bench_kernels [--repeats 20] [--threads N] [--out FILE]

Plain torch is what a model's own code does: the steps of transformers or diffusers, or a formula written down. Each op
is first compared with it; one that differs is reported as wrong, without times. Calls alternate, so that both meet the
same machine. Times are milliseconds at the 20th, 50th and 80th percentile; the ratio is plain torch's median over ours.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention import attention
from kernels.block_selection import block_scores, select_blocks
from kernels.block_sparse_attention import block_sparse_attention
from kernels.gelu import gelu
from kernels.head_rms_norm import head_rms_norm
from kernels.kv_store import kv_store
from kernels.layer_norm_modulate import add_layer_norm_modulate
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary, rotary_3d, rotary_3d_tables
from kernels.sampling import sample
from kernels.sampling_params import SamplingParams
from kernels.silu_mul import silu_mul
from kernels.spec_accept import spec_accept
from kernels.tile_order import tile_order, tile_order_reference

GRID, HEADS, HEAD_DIM = (5, 15, 26), 12, 128
N, WIDTH = 1950, 1536
VOCAB = 49_152


@dataclass(frozen=True)
class Pair:
    """One op and what it replaces; both give tensors that must agree, but for the two that draw or approximate."""

    name: str
    shape: str
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    is_comparable: bool = True


def pairs() -> list[Pair]:
    """Make the inputs: Wan's width on a small grid, a decoding step of a small language model."""
    torch.manual_seed(0)
    heads = torch.randn(1, N, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(1, HEADS, N, HEAD_DIM) for _ in range(3))
    rows, branch = torch.randn(1, N, WIDTH), torch.randn(1, N, WIDTH)
    gate, scale, shift = (torch.randn(1, 1, WIDTH) for _ in range(3))
    weight = torch.randn(WIDTH)
    cos3, sin3 = rotary_3d_tables(HEAD_DIM, 64)
    angles = torch.rand(N, HEAD_DIM // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    cos_twice, sin_twice = (torch.cat([x, x], -1)[None, :, None] for x in (cos, sin))
    full_cos, full_sin = (_wan_table(x).repeat_interleave(2, -1)[None, :, None] for x in (cos3, sin3))
    cache, slots = torch.zeros(64, 64, 8, HEAD_DIM), torch.randperm(64 * 64)[:512]
    keys = torch.randn(512, 8, HEAD_DIM)
    other = torch.zeros_like(cache)
    up = torch.randn(N, 2 * 4096)
    one = up[:, :4096]
    scores = torch.randn(1, HEADS, 256, 256)
    shape = f"N{N} H{HEADS} D{HEAD_DIM}"
    return [
        Pair("attention", shape, lambda: attention(q, k, v), lambda: _softmax_attention(q, k, v)),
        Pair("block_sparse_attention", f"{shape}, 2 of 16 blocks", lambda: _sparse(q, k, v),
             lambda: F.scaled_dot_product_attention(q, k, v), False),
        Pair("select_blocks", "H12, 32 of 256 blocks", lambda: select_blocks(scores, 32)[0],
             lambda: scores.topk(32).indices.sort(-1).values.int()),
        Pair("rms_norm", f"{N} x {WIDTH}", lambda: rms_norm(rows, weight),
             lambda: rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * weight),
        Pair("head_rms_norm", shape, lambda: head_rms_norm(heads, weight[:HEAD_DIM]),
             lambda: heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6) * weight[:HEAD_DIM]),
        Pair("rotary, halves", shape, lambda: rotary(heads, cos, sin),
             lambda: heads * cos_twice + _rotate_half(heads) * sin_twice),
        Pair("rotary_3d", shape, lambda: rotary_3d(heads, cos3, sin3, GRID),
             lambda: _wan_rotary(heads, full_cos, full_sin)),
        Pair("layer_norm_modulate", f"{N} x {WIDTH}", lambda: add_layer_norm_modulate(rows, branch, gate, scale, shift),
             lambda: _wan_norm(rows, branch, gate, scale, shift)),
        Pair("silu_mul", f"{N} x 4096", lambda: silu_mul(*up.chunk(2, -1)),
             lambda: F.silu(one) * up[:, 4096:]),
        Pair("gelu tanh", f"{N} x 4096", lambda: gelu(one, approximate="tanh"),
             lambda: 0.5 * one * (1 + torch.tanh(0.7978845608 * (one + 0.044715 * one**3)))),
        Pair("tile_order", f"{GRID} by (4, 4, 8)", lambda: tile_order(q, GRID, (4, 4, 8)),
             lambda: tile_order_reference(q, GRID, (4, 4, 8))),
        Pair("kv_store", "512 tokens, H8", lambda: _store(keys, cache, slots), lambda: _store_loop(keys, other, slots)),
        *_sampling_pairs(),
    ]


def _sampling_pairs() -> list[Pair]:
    batch, places = 8, 4
    logits = torch.randn(batch, VOCAB) * 3
    seeds, positions = torch.arange(batch), torch.arange(batch)
    params = SamplingParams(torch.full((batch,), 0.8), seeds, positions, top_p=torch.full((batch,), 0.95))
    plain_params = SamplingParams(torch.full((batch,), 0.8), seeds, positions)
    target = torch.softmax(torch.randn(batch, places + 1, VOCAB), -1)
    drafts, counts = torch.randint(0, VOCAB, (batch, places)), torch.full((batch,), places, dtype=torch.int32)
    shape = f"B{batch} V{VOCAB}"
    return [
        Pair("sample top-p", shape, lambda: sample(logits, params, with_probabilities=True).probabilities,
             lambda: _top_p(logits / 0.8, 0.95)),
        Pair("sample, no cut", shape, lambda: sample(logits, plain_params).token_ids,
             lambda: torch.multinomial(torch.softmax(logits / 0.8, -1), 1), False),
        Pair("spec_accept", f"{shape} K{places}", lambda: spec_accept(drafts, counts, target, None, seeds, positions),
             lambda: _accept_every_place(drafts, target), False),
    ]


def _softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5, -1) @ v


def _sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return block_sparse_attention(q, k, v, *select_blocks(block_scores(q, k), 2))[0]


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _wan_table(table: torch.Tensor) -> torch.Tensor:
    side = HEAD_DIM // 6
    parts = table.split((HEAD_DIM // 2 - 2 * side, side, side), 1)
    return torch.cat([part[:size].view(*(size if i == axis else 1 for i in range(3)), -1).expand(*GRID, -1)
                      for axis, (part, size) in enumerate(zip(parts, GRID, strict=True))], -1).flatten(0, 2)


def _wan_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos[..., 0::2] - x2 * sin[..., 1::2]
    out[..., 1::2] = x1 * sin[..., 1::2] + x2 * cos[..., 0::2]
    return out


def _wan_norm(
    x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.float() + branch * gate).type_as(x)
    return (F.layer_norm(total.float(), (WIDTH,), eps=1e-6) * (1 + scale) + shift).type_as(x), total


def _store(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    kv_store(keys, None, cache, None, slots)
    return cache


def _store_loop(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    for token, slot in enumerate(slots.tolist()):
        cache[slot // 64, slot % 64] = keys[token]
    return cache


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = torch.softmax(scores, -1).sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    probabilities = torch.zeros_like(scores).scatter_(1, order, ordered)
    probabilities /= probabilities.sum(-1, keepdim=True)
    torch.multinomial(probabilities, 1)
    return probabilities


def _accept_every_place(drafts: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_accepted = torch.rand(drafts.shape) < target[:, :-1].gather(2, drafts[..., None]).squeeze(2)
    residual = target[:, :-1].scatter(2, drafts[..., None], 0)
    # a token for each place, of which one is used
    tokens = torch.multinomial(torch.cat([residual, target[:, -1:]], 1).flatten(0, 1), 1).view(len(drafts), -1)
    return tokens, is_accepted.int().cumprod(1).sum(1)


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Compare both, then time them in turn."""
    ours, plain = pair.ours(), pair.plain()
    try:
        if pair.is_comparable:
            torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-3)
    except AssertionError as error:
        return {"name": pair.name, "shape": pair.shape, "wrong": str(error)}
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for name, function in (("ours", pair.ours), ("plain", pair.plain)):
            started = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - started) * 1e3)
    quantiles = {name: [round(sorted(values)[int(len(values) * share)], 3) for share in (0.2, 0.5, 0.8)]
                 for name, values in times.items()}
    return {"name": pair.name, "shape": pair.shape, "ours_ms": quantiles["ours"], "plain_ms": quantiles["plain"],
            "ratio": round(quantiles["plain"][1] / quantiles["ours"][1], 2)}


def main() -> int:
    """Print the table and write it as JSON; return 1 if an op differs from plain torch."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_kernels",
        description="Time the kernel library's CPU paths beside plain torch; exit status 1 where one differs from it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that torch computes on")
    parser.add_argument("--out", type=Path, help="a JSON file to write the table to")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        parser.error(f"--repeats and --threads must be at least 1, got {options.repeats} and {options.threads}")
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        results = [measure(pair, options.repeats) for pair in pairs()]
    report = {"machine": _machine(), "threads": options.threads, "repeats": options.repeats, "results": results}
    print(report["machine"], f"{options.threads} threads, fp32, {options.repeats} repeats")
    print(f"{'op':<24}{'shape':<32}{'ours ms (p20 p50 p80)':>28}{'plain torch ms':>28}{'ratio':>8}")
    for row in results:
        if "wrong" in row:
            print(f"{row['name']:<24}{row['shape']:<32}  WRONG: {row['wrong'].splitlines()[0]}")
            continue
        ours, plain = ("".join(f"{value:>9.2f}" for value in row[f"{who}_ms"]) for who in ("ours", "plain"))
        print(f"{row['name']:<24}{row['shape']:<32}{ours:>28}{plain:>28}{row['ratio']:>8.2f}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return 1 if any("wrong" in row for row in results) else 0


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]} ({len(names)} cores)" if names else model
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True,
                                cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return f"{model}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit}"


if __name__ == "__main__":
    raise SystemExit(main())
