"""Which GPUs are ours, against CUDA's own rules on CUDA_VISIBLE_DEVICES."""

import os
import stat
from pathlib import Path

import pytest

from workers.gpus import find_gpus, machine_wide_name

UUIDS = ("GPU-11aa", "GPU-22bb", "GPU-23cc")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo {uuid}\n" for uuid in UUIDS))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, UUIDS),
        ("", ()),
        ("-1", ()),
        ("2,0", ("GPU-23cc", "GPU-11aa")),
        ("GPU-22,0", ("GPU-22bb", "GPU-11aa")),
        # the first that is none hides all after it, and so does one that could be two
        ("1,7,0", ("GPU-22bb",)),
        ("0,GPU-2", ("GPU-11aa",)),
    ],
)
@pytest.mark.usefixtures("driver")
def test_gpus_are_numbered_as_cuda_shows_them(
    visible: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == tuple(range(len(names)))
    assert tuple(machine_wide_name(index) for index in find_gpus()) == names


def test_without_a_driver_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
    assert machine_wide_name(3) == "3"
