"""The list of planted faults fits the kernels as they are, and the committed result is of this list."""

import ast
import json
from dataclasses import asdict

import pytest

from tests.kernels.planted import MAY_ESCAPE, RESULT, ROOT, plant
from tests.kernels.planted_faults import FAULTS, TESTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault: Fault) -> None:
    source = (ROOT / "kernels" / fault.file).read_text()
    assert ast.dump(ast.parse(plant(source, fault))) != ast.dump(ast.parse(source))
    assert (ROOT / "tests" / "kernels" / "interpreted" / TESTS[fault.file]).exists()


def test_a_fault_whose_place_is_gone_is_an_error() -> None:
    fault = Fault("none", "gelu.py", "x + y", "x - y", "test_gelu")
    for source in ("x * y", "x + y; x + y"):
        with pytest.raises(ValueError, match="needs its text once"):
            plant(source, fault)


def test_the_committed_result_is_of_this_list_and_good_enough() -> None:
    result = json.loads(RESULT.read_text())
    planted = {row["name"]: row for row in result["faults"]}
    assert [planted[fault.name] | asdict(fault) for fault in FAULTS] == result["faults"], "plant them anew"
    assert result["planted"] == len(FAULTS) >= 40
    assert result["caught"] == sum(row["verdict"] == "caught" for row in result["faults"])
    assert result["caught"] >= max(38, len(FAULTS) - MAY_ESCAPE)
