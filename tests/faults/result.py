"""A campaign's result: one JSON file, written as it goes, of one sitting or of several.

Invariants: an action counts once a look has been taken at what came of it; what a sitting that was broken off had done
since its last look is said, and counts for nothing. A file is replaced as a whole.
"""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

VERSION = 2
# between the seeds of two sittings
_STEP = 1_000_003


class NotResumable(Exception):
    """A file that says nothing of a campaign that could be gone on with."""


@dataclass
class Result:
    """What all sittings of a campaign have done; the present one is the last of `sittings` once it was written."""

    seed: int
    num_wanted: int
    sittings: list[dict[str, Any]] = field(default_factory=list)
    _is_present: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file to go on with. Raises NotResumable."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise NotResumable(f"{path} cannot be read: {error}") from error
        if found.get("v") != VERSION:
            raise NotResumable(f"{path} is of version {found.get('v')}, this is {VERSION}: begin another campaign")
        sittings = [
            {**sitting, "state": "broken off" if sitting["state"] == "running" else sitting["state"]}
            for sitting in found["sittings"]
        ]
        return cls(found["seed"], found["num_wanted"], sittings)

    @property
    def num_checked(self) -> int:
        """Actions that were looked at."""
        return sum(sitting["num_checked"] for sitting in self.sittings)

    @property
    def findings(self) -> list[str]:
        """Everything that was wrong, in any sitting."""
        return [finding for sitting in self.sittings for finding in sitting["findings"]]

    def next_seed(self) -> int:
        """Give the seed of the next sitting: none repeats another."""
        return self.seed + _STEP * len(self.sittings)

    def write(self, path: Path, sitting: dict[str, Any], *, is_over: bool = False) -> None:
        """Put the present sitting as it stands into the file."""
        began = self.sittings.pop()["began"] if self._is_present else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._is_present = True
        self.sittings.append({"state": "over" if is_over else "running", "began": began, **sitting})
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        os.replace(fresh, path)

    def to_json(self) -> dict[str, Any]:
        """Sum the sittings up, and give them one by one."""
        checked = [item for sitting in self.sittings for item in sitting["log"][: sitting["num_checked"]]]
        times = sorted(item["seconds"] for sitting in self.sittings for item in sitting["recoveries"])
        return {
            "v": VERSION,
            "seed": self.seed,
            "num_wanted": self.num_wanted,
            "num_checked": self.num_checked,
            "num_sittings": len(self.sittings),
            "num_broken_off": sum(sitting["state"] == "broken off" for sitting in self.sittings),
            "num_done_and_not_checked": sum(s["num_actions"] - s["num_checked"] for s in self.sittings),
            "seconds": round(sum(sitting["seconds"] for sitting in self.sittings), 1),
            "actions": dict(Counter(f"{item['action']} {item['target']}".strip() for item in checked)),
            "jobs": _sum(sitting["jobs"] for sitting in self.sittings),
            "failed_with": _sum(sitting["failed_with"] for sitting in self.sittings),
            "messages": _sum(sitting["messages"] for sitting in self.sittings),
            "recovery_s": {
                "measured": len(times),
                "median": times[len(times) // 2] if times else None,
                "longest": times[-1] if times else None,
            },
            "findings": self.findings,
            "sittings": self.sittings,
        }


def _sum(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
