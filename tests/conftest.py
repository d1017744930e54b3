"""What holds for all tests: folders of services go away with the run, and no example fails by a busy machine alone."""

import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# a core that is shared makes any example slow; a database of examples would make runs differ
settings.register_profile("tests", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_itemcollected(item: pytest.Item) -> None:
    # a file's tests share its fixtures: one process is to have them (--dist loadgroup), but for those marked spread;
    # xdist 3.8 does not see it under pytest 9.2
    if item.get_closest_marker("spread") is None:
        item.add_marker(pytest.mark.xdist_group(item.location[0]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests; spread tests fill up the end, so that no process is left waiting."""
    slow_files = {item.location[0] for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (item.get_closest_marker("spread") is not None, item.location[0] not in slow_files))


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


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    # every httpx client reads them when it is made, and tests make one for each question they ask over plain HTTP
    if "httpx" not in sys.modules:
        yield
        return
    import httpx

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield
