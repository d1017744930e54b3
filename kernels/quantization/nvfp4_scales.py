"""The order in which Blackwell's tensor cores read block scales, and back.

`[M, K / 16]` scales are padded to whole tiles of 128 rows by 4 scales; a tile's 512 bytes lie together as 32 rows of
16: row r of the tile holds rows r, r + 32, r + 64, r + 96 with four scales each (cuBLAS's 1D block scaling layout).
"""

import torch
import torch.nn.functional as F

from kernels.dispatch import require

TILE_ROWS, TILE_SCALES = 128, 4


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Reorder row-major scales.

    scales: `[M, S]` one-byte elements. Returns `[ceil(M / 128), ceil(S / 4), 32, 4, 4]` contiguous in the same type,
    padded with zero bytes. Raises ValueError for another shape or element size.
    """
    require(scales.ndim == 2 and scales.element_size() == 1, "swizzle_scales", "scales must be [M, S] of one byte",
            (list(scales.shape), scales.dtype))
    m, s = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -s % TILE_SCALES, 0, -m % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_SCALES, TILE_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, num_rows: int, num_scales: int) -> torch.Tensor:
    """Undo `swizzle_scales`: row-major `[num_rows, num_scales]` without the padding."""
    tiles = (-(-num_rows // TILE_ROWS), -(-num_scales // TILE_SCALES), 32, 4, TILE_SCALES)
    require(swizzled.element_size() == 1 and swizzled.numel() == tiles[0] * tiles[1] * 512, "unswizzle_scales",
            f"scales must be {list(tiles)} of one byte for {num_rows} rows of {num_scales}",
            (list(swizzled.shape), swizzled.dtype))
    rows = swizzled.reshape(tiles).view(torch.uint8).permute(0, 3, 2, 1, 4)
    rows = rows.reshape(tiles[0] * TILE_ROWS, tiles[1] * TILE_SCALES)
    return rows[:num_rows, :num_scales].contiguous().view(swizzled.dtype)
