"""What one case of `compile_check` is made of: a launch on tensors without contents, and the kinds expected by card."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.quantization.nvfp4 import NVFP4Tensor

ARCHS = (90, 100, 120)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Kinds = Sequence[frozenset[str]]


@dataclass(frozen=True)
class CompileCase:
    """Hold one launch, `launch(arch)`, and the kinds of each kernel that it compiles, by card; others are left out.

    is_tested: `make test` compiles it too, not the whole table's target alone.
    """

    name: str
    launch: Callable[[int], object]
    expected: Mapping[int, Kinds]
    is_tested: bool = True


def kinds(*names: str) -> frozenset[str]:
    """Return the instruction kinds of one kernel."""
    return frozenset(names)


def tiles(loads: str) -> dict[int, Kinds]:
    """Return what a kernel of large tiles has by card: the card's own products, and loads by "tma" or "cp.async"."""
    return {90: [kinds("wgmma", loads)], 100: [kinds("tcgen05", loads)], 120: [kinds("mma", loads)]}


def by_width(d: int) -> dict[int, Kinds]:
    """Tensor memory access, but on sm_120 at D 256, where it costs a stack."""
    return tiles("tma") | ({120: [DECODE]} if d > 128 else {})


def everywhere(*kernels: frozenset[str]) -> dict[int, Kinds]:
    """Return the same kinds for every card."""
    return dict.fromkeys(ARCHS, kernels)


def half(*shape: int) -> torch.Tensor:
    """Return bf16 without contents."""
    return torch.empty(shape, dtype=BF16)


def nvfp4_weight() -> NVFP4Tensor:
    """Return a `[512, 512]` weight without contents."""
    return NVFP4Tensor(torch.empty(512, 256, dtype=torch.uint8), torch.empty(512, 32).to(FP8), torch.ones(()))


DECODE = kinds("mma", "cp.async")
NOTHING = kinds()
# sm_90 has no products of codes
NATIVE: dict[int, Kinds] = {100: [NOTHING, kinds("tcgen05", "nvfp4", "cp.async")],
                            120: [NOTHING, kinds("mma", "nvfp4", "cp.async")]}
