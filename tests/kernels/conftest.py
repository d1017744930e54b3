"""Keep the interpreter apart: `pytest tests/kernels` and `pytest tests/kernels/interpreted` are two processes.

The first runs torch paths and compiles kernels for cards that are not there, the second interprets kernels; Triton
decides at its import which of the two a process can do.
"""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any("interpreted" in str(argument) for argument in config.args)
    return True if "interpreted" in collection_path.parts and not asked else None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
