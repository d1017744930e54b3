"""A short campaign; `make faults N=1000` runs a long one, whose result stands in results/."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults.sitting import Sitting

SEED = 20261130
# about a minute and a half, of which the last half waits for files that a lost worker might still write
NUM_ACTIONS = 10
# limits are for an idle machine; one that has other work is given more time, and waits for what happens
SLACK = 4.0


@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_a_short_campaign_loses_nothing(tmp_path: Path) -> None:
    sitting = Sitting(SEED, tmp_path, text_model=None, is_real=False, slack=SLACK)
    sitting.run(NUM_ACTIONS, None, lambda _: None)
    result = sitting.result()
    if sitting.findings:
        log = sitting.service.log.read_text(errors="replace").splitlines()
        sys.stderr.write("\n".join(log[-200:]))
    assert sitting.findings == [], json.dumps(result, indent=1)
    assert result["num_checked"] == result["num_actions"] == NUM_ACTIONS
    # something was done meanwhile
    assert result["jobs"]["accepted"] >= 3 and result["messages"]["taken"] >= 3
