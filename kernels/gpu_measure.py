"""One check of `gpu_check` on a card: errors against fp64, repeats bit for bit under load, times of launches and peers.

Nothing is judged here: what was measured goes out as plain dicts, a stage at a time, so that a process which a kernel
takes down has told what it did before.
"""

import contextlib
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernels.gpu_case import Case, Inputs, error_of

# calls that are shorter are timed in a captured graph: Python's launches take tens of microseconds
SHORT_US = 500.0
REPEATS = 3
Timer = Callable[[Callable[[Inputs], Any], list[Inputs]], dict[str, Any]]
Tell = Callable[[dict[str, Any]], None]


def measure_case(
    case: Case, device: torch.device, timer: Timer, deadline: float, tell: Tell, first: int = 0, with_peers: bool = True
) -> dict[str, Any]:
    """Measure a case's launches from `first` on, and its peers; return {"peers": by name, "rows": one a launch}.

    deadline: of time.monotonic(), after which launches are left out. tell: takes what is known, before each stage.
    A failure is a row's {"failed": why}; after one that left the card unusable the rest is left out.
    """
    torch.manual_seed(0)
    measured: dict[str, Any] = {"peers": {}, "rows": [], "stage": "inputs"}
    tell(measured)
    inputs = case.make(device, True)
    measured["stage"] = "reference"
    tell(measured)
    want = case.reference(inputs)
    for name, peer in case.peers.items() if with_peers else ():
        measured["stage"] = f"peer {name}"
        tell(measured)

        def time_peer(peer: Callable[[Inputs], Any] = peer) -> dict[str, Any]:
            return {"error": error_of(case.sample(inputs, peer(inputs)), want), **timer(peer, case.rotate(inputs))}

        measured["peers"][name] = guarded(time_peer)
        if not is_usable(device):
            return measured
    for config in case.configs[first:]:
        if time.monotonic() > deadline:
            break
        measured["stage"] = "launch"
        tell(measured)

        def measure(config: Any = config) -> dict[str, Any]:
            with poisoned():
                out = case.launch(inputs, config)
            error = error_of(case.sample(inputs, out), want)
            with loaded(device):
                repeats = [case.launch(inputs, config) for _ in range(REPEATS)]
            is_same = all(_equal(out, again) for again in repeats)
            del repeats
            timed = timer(lambda one: case.launch(one, config), case.rotate(inputs))
            return {"error": error, "bitwise": is_same, **timed}

        measured["rows"].append({"config": describe(config), **guarded(measure)})
        if not is_usable(device):
            break
    measured["stage"] = "done"
    return measured


def guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what check returns, or why it failed: one failing launch must not end the run."""
    try:
        return check()
    except Exception as error:
        kind = type(error).__name__
        row = {"failed": f"{kind}: {error}"[:2000], "trace": traceback.format_exc()[-1500:]}
        # the launch asks for more than this card has: a choice among others, not a fault
        return row | {"refused": True} if kind == "OutOfResources" else row


def is_usable(device: torch.device) -> bool:
    """Say whether the card still answers this process; an illegal access ends its context for good."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty gives with NaN: an element that nobody writes is not to be found right by luck."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def loaded(device: torch.device) -> Iterator[None]:
    """Keep the card busy with matrix products on another stream meanwhile."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        a = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
        for _ in range(50):
            a @ a
    yield
    torch.cuda.synchronize(device)


def time_on_card(function: Callable[[Inputs], Any], sets: list[Inputs]) -> dict[str, Any]:
    """Time calls in microseconds: in a graph where they are short and can be captured, else between events."""
    torch.cuda.synchronize()
    for one in sets:
        function(one)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for one in sets:
        function(one)
    end.record()
    end.synchronize()
    about_us = start.elapsed_time(end) * 1e3 / len(sets)
    if about_us < SHORT_US and _can_capture(function, sets[0]):
        return {"us": _time_graph(function, sets, about_us), "timed": "graph"}
    import triton.testing

    milliseconds = triton.testing.do_bench(lambda: function(sets[0]), warmup=10, rep=50, return_mode="median")
    return {"us": 1e3 * float(milliseconds), "timed": "events"}


def _can_capture(function: Callable[[Inputs], Any], one: Inputs) -> bool:
    """Say whether a call leaves the host out: what waits for the card cannot be captured."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(one)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def _time_graph(function: Callable[[Inputs], Any], sets: list[Inputs], about_us: float) -> float:
    rounds = max(1, min(64, round(2000 / (about_us * len(sets)))))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # libraries make their workspaces a stream, which they cannot during a capture
        function(sets[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for one in sets * rounds:
            function(one)
    times: list[float] = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(sets)))
    return sorted(times[2:])[len(times[2:]) // 2]


def measure_ceilings(device: torch.device) -> dict[str, Any]:
    """Measure what the card reaches: copies and reads of 2 GiB, a bf16 product of 8192 by 8192."""
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


def describe(config: Any) -> Any:
    """Turn a launch configuration into what JSON takes."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config


def free(device: torch.device) -> None:
    """Give memory back between checks, that of graphs of autograd too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(torch.equal(a, b))
