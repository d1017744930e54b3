"""Compile what a launch would compile, for a card that is not there, and read what became of it.

Inside `dry_launches(arch)` the launchers run on CPU tensors through Triton's own launcher: specialisation and options
are the real ones, kernels are compiled for `arch` and nothing runs. Not usable in a process that interprets kernels.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT_BYTES = {90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
TENSOR_COLUMNS_LIMIT = 512
INSTRUCTIONS = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"mma\.sync",
                "nvfp4": r"mma[^;]*mxf4nvf4", "tma": r"cp\.async\.bulk", "cp.async": r"cp\.async\.c[ag]"}


@dataclass(frozen=True)
class Compiled:
    """Say what one compiled kernel takes: registers a thread, stack (where spills lie), shared and tensor memory.

    instructions: the kinds of INSTRUCTIONS that its PTX has.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int
    num_warps: int
    instructions: tuple[str, ...]


class _Utils:
    def __init__(self, arch: int) -> None:
        self.arch = arch

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        return None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT_BYTES[self.arch], "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _DryDriver:
    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.utils = _Utils(arch)
        self.launcher_cls = _Launcher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # the key of compiled kernels: one card's are not another's

    def set_current_device(self, device: int) -> None:
        return None

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return divmod(self.arch, 10)


@contextlib.contextmanager
def dry_launches(arch: int) -> Iterator[list[Compiled]]:
    """Compile launches on CPU tensors for compute capability `arch` (90, 100, 103 or 120); yield the growing list."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Compiled] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        compiled.append(_inspect(self.fn.__name__, kernel))
        return kernel

    previous = driver._active  # its own reset demands a card
    driver.set_active(_DryDriver(arch))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = original
        driver._active = previous


def _inspect(name: str, kernel: Any) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(count) for key, count in re.findall(r"(REG|STACK):(\d+)", usage)}
    kinds = tuple(kind for kind, pattern in INSTRUCTIONS.items() if re.search(pattern, kernel.asm["ptx"]))
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    return Compiled(name, used["REG"], used["STACK"], kernel.metadata.shared, columns, kernel.metadata.num_warps, kinds)
