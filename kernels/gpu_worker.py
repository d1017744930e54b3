"""The processes behind `gpu_check`: one that measures, which a kernel may take down, and those that compile ahead.

The measuring process tells each stage before it begins; what it did before it died or hung is kept, and a new one goes
on with the next launch.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from kernels.gpu_case import Case
from kernels.gpu_cases import SMALL_CASES, cases
from kernels.gpu_measure import describe, free, guarded, is_usable, measure_case, measure_ceilings, time_on_card

CEILINGS = "ceilings"
# of one launch with its compilation, its reference or a peer
STAGE_LIMIT_S = 90.0
# of a process's start: imports, and the card's context
START_LIMIT_S = 120.0
# what the last stage may take beyond the time for everything
GRACE_S = 20.0
MAX_RESTARTS = 4
_SPAWN = multiprocessing.get_context("spawn")
Job = tuple[str, int, bool, float]


class Measurer:
    """Own the process that measures; start it when it is needed and again after its end.

    serve: what runs in the process, with its end of the pipe and the card's compute capability.
    """

    def __init__(
        self, arch: int, serve: Callable[[Connection, int], None] | None = None, stage_limit_s: float = STAGE_LIMIT_S
    ) -> None:
        self.num_starts = 0
        self._arch = arch
        self._serve = serve or _serve
        self._limit_s = stage_limit_s
        self._process: Any = None
        self._pipe: Any = None

    def ceilings(self, deadline: float) -> dict[str, Any]:
        """Measure what the card reaches."""
        found, died = self._ask((CEILINGS, 0, True, deadline))
        return {"failed": died} if died else found

    def check(self, case: Case, deadline: float) -> dict[str, Any]:
        """Measure a case, in further processes where one does not survive a launch."""
        measured: dict[str, Any] = {"peers": {}, "rows": []}
        with_peers = True
        for _ in range(MAX_RESTARTS):
            first = len(measured["rows"])
            found, died = self._ask((case.name, first, with_peers, deadline))
            measured["peers"] |= found.get("peers", {})
            measured["rows"] += found.get("rows", [])
            stage = found.get("stage", "start")
            if "failed" in found:
                return {**measured, "failed": found["failed"], "trace": found.get("trace")}
            if died and stage.startswith("peer "):
                measured["peers"][stage.removeprefix("peer ")] = {"failed": died}
            elif died and stage == "launch":
                measured["rows"].append({"config": describe(case.configs[len(measured["rows"])]), "failed": died})
            elif died:
                return {**measured, "failed": f"{stage}: {died}"}
            if stage == "done" or len(measured["rows"]) >= len(case.configs) or time.monotonic() > deadline:
                break
            with_peers = False
        return measured

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None

    def _ask(self, job: Job) -> tuple[dict[str, Any], str | None]:
        """Return what came back and, where the process ended, why."""
        limit_s = min(self._limit_s, max(GRACE_S, job[3] + GRACE_S - time.monotonic()))
        patience_s = limit_s
        if self._process is None:
            patience_s = min(limit_s + START_LIMIT_S, max(GRACE_S, job[3] + 2 * GRACE_S - time.monotonic()))
            self._pipe, there = _SPAWN.Pipe()
            self._process = _SPAWN.Process(target=self._serve, args=(there, self._arch), daemon=True)
            self._process.start()
            there.close()
            self.num_starts += 1
        found: dict[str, Any] = {}
        try:
            self._pipe.send(job)
            while self._pipe.poll(patience_s):
                patience_s = limit_s
                found, state = self._pipe.recv()
                if state == "at work":
                    continue
                if state == "unusable":
                    self.close()
                return found, None
            why = f"no answer in {patience_s:.0f} s"
        except (EOFError, OSError):
            self._process.join(10)
            why = f"the process ended with status {self._process.exitcode}"
        self.close()
        return found, why


def _serve(pipe: Connection, arch: int) -> None:
    device = torch.device("cuda", 0)
    by_name = {case.name: case for case in cases(divmod(arch, 10))}
    while True:
        try:
            name, first, with_peers, deadline = pipe.recv()
        except EOFError:
            return

        def work(name: str = name, first: int = first, with_peers: bool = with_peers,
                 deadline: float = deadline) -> dict[str, Any]:
            if name == CEILINGS:
                return measure_ceilings(device)
            return measure_case(by_name[name], device, time_on_card, deadline, lambda now: pipe.send((now, "at work")),
                                first, with_peers)

        found = guarded(work)
        with contextlib.suppress(RuntimeError):
            free(device)
        pipe.send((found, "done" if is_usable(device) else "unusable"))


def compile_ahead(names: set[str], arch: int, num_workers: int, deadline: float) -> float:
    """Fill Triton's cache from processes that launch the same on tensors without contents; return the seconds it took.

    A launch that does not compile, or ends its process, is left to the measurement to meet.
    """
    started = time.monotonic()
    chosen = [case for case in (*cases(divmod(arch, 10)), *SMALL_CASES) if case.name in names]
    jobs = [(case.name, i) for i in range(max((len(case.configs) for case in chosen), default=0)) for case in chosen
            if i < len(case.configs)]
    taken = _SPAWN.Value("i", 0)
    workers = [_SPAWN.Process(target=_compile_jobs, args=(jobs, taken, arch), daemon=True)
               for _ in range(min(num_workers, len(jobs)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.kill()
        worker.join()
    return round(time.monotonic() - started, 1)


def _compile_jobs(jobs: list[tuple[str, int]], taken: Any, arch: int) -> None:
    torch.set_num_threads(1)
    by_name = {case.name: case for case in (*cases(divmod(arch, 10)), *SMALL_CASES)}
    while True:
        with taken.get_lock():
            i = taken.value
            taken.value += 1
        if i >= len(jobs):
            return
        name, config = jobs[i]
        guarded(lambda case=by_name[name], config=config: compile_launch(case, config, arch))  # type: ignore[misc]


def compile_launch(case: Case, config: int, arch: int) -> dict[str, Any]:
    """Launch a case's configuration dry; raises what Triton raises."""
    from kernels.dry_launch import dry_launches

    with dry_launches(arch) as compiled:
        case.launch(case.make(torch.device("cpu"), False), case.configs[config])
    return {"kernels": [kernel.name for kernel in compiled],
            "stack_bytes": max((kernel.stack_bytes for kernel in compiled), default=0)}
