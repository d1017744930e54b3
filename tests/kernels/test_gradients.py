"""No gradient is lost: where one is asked of any input, ops leave Triton for torch, and Triton's forwards refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import dispatch
from kernels.attention import attention, attention_reference, attention_triton, attention_varlen, attention_with_lse
from kernels.block_selection import block_scores, pool_blocks_triton
from kernels.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_reference,
    block_sparse_attention_triton,
)
from kernels.gelu import gelu, gelu_triton
from kernels.head_rms_norm import head_rms_norm, head_rms_norm_triton
from kernels.layer_norm_modulate import (
    add_layer_norm_modulate,
    layer_norm_modulate,
    layer_norm_modulate_triton,
)
from kernels.paged_attention import paged_attention_triton
from kernels.quantization.nvfp4 import nvfp4_linear_triton, quantize_nvfp4
from kernels.quantization.nvfp4_w4a4 import nvfp4_w4a4_linear_triton
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_triton
from kernels.rotary import rotary, rotary_triton
from kernels.silu_mul import silu_mul, silu_mul_triton
from kernels.tile_order import tile_order, tile_order_reference, tile_order_triton, untile_order

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def _a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dispatch believe that this device runs Triton: a launch would fail at once, there is no driver."""
    monkeypatch.setattr(dispatch, "can_run_triton", lambda device: True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def expand(part: torch.Tensor, n: int) -> torch.Tensor:
    return part.repeat_interleave(n // part.shape[1], 1)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
               ) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    return normed * (1 + expand(scale, x.shape[1])) + expand(shift, x.shape[1])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(2, 3) / 8
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


# op, the same in plain torch operations, inputs
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], Tensors]]] = {
    "rms_norm": (rms_norm, lambda x, weight: F.rms_norm(x, (8,), weight, 1e-6),
                 lambda: {"x": randn(3, 8), "weight": randn(8)}),
    "add_rms_norm": (add_rms_norm,
                     lambda x, residual, weight: (F.rms_norm(x + residual, (8,), weight, 1e-6), x + residual),
                     lambda: {"x": randn(3, 8), "residual": randn(3, 8), "weight": randn(8)}),
    "head_rms_norm": (head_rms_norm, lambda x, weight: F.rms_norm(x, (8,), weight, 1e-6),
                      lambda: {"x": randn(1, 5, 2, 8), "weight": randn(8)}),
    "layer_norm_modulate": (
        lambda x, weight, bias, scale, shift: layer_norm_modulate(x, scale, shift, weight=weight, bias=bias),
        layer_norm,
        lambda: {"x": randn(2, 6, 8), "weight": randn(8), "bias": randn(8), "scale": randn(2, 3, 8),
                 "shift": randn(2, 3, 8)}),
    "add_layer_norm_modulate": (
        lambda x, branch, gate, weight, bias, scale, shift: add_layer_norm_modulate(x, branch, gate, scale, shift,
                                                                                    weight=weight, bias=bias),
        lambda x, branch, gate, weight, bias, scale, shift: (
            layer_norm(x + branch * expand(gate, 6), weight, bias, scale, shift), x + branch * expand(gate, 6)),
        lambda: {"x": randn(2, 6, 8), "branch": randn(2, 6, 8), "gate": randn(2, 2, 8), "weight": randn(8),
                 "bias": randn(8), "scale": randn(2, 3, 8), "shift": randn(2, 6, 8)}),
    "silu_mul": (silu_mul, lambda gate, up: F.silu(gate) * up, lambda: {"gate": randn(4, 8), "up": randn(4, 8)}),
    "gelu": (gelu, F.gelu, lambda: {"x": randn(4, 8)}),
    "rotary": (rotary, turned, lambda: {"x": randn(2, 5, 3, 8), "cos": randn(5, 4), "sin": randn(5, 4)}),
    "rotary of neighbours": (
        lambda x, cos, sin: rotary(x, cos, sin, interleaved=True),
        lambda x, cos, sin: turned(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)
        .unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
        lambda: {"x": randn(2, 5, 3, 8), "cos": randn(5, 4), "sin": randn(5, 4)}),
    "tile_order": (lambda x: tile_order(x, (2, 3, 3), (2, 2, 2)).square(),
                   lambda x: tile_order_reference(x, (2, 3, 3), (2, 2, 2)).square(),
                   lambda: {"x": randn(1, 2, 18, 4)}),
    "attention": (attention, lambda q, k, v: softmax(q, k, v)[0],
                  lambda: {name: randn(1, heads, 7, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}),
    "attention with its log-sum-exp": (
        attention_with_lse, lambda q, k, v: softmax(q, k, v),
        lambda: {name: randn(1, heads, 7, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}),
}


@pytest.mark.usefixtures("_a_card")
@pytest.mark.parametrize("name", list(CASES))
def test_each_input_alone_and_all_together(name: str) -> None:
    op, plain, make = CASES[name]
    inputs = make()
    for wanted in [*([key] for key in inputs), list(inputs)]:
        for x in inputs.values():
            x.requires_grad_(False)
        for key in wanted:
            inputs[key].requires_grad_()
        leaves = [inputs[key] for key in wanted]
        grads = [torch.autograd.grad(loss(run(**inputs)), leaves) for run in (op, plain)]
        for key, mine, theirs in zip(wanted, *grads, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5, msg=f"{key} of {wanted}: {mine}, {theirs}")


def loss(out: Any) -> torch.Tensor:
    parts = out if isinstance(out, tuple) else (out,)
    return torch.stack([(part * torch.linspace(-1, 1, part.numel()).view(part.shape)).sum() for part in parts]).sum()


@pytest.mark.usefixtures("_a_card")
def test_packed_sequences_give_the_gradients_of_each_alone() -> None:
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    q, k, v = (torch.randn(9, 2, 64) for _ in range(3))
    for x in (k, v):
        x.requires_grad_()  # queries take none
    grads = torch.autograd.grad(loss(attention_varlen(q, k, v, cu, cu, 6, causal=True)), (k, v))
    alone = torch.cat([attention_reference(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), causal=True)[0]
                       .squeeze(0).transpose(0, 1) for a, b in ((0, 3), (3, 9))])
    torch.testing.assert_close(grads, torch.autograd.grad(loss(alone), (k, v)))


@pytest.mark.parametrize("wanted", ["q", "k", "qk"])
def test_scores_of_blocks(wanted: str) -> None:
    # the side that takes no gradient is pooled by Triton on a card
    tensors = {"q": torch.randn(1, 2, 20, 8), "k": torch.randn(1, 2, 30, 8)}
    leaves = [tensors[name].requires_grad_() for name in wanted]
    plain = tensors["q"].mean(2, keepdim=True) @ tensors["k"].mean(2, keepdim=True).transpose(2, 3)
    scores = block_scores(tensors["q"], tensors["k"], block_q=64, block_k=64)
    torch.testing.assert_close(torch.autograd.grad(loss(scores), leaves), torch.autograd.grad(loss(plain), leaves))


def test_a_row_without_keys_has_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for n in (5, 3, 3))
    out, lse = attention_with_lse(q, k, v, causal=True)  # the first two queries see nothing
    grads = torch.autograd.grad(out.sum() + lse[..., 2:].sum(), (q, k, v))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not grads[0][:, :, :2].any() and bool(grads[0][:, :, 2:].any())


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qkv"])
def test_block_sparse_attention_on_this_machine(wanted: str) -> None:
    tensors = {name: torch.randn(1, 2, 100, 64) for name in "qkv"}
    for name in wanted:
        tensors[name].requires_grad_()
    ids, counts = torch.tensor([[[[0, 1], [1, 0]]] * 2], dtype=torch.int32), torch.tensor([[[2, 1], [1, 0]]]).int()
    lengths = torch.tensor([60, 36], dtype=torch.int32)
    options: dict[str, Any] = {"block_q": 64, "block_k": 64, "key_lengths": lengths, "scale": 0.2}
    out, lse = block_sparse_attention(tensors["q"], tensors["k"], tensors["v"], ids, counts, **options)
    leaves = [tensors[name] for name in wanted]
    got = torch.autograd.grad(loss(out) + loss(lse[:, :, :64]), leaves)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors.values()]
    out, lse = block_sparse_attention_reference(wide[0], wide[1], wide[2], ids, counts, **options)
    want = torch.autograd.grad(loss(out) + loss(lse[:, :, :64]), [x for x in wide if x.requires_grad])
    torch.testing.assert_close(got, tuple(x.float() for x in want), atol=1e-4, rtol=1e-4)


def test_tiles_there_and_back_have_the_identity_for_a_gradient() -> None:
    x = torch.randn(1, 2, 18, 4, requires_grad=True)
    back = untile_order(tile_order(x, (2, 3, 3), (2, 2, 2)), (2, 3, 3), (2, 2, 2))
    weights = torch.randn_like(back)
    assert torch.equal(torch.autograd.grad((back * weights).sum(), x)[0], weights)


X = torch.randn(2, 8, 4, 64)
ROWS, HEADS = X[0, 0], X[:1]
WEIGHT = quantize_nvfp4(torch.randn(4, 64))
LISTS = torch.zeros(1, 8, 1, 1, dtype=torch.int32)
CACHE = torch.randn(2, 16, 1, 64)
TABLE, LENGTHS = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
# the Triton forward with the input that asks for a gradient
FORWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rms_norm": lambda w: rms_norm_triton(ROWS, w[0], None, 1e-6),
    "head_rms_norm": lambda w: head_rms_norm_triton(X, w[0], 1e-6),
    "layer_norm_modulate": lambda w: layer_norm_modulate_triton(X[0], None, None, w[:1, None], w[:1, None], None, None,
                                                                eps=1e-6),
    "silu_mul": lambda up: silu_mul_triton(ROWS, up),
    "gelu": lambda x: gelu_triton(x, "none"),
    "rotary": lambda table: rotary_triton(X, table, table, positions=None, interleaved=False, out=None),
    "tile_order": lambda x: tile_order_triton(x[None, None], (1, 2, 2), (1, 2, 2), inverse=False),
    "block_scores": lambda x: pool_blocks_triton(x[None, None], 64),
    "attention": lambda x: attention_triton(HEADS, HEADS, x.expand(HEADS.shape), causal=False, scale=1.0),
    "block_sparse_attention": lambda x: block_sparse_attention_triton(
        HEADS, HEADS, x.expand(HEADS.shape), LISTS, LISTS[..., 0], block_q=64, block_k=64, scale=1.0),
    "paged_attention": lambda x: paged_attention_triton(x[:, None], CACHE, CACHE, TABLE, LENGTHS, scale=1.0,
                                                        window=None),
    "nvfp4_linear": lambda x: nvfp4_linear_triton(x, WEIGHT),
    "nvfp4_w4a4_linear": lambda x: nvfp4_w4a4_linear_triton(x, WEIGHT, torch.ones(())),
}


@pytest.mark.parametrize("name", list(FORWARDS))
def test_a_forward_without_a_backward_says_so(name: str) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name}: the Triton forward has no backward"):
        FORWARDS[name](x)
