"""What `gpu_check` runs of the row-wise ops: Wan's sizes and a decoding batch's, beside torch's own ways."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gelu import gelu_reference, gelu_triton
from kernels.gpu_case import Case, Inputs, randn
from kernels.head_rms_norm import head_rms_norm_reference, head_rms_norm_triton
from kernels.kv_store import kv_store_triton
from kernels.layer_norm_modulate import (
    layer_norm_modulate_reference,
    layer_norm_modulate_torch,
    layer_norm_modulate_triton,
)
from kernels.rms_norm import rms_norm_reference, rms_norm_triton
from kernels.rotary import rotary_triton
from kernels.rotary_torch import axis_channels, rotary_3d_tables, rotary_reference, rotary_torch
from kernels.silu_mul import silu_mul_reference, silu_mul_triton
from kernels.tile_order import num_slots, tile_order_reference, tile_order_torch, tile_order_triton

WAN_480P_GRID, WAN_HEADS, WAN_WIDTH = (21, 30, 52), 12, 1536
SAMPLED_ROWS = 512


def rotary_3d_case(name: str, grid: tuple[int, int, int], heads: int, head_dim: int) -> Case:
    """Check Wan's rotation over a grid of frames, rows and columns in its first and last frame."""
    n = math.prod(grid)
    _, height, width = grid
    # whole frames are compared, at both ends
    first, last = (0, 0, 0), (grid[0] - 1, 0, 0)

    def make(device: torch.device, filled: bool) -> Inputs:
        cos, sin = rotary_3d_tables(head_dim, max(grid), device=device)
        return {"x": randn(1, n, heads, head_dim, device=device, filled=filled), "cos": cos, "sin": sin}

    def sample(x: Inputs, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, : height * width], out[:, -height * width :]], 1)

    def reference(x: Inputs) -> torch.Tensor:
        return torch.cat([rotary_reference(part.double(), x["cos"], x["sin"], interleaved=True,
                                           grid=(1, height, width), origin=origin)
                          for part, origin in ((x["x"][:, : height * width], first),
                                               (x["x"][:, -height * width :], last))], 1)

    def torch_complex(x: Inputs) -> torch.Tensor:
        cos, sin = (torch.cat([part[:size].reshape(*(size if i == axis else 1 for i in range(3)), -1).expand(*grid, -1)
                               for axis, (part, size) in enumerate(zip(table.split(axis_channels(head_dim), 1), grid,
                                                                       strict=True))], -1).flatten(0, 2)
                    for table in (x["cos"], x["sin"]))
        return rotary_torch(x["x"], cos, sin, positions=None, interleaved=True, out=None)

    return Case(
        name, f"N{n} H{heads} D{head_dim}", make,
        lambda x, c: rotary_triton(x["x"], x["cos"], x["sin"], positions=None, interleaved=True, out=None, grid=grid),
        (None,), reference, sample, {"complex product": torch_complex}, 0.0, 4.0 * n * heads * head_dim)


def rotary_case(name: str, n: int, heads: int, head_dim: int) -> Case:
    """Check the rotation of halves by gathered positions."""
    def make(device: torch.device, filled: bool) -> Inputs:
        angles = torch.rand(8192, head_dim // 2, device=device) * 6
        positions = torch.randint(0, 8192, (1, n), device=device)
        return {"x": randn(1, n, heads, head_dim, device=device, filled=filled), "cos": angles.cos(),
                "sin": angles.sin(), "positions": positions}

    return Case(
        name, f"N{n} H{heads} D{head_dim}, halves by position", make,
        lambda x, c: rotary_triton(x["x"], x["cos"], x["sin"], positions=x["positions"], interleaved=False, out=None),
        (None,),
        lambda x: rotary_reference(x["x"][:, :SAMPLED_ROWS].double(), x["cos"], x["sin"],
                                   positions=x["positions"][:, :SAMPLED_ROWS]),
        lambda x, out: out[:, :SAMPLED_ROWS],
        {"torch": lambda x: rotary_torch(x["x"], x["cos"], x["sin"], positions=x["positions"], interleaved=False,
                                         out=None)},
        0.0, 4.0 * n * heads * head_dim)


def kv_store_case(name: str, n: int, kv_heads: int, head_dim: int, fp8: bool) -> Case:
    """Check what lies in the cache after scattered writes, in bf16 or with FP8 scales."""
    page = 64
    pages = -(-n // page) * 2

    def make(device: torch.device, filled: bool) -> Inputs:
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        # peers have caches of their own: what they wrote must not pass for ours
        caches, others = ([torch.zeros(pages, page, kv_heads, head_dim, device=device).to(dtype) for _ in range(2)]
                          for _ in range(2))
        return {"k": randn(n, kv_heads, head_dim, device=device, filled=filled),
                "v": randn(n, kv_heads, head_dim, device=device, filled=filled), "caches": caches, "others": others,
                "slots": torch.randperm(pages * page, device=device)[:n],
                "scale": torch.full((), 0.02, device=device) if fp8 else None}

    def launch(x: Inputs, c: Any) -> torch.Tensor:
        k_cache, v_cache = x["caches"]
        kv_store_triton(x["k"], x["v"], k_cache, v_cache, x["slots"], k_scale=x["scale"], v_scale=x["scale"])
        return stored(x, x["caches"])

    def stored(x: Inputs, caches: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.stack([cache.view(torch.uint8).view(-1, kv_heads, head_dim * cache.element_size())[x["slots"]]
                            for cache in caches])
        return rows.view(caches[0].dtype).float()

    def reference(x: Inputs) -> torch.Tensor:
        wide = torch.stack([x["k"], x["v"]]).float()
        if fp8:
            wide = (wide / x["scale"]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return wide.double()

    def index_put(x: Inputs) -> torch.Tensor:
        for rows, cache in zip((x["k"], x["v"]), x["others"], strict=True):
            cache.view(-1, kv_heads, head_dim)[x["slots"]] = rows
        return stored(x, x["others"])

    return Case(name, f"N{n} H{kv_heads} D{head_dim} page {page}{' float8' if fp8 else ''}, gathered again", make,
                launch, (None,), reference, lambda x, out: out, {} if fp8 else {"index_put": index_put}, 0.0,
                2.0 * n * kv_heads * head_dim * (3 if fp8 else 4), is_exact=True)


def layer_norm_case(name: str, n: int, width: int) -> Case:
    """Check the gated residual, norm, scale and shift of Wan's block in one pass."""
    def make(device: torch.device, filled: bool) -> Inputs:
        x, branch = (randn(1, n, width, device=device, filled=filled) for _ in range(2))
        gate, scale, shift = torch.randn(1, 3, 1, width, device=device).unbind(1)
        return {"parts": (x, branch, gate, scale, shift, None, None)}

    def reference(x: Inputs) -> torch.Tensor:
        rows, branch, *rest = x["parts"]
        # the sum is rounded before it is normalised
        total = layer_norm_modulate_reference(rows[:, :SAMPLED_ROWS], branch[:, :SAMPLED_ROWS], *rest, eps=1e-6)[1]
        wide = [None if part is None else part.double() for part in rest[1:]]
        return layer_norm_modulate_reference(total.double(), None, None, *wide[:4], eps=1e-6)[0]

    return Case(
        name, f"{n} x {width}, gated residual", make, lambda x, c: layer_norm_modulate_triton(*x["parts"], eps=1e-6),
        (None,), reference, lambda x, out: out[0][:, :SAMPLED_ROWS],
        {"torch": lambda x: layer_norm_modulate_torch(*x["parts"], eps=1e-6)}, 0.0, 2.0 * 4 * n * width)


def silu_mul_case(name: str, n: int, width: int) -> Case:
    """Check the gated activation on halves of one tensor."""
    return Case(
        name, f"{n} x {width}", lambda device, filled: {"x": randn(n, 2 * width, device=device, filled=filled)},
        lambda x, c: silu_mul_triton(*x["x"].chunk(2, -1)), (None,),
        lambda x: silu_mul_reference(*x["x"][:SAMPLED_ROWS].double().chunk(2, -1)),
        lambda x, out: out[:SAMPLED_ROWS],
        {"silu, product": lambda x: F.silu(x["x"].chunk(2, -1)[0]) * x["x"].chunk(2, -1)[1]}, 0.0, 6.0 * n * width)


def gelu_case(name: str, n: int, width: int) -> Case:
    """Check the tanh approximation, which Wan's feed-forward takes."""
    return Case(
        name, f"{n} x {width} tanh", lambda device, filled: {"x": randn(n, width, device=device, filled=filled)},
        lambda x, c: gelu_triton(x["x"], "tanh"), (None,),
        lambda x: gelu_reference(x["x"][:SAMPLED_ROWS].double(), "tanh"),
        lambda x, out: out[:SAMPLED_ROWS], {"F.gelu": lambda x: F.gelu(x["x"], approximate="tanh")}, 0.0,
        4.0 * n * width)


def head_norm_case(name: str, n: int, heads: int, head_dim: int, joint: bool) -> Case:
    """Check the norm over a head, or over all heads together, of queries inside a joined projection."""
    shape = (heads, head_dim) if joint else (head_dim,)

    def make(device: torch.device, filled: bool) -> Inputs:
        qkv = randn(1, n, 3, heads, head_dim, device=device, filled=filled)
        return {"x": qkv[:, :, 0], "weight": randn(*shape, device=device, filled=filled)}

    return Case(
        name, f"N{n} H{heads} D{head_dim} {'over heads' if joint else 'by head'}", make,
        lambda x, c: head_rms_norm_triton(x["x"], x["weight"], 1e-6), (None,),
        lambda x: head_rms_norm_reference(x["x"][:, :SAMPLED_ROWS].double(), x["weight"].double()),
        lambda x, out: out[:, :SAMPLED_ROWS],
        {"F.rms_norm": lambda x: F.rms_norm(x["x"], shape, x["weight"], 1e-6)}, 0.0, 4.0 * n * heads * head_dim)


def tile_case(name: str, grid: tuple[int, int, int], tile: tuple[int, int, int], heads: int, head_dim: int) -> Case:
    """Check the order of 3-D tiles to the last bit."""
    return Case(
        name, f"{grid} by {tile} H{heads} D{head_dim}",
        lambda device, filled: {"x": randn(1, heads, math.prod(grid), head_dim, device=device, filled=filled)},
        lambda x, c: tile_order_triton(x["x"], grid, tile, inverse=False), (None,),
        lambda x: tile_order_reference(x["x"][:, :1], grid, tile).double(), lambda x, out: out[:, :1],
        {"index_select": lambda x: tile_order_torch(x["x"], grid, tile)}, 0.0,
        2.0 * heads * head_dim * (math.prod(grid) + num_slots(grid, tile)), is_exact=True)


def norm_case(name: str, rows: int, width: int) -> Case:
    """Check RMS norm without a residual."""
    def make(device: torch.device, filled: bool) -> Inputs:
        return {"x": randn(rows, width, device=device, filled=filled),
                "weight": randn(width, device=device, filled=filled)}

    return Case(
        name, f"{rows} x {width}", make, lambda x, c: rms_norm_triton(x["x"], x["weight"], None, 1e-6)[0], (None,),
        lambda x: rms_norm_reference(x["x"][:512].double(), x["weight"].double(), None, 1e-6)[0],
        lambda x, out: out[:512], {"F.rms_norm": lambda x: F.rms_norm(x["x"], (width,), x["weight"], 1e-6)},
        0.0, 4.0 * rows * width)


ROW_CASES: tuple[Case, ...] = (
    norm_case("RMS norm 32760x1536", math.prod(WAN_480P_GRID), WAN_WIDTH),
    norm_case("RMS norm 32760x4096", math.prod(WAN_480P_GRID), 4096),
    rotary_3d_case("rotary Wan 480p", WAN_480P_GRID, WAN_HEADS, 128),
    layer_norm_case("modulated norm 32760x1536", math.prod(WAN_480P_GRID), WAN_WIDTH),
    head_norm_case("norm over heads, Wan", math.prod(WAN_480P_GRID), WAN_HEADS, 128, True),
    head_norm_case("norm by head 8192", 8192, 32, 128, False),
    gelu_case("GELU 32760x8960", math.prod(WAN_480P_GRID), 8960),
    silu_mul_case("silu_mul 8192x14336", 8192, 14336),
    tile_case("tile order Wan 480p", WAN_480P_GRID, (4, 4, 8), WAN_HEADS, 128),
    rotary_case("rotary 8192", 8192, 32, 128),
    kv_store_case("kv_store 8192", 8192, 8, 128, False),
    kv_store_case("kv_store 8192 float8", 8192, 8, 128, True),
)
