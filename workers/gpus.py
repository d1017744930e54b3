"""This machine's NVIDIA GPUs: as CUDA numbers them for us, and by names that hold for every program on the machine.

Sources: CUDA's programming guide on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; `nvidia-smi --help-query-gpu`.
Invariant: nvidia-smi lists by bus, and `child_environment` has CUDA number by bus too.
"""

import subprocess
from collections.abc import Sequence

from media_server.settings import visible_gpus


def find_gpus() -> tuple[int, ...]:
    """List the GPUs that CUDA shows to this process, as N of its `cuda:N`; none if there is no driver."""
    return tuple(range(len(_shown(_installed(), visible_gpus()))))


def machine_wide_name(index: int) -> str:
    """Give the UUID of `cuda:index`, or the index where no driver says it: what a lock for all services is named by."""
    shown = _shown(_installed(), visible_gpus())
    return shown[index] if index < len(shown) else str(index)


def _installed() -> list[str]:
    """List the UUIDs of this machine's GPUs by their bus."""
    query = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def _shown(installed: Sequence[str], visible: Sequence[str] | None) -> list[str]:
    """Choose as CUDA does: in the order given, by index or by the beginning of a UUID, up to the first that is none."""
    if visible is None:
        return list(installed)
    shown: list[str] = []
    for name in visible:
        if name.isdecimal():
            found = list(installed[int(name) : int(name) + 1])
        else:
            found = [uuid for uuid in installed if name and uuid.startswith(name)]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
    return shown
