"""The embedded language model, converted once and kept between runs of the tests."""

from pathlib import Path

import pytest

from llm.checkpoints.embedded import NAME, ensure_embedded


@pytest.fixture(scope="session")
def embedded_model(pytestconfig: pytest.Config) -> Path:
    """Folder of the embedded model."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("models") / NAME
    ensure_embedded(folder)
    return folder
