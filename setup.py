"""Packages of the wheel: those of the flat tree by discovery, and assets/ under the name media_server_assets.

pyproject.toml can express either of the two, not both; everything else is there.
"""

from setuptools import find_packages, setup

TOP_LEVEL = ("media_server", "workers", "llm", "video", "kernels")

setup(
    packages=[
        *find_packages(include=[pattern for name in TOP_LEVEL for pattern in (name, f"{name}.*")]),
        "media_server_assets",
    ],
    package_dir={"media_server_assets": "assets"},
)
