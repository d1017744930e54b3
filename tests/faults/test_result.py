"""A campaign's result over several sittings: what counts, what does not, and what is left to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.result import NotResumable, Result


def sitting(num_actions: int, num_checked: int, *, findings: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "seconds": 10.0 * num_actions,
        "num_actions": num_actions,
        "num_checked": num_checked,
        "jobs": {"accepted": num_actions},
        "failed_with": {},
        "messages": {"arrivals": 2},
        "recoveries": [{"part": "worker", "seconds": float(num_actions)}],
        "findings": list(findings),
        "log": [{"action": "kill", "target": "api" if index < 3 else "worker"} for index in range(num_actions)],
    }


def test_a_campaign_that_was_broken_off_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    first = Result(7, 20)
    first.write(path, sitting(2, 0))
    first.write(path, sitting(9, 5))
    # no word of an end
    second = Result.read(path)
    assert (second.num_wanted, second.num_checked, second.next_seed()) == (20, 5, 7 + 1_000_003)
    second.write(path, sitting(4, 0))
    second.write(path, sitting(15, 15), is_over=True)
    said = json.loads(path.read_text())
    assert [entry["state"] for entry in said["sittings"]] == ["broken off", "over"]
    assert (said["num_checked"], said["num_sittings"], said["num_broken_off"]) == (20, 2, 1)
    assert said["num_done_and_not_checked"] == 4
    # three of the five that were looked at, and three of the fifteen
    assert said["actions"] == {"kill api": 6, "kill worker": 14}
    assert said["jobs"] == {"accepted": 24} and said["seconds"] == 240.0
    assert said["recovery_s"] == {"measured": 2, "median": 15.0, "longest": 15.0}
    assert list(tmp_path.iterdir()) == [path]
    assert Result.read(path).num_wanted - Result.read(path).num_checked == 0


def test_what_one_sitting_has_found_stays(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    Result(7, 20).write(path, sitting(5, 5, findings=("a job was lost",)), is_over=True)
    second = Result.read(path)
    second.write(path, sitting(15, 15), is_over=True)
    assert json.loads(path.read_text())["findings"] == second.findings == ["a job was lost"]


@pytest.mark.parametrize("content", [None, "{", '{"seed": 1, "num_actions": 117}'])
def test_another_file_is_not_gone_on_with(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "campaign.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(NotResumable):
        Result.read(path)
