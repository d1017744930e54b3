from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from kernels.rotary import axis_channels, rotary, rotary_3d, rotary_3d_tables, rotary_reference
from kernels.tile_order import tile_index, tile_order


def tables(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(rows, half) * 6
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("n", [1, 63, 128, 1000])
def test_halves_equal_transformers_llama(n: int) -> None:
    q, k = torch.randn(2, 4, n, 64), torch.randn(2, 2, n, 64)
    cos, sin = (torch.cat([table, table], -1)[None].expand(2, -1, -1) for table in tables(n, 32))
    for x, want in zip((q, k), llama_rotary(q, k, cos, sin), strict=True):
        got = rotary(x.transpose(1, 2), cos[..., :32], sin[..., :32]).transpose(1, 2)
        torch.testing.assert_close(got, want)


def test_partial_neighbours_equal_transformers_glm() -> None:
    q, k = torch.randn(2, 4, 50, 128), torch.randn(2, 2, 50, 128)
    cos, sin = (torch.cat([table, table], -1)[None] for table in tables(50, 32))
    # GLM keeps the halves' order of tables, turns neighbours and passes the rest
    want = glm_rotary(q, k, cos, sin)[0]
    got = rotary(q.transpose(1, 2), cos[..., :32], sin[..., :32], interleaved=True).transpose(1, 2)
    turned = want[..., :64]
    assert torch.equal(got[..., 64:], q[..., 64:]) and torch.equal(want[..., 64:], q[..., 64:])
    torch.testing.assert_close(got[..., :64], turned)


@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_three_axes_equal_diffusers_wan(head_dim: int) -> None:
    embed = WanRotaryPosEmbed(head_dim, (1, 2, 2), 64)
    cos, sin = embed(torch.empty(1, 16, 3, 10, 14))
    ours = rotary_3d_tables(head_dim, 64)
    torch.testing.assert_close(ours[0], embed.freqs_cos[:, ::2], rtol=0, atol=0)
    torch.testing.assert_close(ours[1], embed.freqs_sin[:, ::2], rtol=0, atol=0)
    assert sum(axis_channels(head_dim)) * 2 == head_dim
    x = torch.randn(2, 105, 3, head_dim)
    # diffusers' own lines, from WanAttnProcessor
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    want = torch.stack([first * c - second * s, first * s + second * c], -1).flatten(-2)
    torch.testing.assert_close(rotary_3d(x, *ours, (3, 5, 7)), want)
    torch.testing.assert_close(rotary(x, cos[:, :, 0, ::2], sin[:, :, 0, ::2], interleaved=True), want)


def test_a_later_part_of_a_clip_turns_as_in_the_whole() -> None:
    cos, sin = rotary_3d_tables(64, 16)
    x = torch.randn(1, 6 * 20, 2, 64)
    whole = rotary_3d(x, cos, sin, (6, 4, 5))
    torch.testing.assert_close(rotary_3d(x[:, 80:], cos, sin, (2, 4, 5), origin=(4, 0, 0)), whole[:, 80:])


def test_tokens_in_tile_order_turn_by_their_place_in_the_clip() -> None:
    grid, tile = (4, 4, 6), (2, 2, 3)
    cos, sin = rotary_3d_tables(64, 16)
    x = torch.randn(1, 96, 2, 64)
    want = tile_order(rotary_3d(x, cos, sin, grid).transpose(1, 2), grid, tile)
    tiled = tile_order(x.transpose(1, 2), grid, tile).transpose(1, 2)
    got = rotary_3d(tiled, cos, sin, grid, positions=tile_index(grid, tile)[None])
    torch.testing.assert_close(got.transpose(1, 2), want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_and_by_positions(interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 3, 64).to(dtype)
    cos, sin = tables(100, 16)
    positions = torch.randint(0, 100, (2, 9))
    want = rotary_reference(x.double(), cos, sin, positions=positions, interleaved=interleaved)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}[dtype]
    other = torch.empty_like(x)
    for got in (rotary(x, cos, sin, positions=positions, interleaved=interleaved, out=other),
                rotary(x, cos, sin, positions=positions, interleaved=interleaved),
                rotary(x, cos, sin, positions=positions, interleaved=interleaved, out=x)):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_turning_back_is_the_gradient() -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    cos, sin = tables(5, 4)
    y = rotary(x, cos, sin)
    y.backward(y.detach())
    torch.testing.assert_close(x.grad, x.detach())


@pytest.mark.parametrize(("change", "rule"), [
    ({"x": torch.randn(1, 4, 8)}, r"rotary: x must be \[B, N, H, D\] with D in 2..1024, got \[1, 4, 8\]"),
    ({"x": torch.randn(1, 4, 2, 8).double()}, r"rotary: x must be fp16, bf16 or fp32, got torch.float64"),
    ({"x": torch.randn(1, 4, 2, 16)[..., ::2]}, r"rotary: x's last stride must be 1, got \(128, 32, 16, 2\)"),
    ({"cos": torch.randn(4, 3)}, r"rotary: cos and sin must have one shape, got \(\[4, 3\], \[4, 4\]\)"),
    ({"cos": torch.randn(4, 4).half()}, r"rotary: cos must be fp32, got torch.float16"),
    ({"cos": torch.randn(3, 4), "sin": torch.randn(3, 4)}, r"rotary: cos must have a row for each .* got \[3, 4\]"),
    ({"cos": torch.randn(4, 5), "sin": torch.randn(4, 5)}, r"R/2 in 1..4, got \[4, 5\]"),
    ({"positions": torch.zeros(1, 3, dtype=torch.int32)}, r"rotary: positions must be \[1 or 1, 4\] int32 or int"),
    ({"out": torch.empty(1, 4, 2, 8).half()}, r"rotary: out must be \[1, 4, 2, 8\] torch.float32 on cpu like x, got"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    cos, sin = tables(4, 4)
    arguments = {"x": torch.randn(1, 4, 2, 8), "cos": cos, "sin": sin, **change}
    with pytest.raises(ValueError, match=rule):
        rotary(**arguments)


def test_an_output_over_other_parts_of_the_input_is_refused() -> None:
    base = torch.randn(1, 5, 2, 8)
    cos, sin = tables(4, 4)
    with pytest.raises(ValueError, match="rotary: out must be x itself or share no memory with it, got another view"):
        rotary(base[:, :4], cos, sin, out=base[:, 1:])


@pytest.mark.parametrize(("change", "rule"), [
    ({"grid": (2, 2, 2)}, r"rotary_3d: x must have the 8 tokens of grid \(2, 2, 2\), got 4"),
    ({"grid": (0, 2, 2)}, r"rotary_3d: grid must be three sizes of at least 1, got \(0, 2, 2\)"),
    ({"origin": (0, 0, -1)}, r"rotary_3d: origin must be three places of at least 0, got \(0, 0, -1\)"),
    ({"origin": (15, 0, 15)}, r"rotary_3d: grid \+ origin must be at most the tables' 16 rows, got \[16, 2, 17\]"),
    ({"x": torch.randn(1, 4, 2, 12)}, r"rotary_3d: cos must be \[T, 6\] to match x, got \[16, 4\]"),
])
def test_a_grid_that_does_not_fit_is_named(change: dict[str, Any], rule: str) -> None:
    cos, sin = rotary_3d_tables(8, 16)
    with pytest.raises(ValueError, match=rule):
        rotary_3d(**{"x": torch.randn(1, 4, 2, 8), "cos": cos, "sin": sin, "grid": (1, 2, 2), **change})
