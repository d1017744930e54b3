from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from kernels.layer_norm_modulate import add_layer_norm_modulate, layer_norm_modulate, layer_norm_modulate_reference


@pytest.mark.parametrize("per_token", [False, True])
def test_equals_the_block_of_diffusers_wan(per_token: bool) -> None:
    block = WanTransformerBlock(48, 96, 4, cross_attn_norm=True).eval()
    x, text = torch.randn(2, 10, 48), torch.randn(2, 7, 48)
    temb = torch.randn(2, 10, 6, 48) if per_token else torch.randn(2, 6, 48)
    table = block.scale_shift_table.unsqueeze(0) if per_token else block.scale_shift_table
    shift, scale, gate, c_shift, c_scale, c_gate = (
        part.squeeze(2) if per_token else part for part in (table + temb).chunk(6, 2 if per_token else 1))
    with torch.no_grad():
        want = block(x, text, temb, None)
        y = layer_norm_modulate(x, scale, shift)
        y, x = add_layer_norm_modulate(x, block.attn1(y), gate, weight=block.norm2.weight, bias=block.norm2.bias)
        y, x = add_layer_norm_modulate(x, block.attn2(y, text), None, c_scale, c_shift)
        _, x = add_layer_norm_modulate(x, block.ffn(y), c_gate)
    torch.testing.assert_close(x, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 63, 128, 1000])
def test_modulation_by_frame_matches_fp64(width: int, dtype: torch.dtype) -> None:
    x, branch = (torch.randn(2, 12, width).to(dtype) for _ in range(2))
    gate, scale, shift = (torch.randn(2, runs, width) for runs in (3, 1, 4))
    y, total = add_layer_norm_modulate(x, branch, gate, scale, shift, eps=1e-5)
    want, _ = layer_norm_modulate_reference(total.double(), None, None, scale.double(), shift.double(), None, None,
                                            eps=1e-5)
    tolerance = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)
    want_total = x.double() + branch.double() * gate.double().repeat_interleave(4, 1)
    torch.testing.assert_close(total.double(), want_total, atol=tolerance, rtol=tolerance)
    same, _ = add_layer_norm_modulate(x, branch, gate, scale.expand(-1, 4, -1), shift, eps=1e-5)
    torch.testing.assert_close(same.float(), y.float(), atol=tolerance, rtol=tolerance)


def test_gradients_reach_every_input() -> None:
    parts = [torch.randn(1, 4, 8, requires_grad=True) for _ in range(2)]
    parts += [torch.randn(1, 2, 8, requires_grad=True) for _ in range(3)]
    y, total = add_layer_norm_modulate(*parts)
    (y.square().sum() + total.sum()).backward()
    assert all(part.grad is not None and bool(part.grad.any()) for part in parts)


@pytest.mark.parametrize(("change", "rule"), [
    ({"x": torch.randn(4, 8)}, r"layer_norm_modulate: x must be \[B, N, C\] with C in 1..16384, got \[4, 8\]"),
    ({"x": torch.randn(1, 4, 8).double()}, "layer_norm_modulate: x must be fp16, bf16 or fp32, got torch.float64"),
    ({"shift": None}, "layer_norm_modulate: scale and shift must be given together, got one of them"),
    ({"scale": torch.randn(1, 3, 8)}, r"scale must be \[1 or 1, a divisor of 4, 8\], got \[1, 3, 8\]"),
    ({"gate": torch.randn(2, 1, 8)}, r"gate must be \[1 or 1, a divisor of 4, 8\], got \[2, 1, 8\]"),
    ({"branch": torch.randn(1, 4, 8).half()}, r"branch must be \[1, 4, 8\] torch.float32 like x, got"),
    ({"weight": torch.randn(7)}, r"weight must be \[8\] to match x \[1, 4, 8\], got \[7\]"),
    ({"bias": torch.randn(8).double()}, "bias must be fp16, bf16 or fp32, got torch.float64"),
    ({"shift": torch.randn(1, 1, 16)[..., ::2]}, "shift's last stride must be 1, got"),
    ({"eps": -1.0}, "layer_norm_modulate: eps must be at least 0, got -1.0"),
])
def test_bad_input_is_named(change: dict[str, Any], rule: str) -> None:
    row = torch.randn(1, 1, 8)
    arguments = {"x": torch.randn(1, 4, 8), "branch": torch.randn(1, 4, 8), "gate": row, "scale": row, "shift": row}
    with pytest.raises(ValueError, match=rule):
        add_layer_norm_modulate(**{**arguments, **change})
