"""What holds for all tests: runtime folders of services lie in one folder that goes away with the run."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # pytest keeps the folders of failed tests: it chooses their place before it is moved
    tmp_path_factory.getbasetemp()
    # short, since the path of a socket is
    folder = tempfile.mkdtemp(prefix="mst-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)
