"""A built wheel, installed in another environment and run from another folder: nothing is left in the checkout."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert tiny.is_relative_to(elsewhere) and tiny.is_dir() == (ROOT / "assets" / "tiny_wan").is_dir()
    code = (
        "import media_server.jobs.database as d, sys, workers, llm, kernels, importlib.util\n"
        "db = d.open_database('sqlite:///here.db'); d.migrate(db); db.read().__enter__()\n"
        "print(d.__file__, importlib.util.find_spec('video').origin)"
    )
    for place in run(str(elsewhere / "venv" / "bin" / "python"), "-P", "-c", code, cwd=work).split():
        assert Path(place).is_relative_to(elsewhere / "venv")
