"""The choice of launches and of options by time, made once a card and shape and kept in a file.

A `Tuner` sweeps an op's configurations on the card at hand, keeps the fastest with everything needed to doubt it (card,
versions, date, the whole sweep, the gain over the shipped launch) and afterwards answers from the file. Options that
compress or decode (FP8 keys and values, NVFP4) are timed the same way and stay off where they lose.
Nothing is swept but in mode SWEEP: SHIPPED gives the same launches everywhere, CACHED those of a given file, so both
are deterministic. Times come from a timer that is passed in. A sweep compares no results: `gpu_check` does that.
"""

import contextlib
import dataclasses
import datetime
import enum
import fcntl
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernels.dispatch import HAS_TRITON, require, triton
from kernels.shipped_configs import Shipped, shipped_config

logger = logging.getLogger(__name__)

SCHEMA = 1
# an option that compresses must win by more than times differ between runs
OPTION_MIN_GAIN = 1.03
Timer = Callable[[Callable[[], Any]], float]


C = TypeVar("C")  # a dataclass


class Mode(enum.Enum):
    """Say where launches come from."""

    SHIPPED = "shipped"
    CACHED = "cached"
    SWEEP = "sweep"


@dataclasses.dataclass(frozen=True)
class Card:
    """Name the card and what runs on it: what was measured under another of these is not used."""

    name: str
    arch: int
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold a choice and where it is from: "swept", "cached", "shipped, untuned" or "shipped, tuned on CARD"."""

    value: Any
    source: str
    gain: float | None = None


def this_card(device: torch.device) -> Card:
    """Describe a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    versions = {"torch": torch.__version__, "triton": triton.__version__ if HAS_TRITON else "none",
                "cuda": str(torch.version.cuda)}
    return Card(torch.cuda.get_device_name(device), 10 * major + minor, versions)


def time_on_card(run: Callable[[], Any]) -> float:
    """Return the median time of run() on the current CUDA device, in microseconds."""
    import triton.testing

    return 1e3 * float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def bucket(shape: Mapping[str, int]) -> str:
    """Name the bucket of a shape: every size rounded up to a power of two, names in order."""
    return ",".join(f"{name}={triton.next_power_of_2(size) if size > 0 else 0}"
                    for name, size in sorted(shape.items()))


class Tuner:
    """Choose launches and options for one card, from its file, by sweeps or as shipped.

    path: the JSON file, made where missing; None keeps choices in memory only. timer: microseconds of a call.
    today: the date to record.
    """

    def __init__(
        self, card: Card, timer: Timer, path: Path | None, *, mode: Mode = Mode.CACHED,
        today: Callable[[], datetime.date] = datetime.date.today,
    ) -> None:
        self.card = card
        self.mode = mode
        self._timer = timer
        self._path = path
        self._today = today
        self._entries: dict[str, Any] = {} if path is None else _read(path)

    def choose(
        self, op: str, shape: Mapping[str, int], configs: Sequence[C], run: Callable[[C], Any], default: C,
        *, dtype: str = "",
    ) -> Choice:
        """Choose a launch for op at a shape.

        shape: sizes by name, tuned by bucket. configs: dataclass instances to sweep, besides the default. run(config)
        launches once. default: what is taken where nothing was tuned or shipped. dtype: types that matter ("bf16").
        Raises RuntimeError if in a sweep no configuration runs.
        """
        kind = type(default)
        key = self._key(op, shape, dtype)
        shipped = self._shipped(op, shape, dtype, kind, default)
        if self.mode is Mode.SHIPPED:
            return shipped
        entry = self._entry(key)
        if entry is not None:
            config = _from_dict(kind, entry["config"])
            if config is not None:
                return Choice(config, "cached", entry["gain"])
        if self.mode is Mode.CACHED:
            return shipped
        candidates = [shipped.value, *(c for c in configs if c != shipped.value)]
        sweep = self._sweep([(_as_dict(c), c, run) for c in candidates])
        best = min((row for row in sweep if "us" in row), key=lambda row: row["us"], default=None)
        if best is None:
            raise RuntimeError(f"{op} at {bucket(shape)}: no configuration runs on {self.card.name}: "
                               f"{sweep[0].get('failed')}")
        gain = sweep[0]["us"] / best["us"] if "us" in sweep[0] else None
        self._keep(key, {"config": best["config"], "us": best["us"], "gain": gain, "sweep": sweep})
        return Choice(_from_dict(kind, best["config"]), "swept", gain)

    def choose_option(
        self, option: str, shape: Mapping[str, int], without: Callable[[], Any], with_option: Callable[[], Any],
    ) -> Choice:
        """Say whether an option that compresses or decodes pays at a shape: a Choice of bool, off where it loses.

        Off too where nothing is known, in mode SHIPPED, or where it does not run.
        """
        key = self._key(f"option:{option}", shape, "")
        if self.mode is Mode.SHIPPED:
            return Choice(False, "shipped, untuned")
        entry = self._entry(key)
        if entry is not None and isinstance(entry["config"], bool):
            return Choice(entry["config"], "cached", entry["gain"])
        if self.mode is Mode.CACHED:
            return Choice(False, "shipped, untuned")
        sweep = self._sweep([(False, None, lambda _: without()), (True, None, lambda _: with_option())])
        if "us" not in sweep[0]:
            raise RuntimeError(f"{option} at {bucket(shape)}: without it nothing runs: {sweep[0]['failed']}")
        gain = sweep[0]["us"] / sweep[1]["us"] if "us" in sweep[1] else None
        is_on = gain is not None and gain >= OPTION_MIN_GAIN
        self._keep(key, {"config": is_on, "us": sweep[int(is_on)]["us"], "gain": gain, "sweep": sweep})
        return Choice(is_on, "swept", gain)

    def _shipped(self, op: str, shape: Mapping[str, int], dtype: str, kind: type[C], default: C) -> Choice:
        shipped: Shipped | None = shipped_config(op, self.card.arch, shape, dtype)
        config = None if shipped is None else _from_dict(kind, shipped.config)
        if shipped is None or config is None:
            return Choice(default, "shipped, untuned")
        return Choice(config, shipped.label)

    def _sweep(self, rows: Sequence[tuple[Any, Any, Callable[[Any], Any]]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for described, config, run in rows:
            row: dict[str, Any] = {"config": described}
            try:
                # the median of three, each with everything compiled: one hiccup decides nothing
                run(config)
                row["us"] = statistics.median(self._timer(lambda run=run, config=config: run(config))  # type: ignore[misc]
                                              for _ in range(3))
            except Exception as error:
                # whatever Triton, ptxas or the driver raise for a launch that the card refuses
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
                logger.info("autotune on %s: %s failed: %s", self.card.name, described, row["failed"])
            results.append(row)
        return results

    def _key(self, op: str, shape: Mapping[str, int], dtype: str) -> str:
        return f"{self.card.name}|{op}|{dtype}|{bucket(shape)}"

    def _entry(self, key: str) -> Any:
        entry: Any = self._entries.get(key)
        return entry if _is_entry(entry) and entry["versions"] == dict(self.card.versions) else None

    def _keep(self, key: str, entry: dict[str, Any]) -> None:
        entry = {**entry, "card": self.card.name, "arch": self.card.arch,
                 "versions": dict(self.card.versions), "date": self._today().isoformat()}
        self._entries[key] = entry
        logger.info("autotune: %s: %s at %.1f us, gain %s", key, entry["config"], entry["us"], entry["gain"])
        if self._path is None:
            return
        with _locked(self._path):
            # what other processes have kept meanwhile stays
            self._entries = {**_read(self._path), key: entry}
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
            new.write_text(json.dumps({"schema": SCHEMA, "entries": self._entries}, indent=1, sort_keys=True))
            new.replace(self._path)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and {"config", "gain", "versions"} <= set(entry)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        logger.warning("autotune: %s is no JSON (%s): swept anew", path, error)
        return {}
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("entries"), dict):
        logger.warning("autotune: %s is of another schema: swept anew", path)
        return {}
    return dict(data["entries"])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _as_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def _from_dict(kind: type[Any], values: Any) -> Any:
    """Build a configuration, or None where the file's is of an earlier shape."""
    if not isinstance(values, dict) or set(values) != {f.name for f in dataclasses.fields(kind)}:
        return None
    return kind(**values)


def require_mode(name: str) -> Mode:
    """Return the mode of that name; ValueError otherwise."""
    names = [mode.value for mode in Mode]
    require(name in names, "autotune", f"mode must be one of {names}", name)
    return Mode(name)
