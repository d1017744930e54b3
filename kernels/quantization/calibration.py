"""Calibration: watch the inputs of layers while a caller runs data through its model.

Knows modules and callables only: which layers, which data and how to run them is the caller's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kernels.dispatch import require
from kernels.quantization.linear import Format, QuantizedLinear
from kernels.quantization.observers import Observer


def calibrate(
    layers: Mapping[str, nn.Module], run: Callable[[], object], make_observer: Callable[[str], Observer]
) -> dict[str, torch.Tensor]:
    """Observe each layer's first argument during run().

    layers: by the caller's names. make_observer(name): a fresh observer for that layer.
    Returns the largest magnitudes by name, for the layers that run() reached. Hooks are gone when it returns or raises.
    """
    observers = {name: make_observer(name) for name in layers}
    reached: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            require(bool(arguments) and isinstance(arguments[0], torch.Tensor), "calibrate",
                    f"{name}'s first argument must be a tensor", [type(a).__name__ for a in arguments])
            if arguments[0].numel():
                observers[name].observe(arguments[0])
                reached.add(name)

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: observer.amax() for name, observer in observers.items() if name in reached}


def shared_amax(amaxes: Mapping[str, torch.Tensor], groups: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Give layers of one group (fused projections: q, k, v or gate, up) their group's largest magnitude."""
    largest: dict[str, torch.Tensor] = {}
    for name, amax in amaxes.items():
        group = groups.get(name, name)
        largest[group] = torch.maximum(largest[group], amax) if group in largest else amax
    return {name: largest[groups.get(name, name)] for name in amaxes}


def quantize_linears(
    root: nn.Module, formats: Mapping[str, Format], *, input_amax: Mapping[str, torch.Tensor] | None = None,
    weight_amax: Mapping[str, torch.Tensor] | None = None, caches_decoded: bool = False,
) -> None:
    """Replace the named `nn.Linear` layers below root by quantised ones, in place.

    formats: module path to format. input_amax: from `calibrate`, used by the formats that quantise activations.
    weight_amax: where projections share one scale. Raises ValueError, before any change, for a path that is no
    `nn.Linear`, or a format without the calibration it needs.
    """
    input_amax, weight_amax = input_amax or {}, weight_amax or {}
    for path, format in formats.items():
        try:
            layer = root.get_submodule(path)
        except AttributeError:
            layer = None
        require(isinstance(layer, nn.Linear), "quantize_linears", f"{path} must be an nn.Linear", type(layer).__name__)
        require(format != "nvfp4_w4a4" or path in input_amax, "quantize_linears",
                f"nvfp4_w4a4 needs input_amax for {path}", sorted(input_amax))
    for path, format in formats.items():
        linear = root.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        has_scale = format in ("nvfp4_w4a4", "fp8")
        shared = weight_amax.get(path)
        quantized = QuantizedLinear.from_weight(
            linear.weight.detach(), format, bias=None if linear.bias is None else linear.bias.detach(),
            input_amax=input_amax.get(path) if has_scale else None, weight_amax=shared,
            per="channel" if shared is None or shared.ndim else "tensor", caches_decoded=caches_decoded)
        root.set_submodule(path, quantized)
