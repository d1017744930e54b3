"""The order of tokens by 3-D tiles: a block of the sequence is a neighbourhood of the clip (VSA, arXiv 2505.13389).

Tiles follow one another in raster order, the tokens of a tile too. Each tile takes f · h · w slots; a tile at the edge
of the grid holds its real tokens first and zeros after them, `tile_lengths` says how many are real.
The order is taken once a forward, of the hidden states before the first block and back behind the last, and every
layer's q, k and v lie in it already. Attention does not read through the map instead, since that cannot pay: at its
floor (`roofline`) the way there and back takes 0.65 ms of 2.42 s for Wan 14B at 720p on an H200, 0.08 ms of 108 ms for
Wan 1.3B at 480p, less than a thousandth of a forward, and no fused load could save more. A copy of q, k, v and output
in each layer, which it would save, costs 52 ms and 5.0 ms (2 and 5 %): it is what nobody should do.
"""

import functools
import math

import torch

from kernels.dispatch import refuse_gradients, require, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 8192


def tile_order(x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Bring raster order into tile order.

    x: `[B, H, N, D]` fp16, bf16 or fp32, N = F·H·W, any strides but the last. grid: F, H, W in tokens. tile: f, h, w.
    Returns `[B, H, tiles · f·h·w, D]`, zeros where a tile has no token. Raises ValueError for what does not fit.
    """
    _validate("tile_order", x, grid, tile)
    if uses_triton(x):
        return tile_order_triton(x, grid, tile, inverse=False)
    return tile_order_torch(x, grid, tile)


def untile_order(x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Bring tile order back into raster order: `[B, H, tiles · f·h·w, D]` to `[B, H, N, D]`."""
    _validate("untile_order", x, grid, tile)
    if uses_triton(x):
        return tile_order_triton(x, grid, tile, inverse=True)
    return untile_order_torch(x, grid, tile)


def num_slots(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> int:
    """Return the length of the tiled sequence, padding included."""
    return math.prod(-(-size // step) * step for size, step in zip(grid, tile, strict=True))


def tile_lengths(
    grid: tuple[int, int, int], tile: tuple[int, int, int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return how many real tokens each tile holds, `[tiles]` int32."""
    return _maps(tuple(grid), tuple(tile), torch.device(device))[2]


def tile_index(
    grid: tuple[int, int, int], tile: tuple[int, int, int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the raster index of each slot, `[tiles · f·h·w]` int64, -1 where there is no token."""
    return _maps(tuple(grid), tuple(tile), torch.device(device))[0]


@functools.lru_cache(maxsize=32)
def _maps(
    grid: tuple[int, ...], tile: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the raster index of each slot, the slot of each raster index, and the tiles' lengths."""
    axes = [torch.arange(size, device=device) for size in grid]
    tiles = [triton.cdiv(size, step) for size, step in zip(grid, tile, strict=True)]
    f, h, w = torch.meshgrid(*axes, indexing="ij")
    coordinates = (f.flatten(), h.flatten(), w.flatten())
    number = torch.zeros_like(coordinates[0])
    place = torch.zeros_like(number)
    for x, size, step, count in zip(coordinates, grid, tile, tiles, strict=True):
        number = number * count + x // step
        place = place * (size - x // step * step).clamp(max=step) + x % step
    slots = number * math.prod(tile) + place
    index = torch.full((math.prod(tiles) * math.prod(tile),), -1, device=device)
    index[slots] = torch.arange(len(slots), device=device)
    lengths = torch.bincount(number, minlength=math.prod(tiles)).to(torch.int32)
    return index, slots, lengths


@triton.jit
def _tile_order_kernel(
    x, y, stride_xb, stride_xh, stride_xn, stride_yb, stride_yh, stride_yn, num_heads, slots, frames, height, width,
    TILE_F: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, INVERSE: tl.constexpr,
):
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    tile = offs // (TILE_F * TILE_H * TILE_W)
    place = offs % (TILE_F * TILE_H * TILE_W)
    tiles_h = tl.cdiv(height, TILE_H)
    tiles_w = tl.cdiv(width, TILE_W)
    first_f = tile // (tiles_h * tiles_w) * TILE_F
    first_h = tile // tiles_w % tiles_h * TILE_H
    first_w = tile % tiles_w * TILE_W
    # an edge tile counts its own, smaller extents; slots beyond the last tile count ones that divide
    extent_f = tl.maximum(tl.minimum(frames - first_f, TILE_F), 1)
    extent_h = tl.minimum(height - first_h, TILE_H)
    extent_w = tl.minimum(width - first_w, TILE_W)
    is_slot = offs < slots
    is_token = is_slot & (place < extent_f * extent_h * extent_w)
    raster = ((first_f + place // (extent_h * extent_w)) * height + first_h + place // extent_w % extent_h) * width
    raster += first_w + place % extent_w
    raster = raster.to(tl.int64)
    offs = offs.to(tl.int64)
    is_column = (columns < WIDTH)[None, :]
    base_x = x + batch * stride_xb + head * stride_xh
    base_y = y + batch * stride_yb + head * stride_yh
    if INVERSE:
        rows = tl.load(base_x + offs[:, None] * stride_xn + columns[None, :], mask=is_token[:, None] & is_column,
                       other=0.0)
        tl.store(base_y + raster[:, None] * stride_yn + columns[None, :], rows, mask=is_token[:, None] & is_column)
    else:
        rows = tl.load(base_x + raster[:, None] * stride_xn + columns[None, :], mask=is_token[:, None] & is_column,
                       other=0.0)
        tl.store(base_y + offs[:, None] * stride_yn + columns[None, :], rows, mask=is_slot[:, None] & is_column)


def tile_order_triton(
    x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int], *, inverse: bool
) -> torch.Tensor:
    """Launch the kernel on validated arguments, in either direction; it computes the order, no map is read."""
    refuse_gradients("tile_order", x)
    batch, num_heads, _, head_dim = x.shape
    slots = num_slots(grid, tile)
    y = torch.empty(batch, num_heads, math.prod(grid) if inverse else slots, head_dim, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block_d = triton.next_power_of_2(head_dim)
    block_n = max(1, min(64, 8192 // block_d))
    _tile_order_kernel[(triton.cdiv(slots, block_n), batch * num_heads)](
        x, y, *x.stride()[:3], *y.stride()[:3], num_heads, slots, *grid,
        TILE_F=tile[0], TILE_H=tile[1], TILE_W=tile[2], WIDTH=head_dim, BLOCK_D=block_d, BLOCK_N=block_n,
        INVERSE=inverse, num_warps=4)
    return y


def tile_order_torch(x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Copy rows by the map, which is kept."""
    index = _maps(tuple(grid), tuple(tile), x.device)[0]
    if len(index) == math.prod(grid):
        return x.index_select(2, index)
    slots = _maps(tuple(grid), tuple(tile), x.device)[1]
    return x.new_zeros(*x.shape[:2], len(index), x.shape[3]).index_copy(2, slots, x)


def untile_order_torch(x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Gather rows by the inverse map."""
    return x.index_select(2, _maps(tuple(grid), tuple(tile), x.device)[1])


def tile_order_reference(x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """Compute `tile_order` by cutting the clip, a tile at a time."""
    clip = x.unflatten(2, grid)
    (f, h, w), size = tile, math.prod(tile)
    tiles = [clip[:, :, a : a + f, b : b + h, c : c + w].flatten(2, 4)
             for a in range(0, grid[0], f) for b in range(0, grid[1], h) for c in range(0, grid[2], w)]
    return torch.cat([torch.cat([part, part.new_zeros(*part.shape[:2], size - part.shape[2], part.shape[3])], 2)
                      for part in tiles], 2)


def _validate(op: str, x: torch.Tensor, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> None:
    for name, sizes in (("grid", grid), ("tile", tile)):
        require(len(sizes) == 3 and min(sizes) >= 1, op, f"{name} must be three sizes of at least 1", tuple(sizes))
    tokens = math.prod(grid) if op == "tile_order" else num_slots(grid, tile)
    require(x.ndim == 4 and x.shape[2] == tokens and 1 <= x.shape[3] <= MAX_HEAD_DIM, op,
            f"x must be [B, H, {tokens}, D] with D in 1..{MAX_HEAD_DIM} for grid {tuple(grid)} and tile {tuple(tile)}",
            list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(x.stride(-1) == 1 or x.shape[3] == 1, op, "x's last stride must be 1", x.stride())
