"""Rotary position embedding: pairs of channels turn by an angle of the token's position (RoFormer, arXiv 2104.09864).

Pairs are (i, i + R/2), transformers' layout, or neighbours (2i, 2i + 1), Wan's and GLM's; channels from R on pass
through. `rotary` takes one table row a token, `rotary_3d` Wan's three tables, one an axis of the latent grid.
Products and sums are fp32, rounded once.
"""

import torch

from kernels.dispatch import refuse_gradients, require, takes_gradients, tl, triton, uses_triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INT_TYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 1024


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn the first R channels of each head.

    x: `[B, N, H, D]` fp16, bf16 or fp32, any strides but the last. cos, sin: `[T, R/2]` fp32 by position, or
    `[1 or B, N, R/2]` by token; models that store each value twice pass `[..., : R // 2]`, or `[..., ::2]` if
    interleaved. positions: `[1 or B, N]` int32 or int64, rows of a `[T, R/2]` table; 0..N-1 by default.
    out: where to write, x itself for in place; a new tensor by default.
    Returns `[B, N, H, D]` in x's type. Raises ValueError for shapes, types, strides or devices that do not fit.
    """
    _validate("rotary", x, cos, sin, positions, out)
    if uses_triton(x, cos, sin):
        return rotary_triton(x, cos, sin, positions=positions, interleaved=interleaved, out=out)
    return rotary_torch(x, cos, sin, positions=positions, interleaved=interleaved, out=out)


def rotary_3d(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    grid: tuple[int, int, int],
    *,
    origin: tuple[int, int, int] = (0, 0, 0),
    positions: torch.Tensor | None = None,
    interleaved: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn tokens of a grid of F x H x W latent patches, as Wan does.

    x: `[B, N, H, D]`, N = F·H·W without positions. cos, sin: `[T, D/2]` fp32, columns of the frame axis, then the
    rows', then the columns' (`axis_channels`); `rotary_3d_tables` makes them, and Wan's own buffers are these with each
    value twice. grid: F, H, W. origin: where the grid begins on each axis, grid + origin at most T.
    positions: `[1 or B, N]` raster indices 0..F·H·W-1 for tokens in another order, such as `tile_order`'s.
    Returns and raises as `rotary` does.
    """
    _validate("rotary_3d", x, cos, sin, positions, out)
    _validate_grid(x, cos, grid, origin, positions)
    if uses_triton(x, cos, sin):
        return rotary_triton(x, cos, sin, positions=positions, interleaved=interleaved, out=out, grid=grid,
                             origin=origin)
    rows = _axis_rows(cos, grid, origin, positions), _axis_rows(sin, grid, origin, positions)
    return rotary_torch(x, *rows, positions=None, interleaved=interleaved, out=out)


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


@triton.jit
def _rotary_kernel(
    x, out, cos, sin, positions,
    stride_xb, stride_xn, stride_xh, stride_ob, stride_on, stride_oh, stride_cb, stride_cn, stride_cc,
    stride_sb, stride_sn, stride_sc, stride_pb, stride_pn,
    n, num_heads, height, width, origin_f, origin_h, origin_w, channels_f, channels_fh,
    HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr, GRID: tl.constexpr, COPY_REST: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    pairs = tl.arange(0, BLOCK_HALF)
    is_token = tokens < n
    is_row = is_token[:, None] & (heads < num_heads)[None, :]
    is_angle = is_token[:, None] & (pairs < HALF)[None, :]
    rows = tokens
    if HAS_POSITIONS:
        rows = tl.load(positions + batch * stride_pb + tokens * stride_pn, mask=is_token, other=0).to(tl.int64)
    if GRID:
        frame = rows // (height * width) + origin_f
        row = rows // width % height + origin_h
        column = rows % width + origin_w
        axis = tl.where((pairs < channels_f)[None, :], frame[:, None],
                        tl.where((pairs < channels_fh)[None, :], row[:, None], column[:, None]))
    else:
        axis = rows[:, None]
    c = tl.load(cos + batch * stride_cb + axis * stride_cn + pairs[None, :] * stride_cc, mask=is_angle, other=0.0)
    s = tl.load(sin + batch * stride_sb + axis * stride_sn + pairs[None, :] * stride_sc, mask=is_angle, other=0.0)
    c = c[:, None, :]
    s = s[:, None, :]
    source = x + batch * stride_xb + tokens[:, None] * stride_xn + heads[None, :] * stride_xh
    target = out + batch * stride_ob + tokens[:, None] * stride_on + heads[None, :] * stride_oh
    if INTERLEAVED:
        # neighbours are read together and parted in registers, so that loads stay whole
        columns = tl.arange(0, 2 * BLOCK_HALF)
        mask = is_row[:, :, None] & (columns < 2 * HALF)[None, None, :]
        both = tl.load(source[:, :, None] + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(both.reshape(BLOCK_N, BLOCK_H, BLOCK_HALF, 2))
        turned = tl.join(first * c - second * s, second * c + first * s)
        tl.store(target[:, :, None] + columns[None, None, :],
                 turned.reshape(BLOCK_N, BLOCK_H, 2 * BLOCK_HALF).to(out.dtype.element_ty), mask=mask)
    else:
        mask = is_row[:, :, None] & (pairs < HALF)[None, None, :]
        first = tl.load(source[:, :, None] + pairs[None, None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source[:, :, None] + HALF + pairs[None, None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(target[:, :, None] + pairs[None, None, :], (first * c - second * s).to(out.dtype.element_ty),
                 mask=mask)
        tl.store(target[:, :, None] + HALF + pairs[None, None, :], (second * c + first * s).to(out.dtype.element_ty),
                 mask=mask)
    if COPY_REST:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask = is_row[:, :, None] & (rest < HEAD_DIM)[None, None, :]
        passed = tl.load(source[:, :, None] + rest[None, None, :], mask=mask, other=0.0)
        tl.store(target[:, :, None] + rest[None, None, :], passed, mask=mask)


def rotary_triton(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None,
    interleaved: bool,
    out: torch.Tensor | None,
    grid: tuple[int, int, int] | None = None,
    origin: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:
    """Launch the kernel on validated tensors; with a grid the tables are Wan's, else one row a position or token."""
    refuse_gradients("rotary", x, cos, sin)
    batch, n, num_heads, head_dim = x.shape
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return out
    block_half = triton.next_power_of_2(half)
    copy_rest = 2 * half < head_dim and out.data_ptr() != x.data_ptr()
    block_h = min(triton.next_power_of_2(num_heads), 4)
    block_n = max(1, 4096 // (2 * block_half * block_h))
    position_strides = (0, 0) if positions is None else (_batch_stride(positions), positions.stride(1))
    _, height, width = grid or (1, 1, 1)
    channels = axis_channels(head_dim) if grid else (0, 0, 0)
    _rotary_kernel[(triton.cdiv(n, block_n), triton.cdiv(num_heads, block_h), batch)](
        x, out, cos, sin, cos if positions is None else positions, *x.stride()[:3], *out.stride()[:3],
        *_table_strides(cos), *_table_strides(sin), *position_strides,
        n, num_heads, height, width, *origin, channels[0], channels[0] + channels[1],
        HALF=half, HEAD_DIM=head_dim, BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_N=block_n, BLOCK_H=block_h,
        INTERLEAVED=interleaved, HAS_POSITIONS=positions is not None, GRID=grid is not None, COPY_REST=copy_rest,
        num_warps=4)
    return out


def _batch_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else 0


def _table_strides(table: torch.Tensor) -> tuple[int, int, int]:
    return (0 if table.ndim == 2 else _batch_stride(table), table.stride(-2), table.stride(-1))


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
        cos, sin = (_axis_rows(table, grid, origin, positions) for table in (cos, sin))
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


def _axis_rows(
    table: torch.Tensor, grid: tuple[int, int, int], origin: tuple[int, int, int], positions: torch.Tensor | None
) -> torch.Tensor:
    """Give `[1 or B, N, D/2]`: the angles' cosines or sines of each token of the grid."""
    parts = table.split(axis_channels(2 * table.shape[1]), 1)
    full = torch.cat([
        part[start : start + size].reshape(*(size if i == axis else 1 for i in range(3)), -1).expand(*grid, -1)
        for axis, (part, start, size) in enumerate(zip(parts, origin, grid, strict=True))], -1)
    flat = full.reshape(1, -1, table.shape[1])
    return flat if positions is None else flat[0][positions.long()]


def _validate(
    op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
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


def _validate_grid(
    x: torch.Tensor, cos: torch.Tensor, grid: tuple[int, int, int], origin: tuple[int, int, int],
    positions: torch.Tensor | None,
) -> None:
    op = "rotary_3d"
    require(len(grid) == 3 and min(grid) >= 1, op, "grid must be three sizes of at least 1", tuple(grid))
    require(len(origin) == 3 and min(origin) >= 0, op, "origin must be three places of at least 0", tuple(origin))
    require(cos.ndim == 2 and 2 * cos.shape[1] == x.shape[3], op, f"cos must be [T, {x.shape[3] // 2}] to match x",
            list(cos.shape))
    ends = [size + start for size, start in zip(grid, origin, strict=True)]
    require(max(ends) <= cos.shape[0], op, f"grid + origin must be at most the tables' {cos.shape[0]} rows", ends)
    require(positions is not None or x.shape[1] == grid[0] * grid[1] * grid[2], op,
            f"x must have the {grid[0] * grid[1] * grid[2]} tokens of grid {tuple(grid)}", x.shape[1])
