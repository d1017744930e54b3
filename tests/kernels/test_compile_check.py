"""What kernels become on cards that are not there, against the committed table; and the rules of that comparison."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kernels import compile_check, roofline
from kernels.compile_case import ARCHS, CompileCase
from kernels.compile_cases import CASES
from kernels.compile_check import check, compile_case, describe, main
from kernels.dry_launch import SHARED_LIMIT_BYTES, Compiled

TABLE: dict[str, Any] = json.loads(compile_check.TABLE.read_text())["triton"]
KNOWN = TABLE.get(compile_check.release(), {})
# what a CUDA build of torch brings may be older than the pinned one
OLDER = "3.6.0"
TESTED = [(case, arch) for case in CASES for arch in ARCHS if arch in case.expected and case.is_tested]
# of sm_120, which takes most kernels as sm_90 does, those whose launches are its own; the others in `make long`
ON_120 = ("attention, D 128", "attention, D 256", "block-sparse attention, tiles of 128, D 128", "decode",
          "decode, latents", "chunk of prefill", "NVFP4, 16 tokens", "W4A4, 256 tokens")
COMPLETE = ARCHS
ROW = {"name": "_kernel", "registers": 100, "stack_bytes": 0, "shared_bytes": 1000, "tensor_columns": 0, "num_warps": 4,
       "instructions": ["wgmma", "tma"]}
WANTED = [frozenset({"wgmma", "tma"})]


@pytest.mark.spread
@pytest.mark.parametrize(("case", "arch"), [
    pytest.param(case, arch, id=f"sm_{arch} {case.name}",
                 marks=[pytest.mark.long] if arch == 120 and case.name not in ON_120 else [])
    for case, arch in TESTED])
def test_as_in_the_table_or_better(case: CompileCase, arch: int) -> None:
    rows = [describe(kernel) for kernel in compile_case(case.launch, arch)]
    # another Triton than those of the table is held to the rules alone
    found = check(rows, case.expected[arch], arch, KNOWN.get(str(arch), {}).get(case.name))
    assert not found, "\n".join([*(finding.text for finding in found), *map(compile_check.text, rows)])


def test_the_table_holds_the_pinned_version_and_every_case_of_it() -> None:
    pinned = [line.partition("==")[2] for line in (Path(__file__).parents[2] / "constraints.txt").read_text().split()
              if line.startswith("triton==")]
    assert set(pinned) | {OLDER} <= set(TABLE)
    for version in TABLE:
        for arch in ARCHS:
            names = {case.name for case in CASES if arch in case.expected}
            found = set(TABLE[version].get(str(arch), {}))
            assert found <= names, f"Triton {version}, sm_{arch}: rows of no case"
            assert found == names or arch not in COMPLETE, f"Triton {version}, sm_{arch}: compile it anew"


@pytest.mark.parametrize("version", list(TABLE))
def test_what_breaks_a_rule_in_the_table_has_its_reason(version: str) -> None:
    for case in CASES:
        for arch, expected in case.expected.items():
            rows = TABLE[version].get(str(arch), {}).get(case.name, [])
            if not rows:
                continue
            bare = [{key: value for key, value in row.items() if key != "reason"} for row in rows]
            for row, finding in [(row, finding) for row, one, kinds in zip(rows, bare, expected, strict=True)
                                 for finding in check([one], [kinds], arch, None)]:
                told = (version, arch, case.name, finding.text)
                assert not finding.is_limit and len(row.get("reason", "")) > 20, told


def test_a_row_as_known_passes() -> None:
    assert check([ROW], WANTED, 90, [ROW]) == [] == check([ROW], WANTED, 90, None)


@pytest.mark.parametrize(("change", "told"), [
    ({"stack_bytes": 8}, "_kernel: 8 B of stack"),
    ({"instructions": ["wgmma", "cp.async"]}, "_kernel: expected tma, has"),
    ({"registers": 101}, "_kernel: registers rose from 100 to 101"),
    ({"shared_bytes": 2000}, "_kernel: shared_bytes rose from 1000 to 2000"),
    ({"instructions": ["tma"]}, "_kernel: lost wgmma"),
])
def test_what_is_worse_is_named(change: dict[str, Any], told: str) -> None:
    assert any(finding.text.startswith(told) for finding in check([ROW | change], WANTED, 90, [ROW]))


def test_fewer_registers_or_new_kinds_are_not_worse() -> None:
    assert not check([ROW | {"registers": 90, "instructions": ["wgmma", "tma", "mma"]}], WANTED, 90, [ROW])


def test_a_reason_covers_a_rule_but_neither_a_change_nor_a_limit() -> None:
    spilled = ROW | {"stack_bytes": 64}
    assert not check([spilled], WANTED, 90, [spilled | {"reason": "too wide"}])
    assert check([ROW | {"stack_bytes": 72}], WANTED, 90, [spilled | {"reason": "too wide"}])
    large = ROW | {"shared_bytes": SHARED_LIMIT_BYTES[120] + 1}
    assert [finding.is_limit for finding in check([large], WANTED, 120, [large | {"reason": "too wide"}])] == [True]
    assert check([ROW | {"tensor_columns": 513}], WANTED, 100, None)[0].is_limit


def test_the_command_compares_refuses_and_takes_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {**ROW, "instructions": ("wgmma", "tma")}
    monkeypatch.setattr(compile_check, "compile_case", lambda launch, arch: [Compiled(**found)])
    path = tmp_path / "table.json"
    asked = ["--arch", "90", "--only", "attention, D 128", "--table", str(path)]
    assert main(asked) == 1 and "not in the table" in capsys.readouterr().out
    assert main([*asked, "--update"]) == 0 == main(asked)
    found["registers"] = 90
    assert main(asked) == 1 and "differs from the table (not for the worse)" in capsys.readouterr().out
    found |= {"registers": 100, "stack_bytes": 16}
    assert main(asked) == 1
    told = capsys.readouterr().out
    assert "sm_90 attention, D 128" in told and "16 B of stack" in told
    assert main([*asked, "--update"]) == 1  # for the worse, and why is not said
    assert main([*asked, "--update", "--reason", "a wider tile, 5 % faster"]) == 0 == main(asked)
    rows = json.loads(path.read_text())["triton"][compile_check.release()]["90"]["attention, D 128"]
    assert rows == [{**found, "instructions": ["wgmma", "tma"], "reason": "a wider tile, 5 % faster"}]


def test_each_version_of_triton_is_compared_with_its_own_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {**ROW, "instructions": ("wgmma", "tma")}
    monkeypatch.setattr(compile_check, "compile_case", lambda launch, arch: [Compiled(**found)])
    path, name = tmp_path / "table.json", "attention, D 128"
    before = {"3.6.0": {"90": {name: [ROW]}}, "3.9.0": {"90": {name: [ROW | {"registers": 90}]}}}
    path.write_text(json.dumps({"triton": before, "roofline": roofline.rows()}))
    asked = ["--arch", "90", "--only", name, "--table", str(path)]
    for version, status in (("3.6.0", 0), ("3.6.0+gitabc", 0), ("3.9.0", 1), ("3.10.0", 1)):
        monkeypatch.setattr(compile_check, "triton", types.SimpleNamespace(__version__=version))
        assert main(asked) == status
    told = capsys.readouterr().out
    assert told.count("registers rose from 90 to 100") == 1 and told.count("not in the table of Triton 3.10.0") == 1
    found["registers"] = 80
    monkeypatch.setattr(compile_check, "triton", types.SimpleNamespace(__version__="3.6.0"))
    assert main([*asked, "--update"]) == 0
    after = json.loads(path.read_text())["triton"]
    assert after == {**before, "3.6.0": {"90": {name: [ROW | {"registers": 80}]}}}


def test_the_command_is_installed_under_its_name() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"kernels.compile-check" = "kernels.compile_check:main"' in text
