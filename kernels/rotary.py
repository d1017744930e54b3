"""Rotary position embedding: pairs of channels turn by an angle of the token's position (RoFormer, arXiv 2104.09864).

Pairs are (i, i + R/2), transformers' layout, or neighbours (2i, 2i + 1), Wan's and GLM's; channels from R on pass
through. `rotary` takes one table row a token, `rotary_3d` Wan's three tables, one an axis of the latent grid.
Products and sums are fp32, rounded once.
"""

import torch

from kernels.dispatch import refuse_gradients, tl, triton, uses_triton
from kernels.rotary_torch import axis_channels as axis_channels
from kernels.rotary_torch import axis_rows, check_rows, rotary_torch, validate_grid, validate_rotary
from kernels.rotary_torch import rotary_3d_tables as rotary_3d_tables
from kernels.rotary_torch import rotary_reference as rotary_reference


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    check_positions: bool | None = None,
) -> torch.Tensor:
    """Turn the first R channels of each head.

    x: `[B, N, H, D]` fp16, bf16 or fp32, any strides but the last. cos, sin: `[T, R/2]` fp32 by position, or
    `[1 or B, N, R/2]` by token; models that store each value twice pass `[..., : R // 2]`, or `[..., ::2]` if
    interleaved. positions: `[1 or B, N]` int32 or int64, rows of a `[T, R/2]` table; 0..N-1 by default.
    out: where to write, x itself for in place; a new tensor by default. check_positions: read positions on the host and
    refuse those without a row; None: on CPU only.
    Returns `[B, N, H, D]` in x's type. Raises ValueError for what does not fit.
    """
    validate_rotary("rotary", x, cos, sin, positions, out)
    check_rows("rotary", positions, cos.shape[0], check_positions)
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
    check_positions: bool | None = None,
) -> torch.Tensor:
    """Turn tokens of a grid of F x H x W latent patches, as Wan does.

    x: `[B, N, H, D]`, N = F·H·W without positions. cos, sin: `[T, D/2]` fp32, columns of the frame axis, then the
    rows', then the columns' (`axis_channels`); `rotary_3d_tables` makes them, and Wan's own buffers are these with each
    value twice. grid: F, H, W. origin: where the grid begins on each axis, grid + origin at most T.
    positions: `[1 or B, N]` raster indices 0..F·H·W-1 for tokens in another order, such as `tile_order`'s.
    Returns and raises as `rotary` does.
    """
    validate_rotary("rotary_3d", x, cos, sin, positions, out)
    validate_grid(x, cos, grid, origin, positions)
    check_rows("rotary_3d", positions, grid[0] * grid[1] * grid[2], check_positions)
    if uses_triton(x, cos, sin):
        return rotary_triton(x, cos, sin, positions=positions, interleaved=interleaved, out=out, grid=grid,
                             origin=origin)
    rows = axis_rows(cos, grid, origin, positions), axis_rows(sin, grid, origin, positions)
    return rotary_torch(x, *rows, positions=None, interleaved=interleaved, out=out)


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
