"""Our attention processor against the one that diffusers ships, and the rotary product against its definition."""

import math

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed

from video.attention import DenseAttention, check_mode, rotate
from video.errors import InvalidClip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["self", "text", "text and image"])
@torch.no_grad()
def test_equals_the_processor_of_diffusers(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, head_dim, frames, height, width = 3, 16, 3, 5, 7
    dim = heads * head_dim
    attention = WanAttention(
        dim,
        heads=heads,
        dim_head=head_dim,
        cross_attention_dim_head=None if kind == "self" else head_dim,
        added_kv_proj_dim=dim if kind == "text and image" else None,
    ).to(dtype)
    tokens = torch.randn(2, frames * height * width, dim).to(dtype)
    context = {"self": None, "text": torch.randn(2, 9, dim), "text and image": torch.randn(2, 512 + 17, dim)}[kind]
    context = None if context is None else context.to(dtype)
    rotary = None
    if kind == "self":
        rotary = WanRotaryPosEmbed(head_dim, (1, 2, 2), 64)(torch.zeros(1, 4, frames, 2 * height, 2 * width))
    arguments = (attention, tokens, context, None, rotary)
    reference, mine = WanAttnProcessor()(*arguments), DenseAttention()(*arguments)
    assert mine.dtype == dtype
    # the rotary product rounds like diffusers' in fp32; bf16 sums of images and text may differ by one bit
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    assert (mine - reference).abs().max() <= tolerance


def test_rotate_turns_each_pair_by_its_angle() -> None:
    angle = math.pi / 6
    turn = torch.polar(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), angle))
    turned = rotate(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), turn).flatten()
    assert turned.tolist() == pytest.approx([math.cos(angle), math.sin(angle)])


def test_a_mode_that_is_not_offered_is_refused_by_name() -> None:
    check_mode("dense")
    with pytest.raises(InvalidClip, match=r"attention\.mode: must be one of dense, got 'sparse'"):
        check_mode("sparse")
