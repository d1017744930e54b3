"""The tests, tested: `python -m tests.kernels.planted [--out FILE] [--only TEXT]` plants faults and counts the caught.

Each fault of `planted_faults` is planted alone in a copy of the kernels and their tests in a temporary folder, and the
interpreted tests of the faulty file run there until one fails, first the one that should. A fault is caught by a failed
assertion or by an address outside every argument; one that merely does not compile counts as broken, not as caught. The
tree itself is never touched; without a fault all tests in question pass first. Exit status 0 where all but two faults
are caught.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.kernels.planted_faults import FAULTS, TESTS, Fault

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("planted.json")
MAY_ESCAPE = 2
LIMIT_S = 900.0
CAUGHT_BY = ("AssertionError", "IndexError")


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, run, print a line a fault; write the result where asked to."""
    parser = argparse.ArgumentParser(description="Plant faults in copies of the kernels and see whether tests fail.")
    parser.add_argument("--out", type=Path, help=f"JSON file to write, after each fault ({RESULT.name})")
    parser.add_argument("--only", help="faults whose name or file contains this; the others' results are kept")
    parser.add_argument("--resume", action="store_true", help="plant only what the file has no result of")
    parser.add_argument("--no-baseline", action="store_true", help="skip the run without a fault")
    options = parser.parse_args(arguments)
    chosen = [f for f in FAULTS if not options.only or options.only in f.name or options.only in f.file]
    _preload()
    rows: dict[str, dict[str, Any]] = {}
    if (options.only or options.resume) and options.out and options.out.exists():
        rows = {row["name"]: row for row in json.loads(options.out.read_text())["faults"]}
    if options.resume:
        chosen = [f for f in chosen if rows.get(f.name, {}) | asdict(f) != rows.get(f.name)]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        _copy(tree)
        if not options.no_baseline:
            for file in sorted({TESTS[fault.file] for fault in chosen}):
                failure = _run(tree, file)
                print(f"{'without a fault':<60} {file}: {failure or 'passes'}", flush=True)
                if failure is not None:
                    return 1
        for fault in chosen:
            rows[fault.name] = row = {**asdict(fault), **_plant(tree, fault)}
            print(f"{fault.name:<60} {row['verdict']:<9} {row['by']} ({row['seconds']} s)", flush=True)
            if options.out:
                options.out.write_text(json.dumps(_result(rows), indent=1) + "\n")
    result = _result(rows)
    print(f"{result['caught']} of {result['planted']} caught")
    return 0 if result["caught"] >= result["planted"] - MAY_ESCAPE else 1


def plant(source: str, fault: Fault) -> str:
    """Return source with the fault in it; ValueError unless the text to change occurs exactly once."""
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: {fault.name!r} needs its text once, found {count} times")
    return source.replace(fault.old, fault.new)


def _plant(tree: Path, fault: Fault) -> dict[str, Any]:
    started = time.monotonic()
    path = tree / "kernels" / fault.file
    sound = path.read_text()
    path.write_text(plant(sound, fault))
    try:
        failure = _run(tree, TESTS[fault.file], fault.test) or _run(tree, TESTS[fault.file])
    finally:
        path.write_text(sound)
    verdict = "escaped"
    if failure is not None:
        verdict = "caught" if failure["kind"] in CAUGHT_BY else "broken"
    return {"verdict": verdict, "by": None if failure is None else f"{failure['test']}: {failure['kind']}",
            "seconds": round(time.monotonic() - started, 1)}


def _preload() -> None:
    # each run is a fork of this process: torch and Triton are imported once, kernels never
    os.environ["TRITON_INTERPRET"] = "1"
    import hypothesis
    import numpy
    import pytest
    import torch
    import triton

    assert "kernels" not in sys.modules
    torch.set_num_threads(1)
    del hypothesis, numpy, pytest, triton


def _copy(tree: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "kernels", tree / "kernels", ignore=skip)
    shutil.copytree(ROOT / "tests" / "kernels", tree / "tests" / "kernels", ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tree)


def _run(tree: Path, file: str, named: str = "") -> dict[str, str] | None:
    """Run a file's interpreted tests (those of that name) in the tree; return the first failure, None if all pass."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(tree, f"tests/kernels/interpreted/{file}", named, sender))
    child.start()
    sender.close()
    try:
        answer: dict[str, Any] = receiver.recv() if receiver.poll(LIMIT_S) else {"kind": "TimeLimit", "test": file}
    except EOFError:
        answer = {"kind": "Crash", "test": file}
    child.kill()
    child.join()
    return answer or None


def _child(tree: Path, file: str, named: str, sender: Connection) -> None:
    import pytest
    from hypothesis import Phase, settings

    os.chdir(tree)
    # other packages' plugins take longer to load than most faults to be found
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ROOT).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    # the same examples each time, and no search for a smaller one: that would take minutes
    settings.register_profile("planted", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
    settings.load_profile("planted")

    class FirstFailure:
        failure: dict[str, str] | None = None

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            report = yield
            if report.failed and self.failure is None:
                self.failure = {"test": item.name, "kind": _kind(call.excinfo.value)}
            return report

    seen = FirstFailure()
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", named, file], plugins=[seen])
    import kernels

    assert kernels.__file__ is not None and Path(kernels.__file__).is_relative_to(tree)
    if seen.failure is None and code != 0:
        seen.failure = {"test": file, "kind": f"exit status {int(code)}"}
    sender.send(seen.failure or {})


def _kind(error: BaseException) -> str:
    """Name what was raised first: the interpreter wraps what goes wrong in a kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


def _result(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    kept = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    caught = sum(row["verdict"] == "caught" for row in kept)
    return {"planted": len(kept), "caught": caught, **_versions(), "faults": kept}


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "torch": torch.__version__,
            "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())
