"""Rotary position embedding in torch: the path of machines without Triton, the reference, Wan's tables, the checks."""

import torch

from kernels.dispatch import require, takes_gradients

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INT_TYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 1024


def axis_channels(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs of a head turn with frame, row and column: Wan gives the last two a third each, even."""
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def rotary_3d_tables(
    head_dim: int, length: int, *, theta: float = 10_000.0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin `[length, head_dim / 2]` fp32 of Wan's three axes, angles in fp64."""
    position = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    angles = torch.cat([position * theta ** (-torch.arange(n, dtype=torch.float64, device=device) / n)
                        for n in axis_channels(head_dim)], 1)
    return angles.cos().float(), angles.sin().float()


def rotary_torch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None,
    interleaved: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `rotary` with few passes: one complex product for neighbours, fused products for halves."""
    rows = _table_rows(x, cos, positions), _table_rows(x, sin, positions)
    half = cos.shape[-1]
    if interleaved:
        pairs = torch.view_as_complex(x[..., : 2 * half].float().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(*rows)).flatten(-2)
    else:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        if takes_gradients(x, cos, sin):
            turned = torch.cat([first * rows[0] - second * rows[1], second * rows[0] + first * rows[1]], -1)
        else:
            turned = torch.empty(*x.shape[:3], 2 * half, device=x.device)
            torch.mul(first, rows[0], out=turned[..., :half]).addcmul_(second, rows[1], value=-1)
            torch.mul(second, rows[0], out=turned[..., half:]).addcmul_(first, rows[1])
    if out is not None:
        out[..., : 2 * half] = turned
        if out.data_ptr() != x.data_ptr():
            out[..., 2 * half :] = x[..., 2 * half :]
        return out
    turned = turned.to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], -1)


def rotary_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    grid: tuple[int, int, int] | None = None,
    origin: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:
    """Compute `rotary`, or `rotary_3d` with a grid, in plain torch, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if grid is not None:
        cos, sin = (axis_rows(table, grid, origin, positions) for table in (cos, sin))
        positions = None
    c, s = (_table_rows(x, table, positions).to(wide) for table in (cos, sin))
    half = c.shape[-1]
    turning = x[..., : 2 * half].to(wide)
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)
    else:
        first, second = turning[..., :half], turning[..., half:]
        turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def _table_rows(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Give `[1 or B, N, 1, R/2]`: the table's row of each token."""
    if positions is not None:
        return table[positions.long()][:, :, None]
    return table[None, : x.shape[1], None] if table.ndim == 2 else table[:, :, None]


def axis_rows(
    table: torch.Tensor, grid: tuple[int, int, int], origin: tuple[int, int, int], positions: torch.Tensor | None
) -> torch.Tensor:
    """Give `[1 or B, N, D/2]`: the angles' cosines or sines of each token of the grid."""
    parts = table.split(axis_channels(2 * table.shape[1]), 1)
    full = torch.cat([
        part[start : start + size].reshape(*(size if i == axis else 1 for i in range(3)), -1).expand(*grid, -1)
        for axis, (part, start, size) in enumerate(zip(parts, origin, grid, strict=True))], -1)
    flat = full.reshape(1, -1, table.shape[1])
    return flat if positions is None else flat[0][positions.long()]


def validate_rotary(
    op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise ValueError for arguments of either op that do not fit."""
    require(x.ndim == 4 and 2 <= x.shape[3] <= MAX_HEAD_DIM, op, f"x must be [B, N, H, D] with D in 2..{MAX_HEAD_DIM}",
            list(x.shape))
    require(x.dtype in DTYPES, op, "x must be fp16, bf16 or fp32", x.dtype)
    require(x.stride(-1) == 1, op, "x's last stride must be 1", x.stride())
    batch, n, _, head_dim = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        require(table.dtype == torch.float32, op, f"{name} must be fp32", table.dtype)
        require(table.device == x.device, op, f"{name} must be on {x.device} like x", table.device)
    require(cos.shape == sin.shape, op, "cos and sin must have one shape", (list(cos.shape), list(sin.shape)))
    require(cos.ndim in (2, 3) and 1 <= cos.shape[-1] <= head_dim // 2, op,
            f"cos must be [T, R/2] or [1 or B, N, R/2] with R/2 in 1..{head_dim // 2}", list(cos.shape))
    if positions is None:
        fits = cos.shape[0] >= n if cos.ndim == 2 else cos.shape[0] in (1, batch) and cos.shape[1] == n
        require(fits or op != "rotary", op, f"cos must have a row for each token of x {list(x.shape)}", list(cos.shape))
    else:
        require(cos.ndim == 2, op, "cos must be [T, R/2] where positions are given", list(cos.shape))
        require(positions.dtype in INT_TYPES and positions.ndim == 2 and positions.shape[0] in (1, batch)
                and positions.shape[1] == n, op, f"positions must be [1 or {batch}, {n}] int32 or int64",
                (list(positions.shape), positions.dtype))
        require(positions.device == x.device, op, f"positions must be on {x.device} like x", positions.device)
    if out is not None:
        require(not takes_gradients(x, cos, sin), op, "out must be None where x, cos or sin take gradients",
                list(out.shape))
        require(out.shape == x.shape and out.dtype == x.dtype and out.device == x.device, op,
                f"out must be {list(x.shape)} {x.dtype} on {x.device} like x", (list(out.shape), out.dtype, out.device))
        require(out.stride(-1) == 1, op, "out's last stride must be 1", out.stride())
        is_x = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
        require(is_x or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), op,
                "out must be x itself or share no memory with it", "another view of x's memory")


def check_rows(op: str, positions: torch.Tensor | None, num_rows: int, is_asked: bool | None) -> None:
    """Raise ValueError for positions outside 0..num_rows - 1, read where asked for, or by default on CPU."""
    if positions is not None and (positions.device.type == "cpu" if is_asked is None else is_asked):
        bad = positions[(positions < 0) | (positions >= num_rows)]
        require(bad.numel() == 0, op, f"positions must be in 0..{num_rows - 1}", bad[:4].tolist())


def validate_grid(
    x: torch.Tensor, cos: torch.Tensor, grid: tuple[int, int, int], origin: tuple[int, int, int],
    positions: torch.Tensor | None,
) -> None:
    """Raise ValueError for what `rotary_3d` takes beyond `rotary`'s arguments and does not fit."""
    op = "rotary_3d"
    require(len(grid) == 3 and min(grid) >= 1, op, "grid must be three sizes of at least 1", tuple(grid))
    require(len(origin) == 3 and min(origin) >= 0, op, "origin must be three places of at least 0", tuple(origin))
    require(cos.ndim == 2 and 2 * cos.shape[1] == x.shape[3], op, f"cos must be [T, {x.shape[3] // 2}] to match x",
            list(cos.shape))
    ends = [size + start for size, start in zip(grid, origin, strict=True)]
    require(max(ends) <= cos.shape[0], op, f"grid + origin must be at most the tables' {cos.shape[0]} rows", ends)
    require(positions is not None or x.shape[1] == grid[0] * grid[1] * grid[2], op,
            f"x must have the {grid[0] * grid[1] * grid[2]} tokens of grid {tuple(grid)}", x.shape[1])
