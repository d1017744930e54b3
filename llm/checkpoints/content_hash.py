"""Name a checkpoint's folder by what lies in it.

Invariant: two folders have one name if, and only if, the files that decide what a model reads and writes are equal.
"""

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

_WEIGHTS = ".safetensors"
_SMALL = (".json", ".jinja", ".model", ".txt")
# says who made the model, not what it does
_NOT_HASHED = ("card.json",)


def hash_folder(folder: Path, cache: Path | None = None) -> str:
    """Hash weights, configurations, tokenizer and chat template; not the card.

    Args:
        folder: a transformers folder.
        cache: file that remembers the hashes of weights by path, size and time; None: read them all.

    Returns:
        "sha256:" and 64 hex digits: the hash over one line "name, tab, sha256 of the file" for each file, in the order
        of the names.
    """
    known = _read_cache(cache)
    is_new = False
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (_WEIGHTS, *_SMALL) or path.name in _NOT_HASHED or not path.is_file():
            continue
        about = path.stat()
        key = f"{path.resolve()}:{about.st_size}:{about.st_mtime_ns}"
        # small files are read each time: an edit that keeps size and time is seen too
        digest = known.get(key) if path.suffix == _WEIGHTS else None
        if digest is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if path.suffix == _WEIGHTS:
                known[key] = digest
                is_new = True
        total.update(f"{path.name}\t{digest}\n".encode())
    if cache is not None and is_new:
        _write_cache(cache, known)
    return f"sha256:{total.hexdigest()}"


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None or not cache.is_file():
        return {}
    try:
        return dict(json.loads(cache.read_text()))
    except (TypeError, ValueError):
        logger.warning("the cache of weight hashes is broken and is made anew")
        return {}


def _write_cache(cache: Path, known: dict[str, str]) -> None:
    """Replace the cache as a whole: another replica may be reading it."""
    fresh = cache.with_name(f"{cache.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(json.dumps(known))
        os.replace(fresh, cache)
    except OSError as error:
        # on a full disk they are hashed again at the next start
        logger.warning("the cache of weight hashes could not be written (errno %s)", error.errno)
        fresh.unlink(missing_ok=True)
