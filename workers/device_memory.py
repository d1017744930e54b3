"""What a model's process holds of its device's memory, as it writes it beside its card for /metrics."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


def device_memory(device: Any) -> dict[str, float]:
    """Give bytes held now, the most that were held since the last reset, and what the device has.

    On a GPU these are its allocator's; on a CPU those of this process. `device` is a torch.device, which is not
    imported before it is used.
    """
    if device.type == "cuda":
        import torch

        return {
            "memory_bytes": float(torch.cuda.memory_allocated(device)),
            "memory_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory_total_bytes": float(torch.cuda.get_device_properties(device).total_memory),
        }
    found = {"memory_total_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                key = "memory_bytes" if name == "VmRSS" else "memory_peak_bytes"
                found[key] = float(rest.split()[0]) * 1024
        return found
    # macOS counts bytes, other systems kilobytes, and neither says what is held now
    unit = 1 if sys.platform == "darwin" else 1024
    return {**found, "memory_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
