"""The embedded language model, kept between runs of the tests for as long as its converter is the same."""

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
