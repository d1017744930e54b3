"""`media-server kernels compile-check`: what the kernels become on cards that are not here, against a committed table.

Every case of `compile_cases` is compiled for each card by `dry_launch` and compared with `compile_table.json`, which is
keyed by Triton's version, then by card. A kernel that got worse (stack, a lost instruction kind, more registers, shared
or tensor memory) enters the table only with a reason (`--update --reason TEXT`), and what breaks a rule (any stack, a
missing kind) stays a named exemption with its reason. Limits of the cards are never exempt. The table holds the
roofline of `roofline` too.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels import roofline
from kernels.dispatch import HAS_TRITON, triton
from kernels.dry_launch import SHARED_LIMIT_BYTES, TENSOR_COLUMNS_LIMIT, Compiled, dry_launches

TABLE = Path(__file__).with_name("compile_table.json")
FIGURES = ("registers", "stack_bytes", "shared_bytes", "tensor_columns")
Row = dict[str, Any]
# rows of one card: case, then its kernels in the order of their launch
Rows = dict[str, list[Row]]


def main(arguments: Sequence[str]) -> int:
    """Compile every kernel for cards that are not here and compare registers, stack, memory and instructions."""
    parser = argparse.ArgumentParser(prog="media-server kernels compile-check", description=main.__doc__)
    parser.add_argument("--arch", type=int, nargs="*", choices=sorted(SHARED_LIMIT_BYTES), help="cards (all)")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to compare with")
    parser.add_argument("--roofline", action="store_true", help="the roofline only: nothing is compiled")
    parser.add_argument("--update", action="store_true", help="write what was found into the table")
    parser.add_argument("--reason", help="why figures got worse or a rule is broken, for --update")
    options = parser.parse_args(arguments)
    table = json.loads(options.table.read_text()) if options.table.exists() else {}
    status = _roofline(table, options.table, options.update)
    if options.roofline:
        return status
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1":
        print("compile-check: needs Triton, and a process that does not interpret kernels", file=sys.stderr)
        return 2
    from kernels.compile_case import ARCHS
    from kernels.compile_cases import CASES

    version = table.setdefault("triton", {}).setdefault(release(), {})
    for arch in options.arch or ARCHS:
        known: Rows = version.setdefault(str(arch), {})
        for case in CASES:
            if arch not in case.expected or (options.only and options.only not in case.name):
                continue
            try:
                rows = [describe(kernel) for kernel in compile_case(case.launch, arch)]
            except Exception as error:  # whatever Triton or ptxas raise for what does not compile or fit
                print(f"sm_{arch} {case.name:<46} {type(error).__name__}: {error}", flush=True)
                status = 1
                continue
            faults = check(rows, case.expected[arch], arch, known.get(case.name))
            for row in rows:
                print(f"sm_{arch} {case.name:<46} {text(row)}", flush=True)
            unexplained = [fault for fault in faults if not fault.is_limit and not options.reason]
            limits = [fault for fault in faults if fault.is_limit]
            for fault in faults:
                print(f"    {fault.text}", flush=True)
            if options.update and not unexplained and not limits:
                for row, old in zip(rows, known.get(case.name) or [{}] * len(rows), strict=False):
                    is_worse = any(fault.text.startswith(f"{row['name']}:") for fault in faults)
                    reason = options.reason if is_worse else old.get("reason")
                    if reason:
                        row["reason"] = reason
                known[case.name] = rows
                write(options.table, table)
            elif faults:
                status = 1
            elif rows != [{k: v for k, v in row.items() if k != "reason"} for row in known.get(case.name, [])]:
                print("    differs from the table (not for the worse)" if case.name in known else
                      f"    not in the table of Triton {release()}", flush=True)
                status = 1
    return status


def release() -> str:
    """Return Triton's version as the table has it, without the commit that a CUDA build of torch may put behind it."""
    return str(triton.__version__).partition("+")[0]


def _roofline(table: dict[str, Any], path: Path, is_update: bool) -> int:
    rows = roofline.rows()
    if table.get("roofline") == rows:
        return 0
    if is_update:
        table["roofline"] = rows
        write(path, table)
        return 0
    print("the roofline differs from the table")
    return 1


def compile_case(launch: Any, arch: int) -> list[Compiled]:
    """Launch a case dry for a card and return what it compiled, fused multiply-adds as at run time."""
    before = os.environ.get("TRITON_DEFAULT_FP_FUSION")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    try:
        with dry_launches(arch) as compiled:
            launch(arch)
    finally:
        if before is None:
            del os.environ["TRITON_DEFAULT_FP_FUSION"]
        else:
            os.environ["TRITON_DEFAULT_FP_FUSION"] = before
    return compiled


def describe(kernel: Compiled) -> Row:
    """Turn a compiled kernel into the table's row."""
    row = dataclasses.asdict(kernel)
    return {**row, "instructions": list(kernel.instructions)}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Say what is wrong with a row; a limit of the card can have no reason."""

    text: str
    is_limit: bool = False


def check(
    rows: Sequence[Row], expected: Sequence[frozenset[str]], arch: int, known: Sequence[Row] | None
) -> list[Finding]:
    """Compare a case's rows with the card's limits, with what is expected of them and with the table's rows.

    Rules that a row of the table breaks already, with a reason there, are not found again.
    """
    found: list[Finding] = []
    if len(rows) != len(expected):
        return [Finding(f"{len(rows)} kernels were compiled, {len(expected)} expected")]
    olds: Iterable[Row] = known if known is not None and len(known) == len(rows) else [{}] * len(rows)
    for row, kinds, old in zip(rows, expected, olds, strict=True):
        name = row["name"]
        if row["shared_bytes"] > SHARED_LIMIT_BYTES[arch]:
            found.append(Finding(f"{name}: {row['shared_bytes']} B of shared memory, the card has "
                                 f"{SHARED_LIMIT_BYTES[arch]}", is_limit=True))
        if row["tensor_columns"] > TENSOR_COLUMNS_LIMIT:
            found.append(Finding(f"{name}: {row['tensor_columns']} columns of tensor memory, the card has "
                                 f"{TENSOR_COLUMNS_LIMIT}", is_limit=True))
        missing = sorted(kinds - set(row["instructions"]))
        if not old.get("reason"):
            if missing:
                found.append(Finding(f"{name}: expected {', '.join(missing)}, has {row['instructions']}"))
            if row["stack_bytes"]:
                found.append(Finding(f"{name}: {row['stack_bytes']} B of stack"))
        if old:
            found += [Finding(f"{name}: {key} rose from {old[key]} to {row[key]}") for key in FIGURES
                      if row[key] > old[key]]
            lost = sorted(set(old["instructions"]) - set(row["instructions"]))
            found += [Finding(f"{name}: lost {kind}") for kind in lost]
    return found


def text(row: Mapping[str, Any]) -> str:
    """Write a row for people."""
    return (f"{row['name']:<24} {row['registers']:>3} registers {row['stack_bytes']:>4} B stack "
            f"{row['shared_bytes']:>6} B shared {row['tensor_columns']:>3} columns {row['num_warps']:>2} warps  "
            f"{' '.join(row['instructions'])}")


def write(path: Path, table: Mapping[str, Any]) -> None:
    """Write the table with one kernel a line, so that a change shows the row."""
    versions = []
    for version, compiled in sorted(table.get("triton", {}).items()):
        cards = []
        for arch, cases in compiled.items():
            lines = [f"    {json.dumps(name)}: [\n" + ",\n".join(f"     {json.dumps(row)}" for row in rows) + "]"
                     for name, rows in cases.items()]
            cards.append(f"   {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "}")
        versions.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(cards) + "}")
    floors = ",\n".join(f"  {json.dumps(row)}" for row in table.get("roofline", []))
    path.write_text('{\n "triton": {\n' + ",\n".join(versions) + '},\n "roofline": [\n' + floors + "]}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
