import copy
from typing import Any

import pytest
import torch
from torch import nn

from kernels.quantization.calibration import calibrate, quantize_linears, shared_amax
from kernels.quantization.fp8 import quantize_fp8
from kernels.quantization.linear import FORMATS, Format, QuantizedLinear
from kernels.quantization.nvfp4 import nvfp4_linear, quantize_nvfp4
from kernels.quantization.nvfp4_w4a4 import nvfp4_w4a4_linear
from kernels.quantization.observers import AbsMaxObserver

INPUT_AMAX = torch.tensor(4.0)


def quantized(format: Format, **options: Any) -> tuple[QuantizedLinear, nn.Linear]:
    linear = nn.Linear(64, 24)
    has_input = format in ("nvfp4_w4a4", "fp8")
    return QuantizedLinear.from_weight(linear.weight.detach(), format, bias=linear.bias.detach(),
                                       input_amax=INPUT_AMAX if has_input else None, **options), linear


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_close_to_the_full_product(format: Format) -> None:
    module, linear = quantized(format)
    x = torch.randn(5, 3, 64).clamp(-4, 4)
    error = (module(x) - linear(x)).norm() / linear(x).norm()
    # E4M3 rounds by up to 2^-4 a value, E2M1 by up to a fourth: about a third of this on average
    assert 1e-4 < error < (0.04 if format.startswith("fp8") else 0.2)


def test_forward_is_the_format_s_own_product_and_a_bias() -> None:
    module, linear = quantized("nvfp4")
    x = torch.randn(2, 64)
    torch.testing.assert_close(module(x), nvfp4_linear(x, quantize_nvfp4(linear.weight.detach())) + linear.bias)
    module, linear = quantized("nvfp4_w4a4")
    want = nvfp4_w4a4_linear(x, quantize_nvfp4(linear.weight.detach()), INPUT_AMAX / 2688)
    torch.testing.assert_close(module(x), want + linear.bias)


@pytest.mark.parametrize("format", FORMATS)
def test_scales_keep_their_types_when_the_model_changes_its_own(format: Format) -> None:
    module, _ = quantized(format)
    before = {name: (x.dtype, x.clone().view(torch.uint8) if x.ndim else x.clone())
              for name, x in module.named_buffers()}
    model = nn.Sequential(module).to(torch.bfloat16).half().to(torch.bfloat16)
    for name, (dtype, contents) in before.items():
        after = getattr(module, name)
        assert after.dtype == dtype and torch.equal(after.view(torch.uint8) if after.ndim else after, contents)
    assert module.bias is not None and module.bias.dtype == torch.bfloat16
    assert model(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_state_comes_back_and_only_into_its_own_format(format: Format) -> None:
    module, _ = quantized(format)
    other, _ = quantized(format)
    x = torch.randn(2, 64)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    assert torch.equal(other(x), module(x))
    wrong: Format = "fp8_w8a16" if format.startswith("nvfp4") else "nvfp4"
    with pytest.raises((ValueError, RuntimeError), match=f"state must be of format {wrong}, got {format}|key|mismatch"):
        quantized(wrong)[0].load_state_dict(module.state_dict())


def test_the_decoded_weight_is_kept_and_forgotten_with_the_weight() -> None:
    module, _ = quantized("nvfp4", caches_decoded=True)
    plain, _ = quantized("nvfp4")
    x = torch.randn(3, 64)
    first = module(x)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(first, plain(x))
    replacement, _ = quantized("nvfp4")
    module.load_state_dict(replacement.state_dict())
    torch.testing.assert_close(module(x), replacement(x))
    torch.testing.assert_close(module(x.bfloat16()), replacement(x.bfloat16()))


def test_bytes() -> None:
    assert quantized("nvfp4")[0].weight_bytes == 24 * 32 + 24 * 4 + 4
    assert quantized("fp8")[0].weight_bytes == 24 * 64 + 24 * 4


def test_fused_projections_share_a_scale() -> None:
    q, k = torch.randn(8, 32), 3 * torch.randn(8, 32)
    amax = shared_amax({"q": q.abs().amax(), "k": k.abs().amax(), "o": torch.tensor(1.0)}, {"q": "qkv", "k": "qkv"})
    assert amax["q"] == amax["k"] == k.abs().amax() and amax["o"] == 1
    assert QuantizedLinear.from_weight(q, "nvfp4", weight_amax=amax["q"]).global_scale == amax["k"] / 2688


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(x).relu())
        return down


def test_calibration_sees_inputs_and_leaves_no_hooks() -> None:
    model = Tiny()
    batches = [torch.randn(4, 16) for _ in range(3)]
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    amax = calibrate(layers, lambda: [model(x) for x in batches], lambda _: AbsMaxObserver())
    assert set(amax) == {"up", "down"}
    assert amax["up"] == torch.cat(batches).abs().amax()
    torch.testing.assert_close(amax["down"], model.up(torch.cat(batches)).relu().amax())
    with pytest.raises(RuntimeError, match="data ran out"):
        calibrate(layers, lambda: (_ for _ in ()).throw(RuntimeError("data ran out")), lambda _: AbsMaxObserver())
    assert not any(layer._forward_pre_hooks for layer in layers.values())


def test_layers_are_replaced_in_place() -> None:
    model = Tiny()
    x = torch.randn(4, 16)
    before = model(x)
    quantize_linears(model, {"up": "nvfp4_w4a4", "down": "fp8"}, input_amax={"up": x.abs().amax()})
    assert isinstance(model.up, QuantizedLinear) and isinstance(model.down, QuantizedLinear)
    assert model.down.input_scale is None and model.down.bias is None
    assert 0 < (model(x) - before).norm() / before.norm() < 0.25


@pytest.mark.parametrize(("formats", "rule"), [
    ({"sideways": "fp8"}, "sideways must be an nn.Linear, got NoneType"),
    ({"up": "nvfp4_w4a4"}, r"nvfp4_w4a4 needs input_amax for up, got \[\]"),
])
def test_nothing_is_replaced_where_one_cannot_be(formats: dict[str, Format], rule: str) -> None:
    model = Tiny()
    with pytest.raises(ValueError, match=f"quantize_linears: {rule}"):
        quantize_linears(model, {"down": "fp8", **formats})
    assert isinstance(model.down, nn.Linear)


@pytest.mark.parametrize(("arguments", "rule"), [
    ({"format": "int3"}, "format must be one of .* got int3"),
    ({"weight": quantize_fp8(torch.randn(4, 16))}, "weight must fit format nvfp4, got FP8Tensor"),
    ({"bias": torch.zeros(5)}, r"bias must be \[4\], got \[5\]"),
    ({"format": "nvfp4_w4a4"}, "nvfp4_w4a4 needs an input_scale"),
    ({"input_scale": torch.ones(())}, "input_scale must be None for nvfp4"),
    ({"format": "nvfp4_w4a4", "input_scale": torch.ones(2)}, r"input_scale must be \[\] fp32"),
])
def test_bad_input_is_named(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"QuantizedLinear: {rule}"):
        QuantizedLinear(**{"format": "nvfp4", "weight": quantize_nvfp4(torch.randn(4, 16)), **arguments})


def test_bad_ranges_are_named() -> None:
    with pytest.raises(ValueError, match="largest magnitudes must be finite"):
        QuantizedLinear.from_weight(torch.randn(4, 16), "fp8", input_amax=torch.tensor(float("inf")))
    with pytest.raises(ValueError, match="calibrate: up's first argument must be a tensor"):
        model = Tiny()
        calibrate({"up": model.up}, lambda: model.up(input=torch.randn(1, 16)), lambda _: AbsMaxObserver())
