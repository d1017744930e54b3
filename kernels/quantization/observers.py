"""Observers: what range activations or weights take, as one largest magnitude that a format's scale comes from.

AbsMax keeps the largest magnitude. Percentile and Mse keep a histogram of magnitudes whose range doubles as larger
ones arrive (two bins become one, so that the order of batches changes nothing but the last bin's edge): Percentile
cuts outliers, Mse takes the cut at which the format's own squared error is least (arXiv 2004.09602).
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.dispatch import require
from kernels.quantization.fp8 import dequantize_fp8, quantize_fp8
from kernels.quantization.nvfp4 import E2M1_MAX, E4M3_MAX, dequantize_nvfp4, quantize_nvfp4

Quantizer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MSE_CANDIDATES = 64


class Observer(Protocol):
    """See tensors, then say which largest magnitude to scale for."""

    def observe(self, x: torch.Tensor) -> None: ...

    def amax(self) -> torch.Tensor:
        """Return the largest magnitude, fp32 `[]` (or `[C]` a channel); ValueError before anything was observed."""


class AbsMaxObserver:
    """Keep the largest magnitude, of everything or for each index of `axis`."""

    def __init__(self, axis: int | None = None) -> None:
        self.axis = axis
        self._amax: torch.Tensor | None = None

    def observe(self, x: torch.Tensor) -> None:
        """Take note of x, any shape; ValueError for what is not finite."""
        magnitudes = _magnitudes(x)
        if magnitudes.numel() == 0:
            return
        amax = magnitudes.amax() if self.axis is None else magnitudes.movedim(self.axis, 0).flatten(1).amax(1)
        require(self._amax is None or self._amax.shape == amax.shape, "AbsMaxObserver",
                f"channels must stay {None if self._amax is None else list(self._amax.shape)}", list(amax.shape))
        self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)

    def amax(self) -> torch.Tensor:
        """Return the largest magnitude."""
        require(self._amax is not None, "AbsMaxObserver", "something must be observed first", "nothing")
        assert self._amax is not None
        return self._amax


class _Histogram:
    def __init__(self, num_bins: int) -> None:
        require(num_bins >= 2 and num_bins % 2 == 0, "observer", "num_bins must be even and at least 2", num_bins)
        self.num_bins = num_bins
        self.counts = torch.zeros(num_bins, dtype=torch.float64)
        self.limit = 0.0
        self.largest = 0.0
        self.total = 0

    def add(self, magnitudes: torch.Tensor) -> None:
        """Count magnitudes, any shape; the histogram doubles its range where they do not fit."""
        largest = float(magnitudes.amax()) if magnitudes.numel() else 0.0
        self.total += magnitudes.numel()
        self.largest = max(self.largest, largest)
        if largest == 0.0:
            self.counts[0] += magnitudes.numel()
            return
        if self.limit == 0.0:
            # a power of two, so that doublings of two histograms meet
            self.limit = 2.0 ** float(torch.tensor(largest, dtype=torch.float64).log2().ceil())
        while largest > self.limit:
            self.counts = torch.cat([self.counts.view(-1, 2).sum(1), torch.zeros(self.num_bins // 2).double()])
            self.limit *= 2
        bins = (magnitudes.flatten() * (self.num_bins / self.limit)).long().clamp(max=self.num_bins - 1)
        self.counts += torch.bincount(bins, minlength=self.num_bins).cpu()

    @property
    def width(self) -> float:
        """Give the width of a bin."""
        return self.limit / self.num_bins


class PercentileObserver:
    """Leave out the magnitudes above a percentile, to within a bin of the histogram."""

    def __init__(self, percentile: float = 99.99, num_bins: int = 2048) -> None:
        require(0 < percentile <= 100, "PercentileObserver", "percentile must be in (0, 100]", percentile)
        self.percentile = percentile
        self._histogram = _Histogram(num_bins)

    def observe(self, x: torch.Tensor) -> None:
        """Take note of x, any shape; ValueError for what is not finite."""
        self._histogram.add(_magnitudes(x))

    def amax(self) -> torch.Tensor:
        """Return the upper edge of the bin in which the percentile lies, at most the largest magnitude."""
        h = self._histogram
        require(h.total > 0, "PercentileObserver", "something must be observed first", "nothing")
        wanted = self.percentile / 100 * h.total
        bin_index = int(torch.searchsorted(h.counts.cumsum(0), wanted - 1e-9 * h.total))
        return torch.tensor(min((min(bin_index, h.num_bins - 1) + 1) * h.width, h.largest))


class MseObserver:
    """Take the largest magnitude at which quantising what was seen costs the least squared error.

    quantize(values `[n]` fp32, amax `[]`) gives the values after the format: `fp8_round`, `nvfp4_round` or another.
    """

    def __init__(self, quantize: Quantizer, num_bins: int = 2048) -> None:
        self.quantize = quantize
        self._histogram = _Histogram(num_bins)

    def observe(self, x: torch.Tensor) -> None:
        """Take note of x, any shape; ValueError for what is not finite."""
        self._histogram.add(_magnitudes(x))

    def amax(self) -> torch.Tensor:
        """Return the best of MSE_CANDIDATES cuts down to a hundredth of the largest magnitude."""
        h = self._histogram
        require(h.total > 0, "MseObserver", "something must be observed first", "nothing")
        if h.largest == 0.0:
            return torch.tensor(0.0)
        centres = ((torch.arange(h.num_bins) + 0.5) * h.width).clamp(max=h.largest)
        cuts = h.largest * torch.logspace(0, -2, MSE_CANDIDATES)
        errors = [float(((self.quantize(centres, cut) - centres).double().square() * h.counts).sum()) for cut in cuts]
        return cuts[errors.index(min(errors))].clone()


def fp8_round(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Round values to E4M3 with one scale for amax."""
    scale = (amax / E4M3_MAX).float().reshape(())
    return dequantize_fp8(quantize_fp8(values.reshape(1, -1), per="tensor", scale=scale)).view(values.shape)


def nvfp4_round(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Round values to NVFP4, each for itself the largest of its block, with the global scale for amax.

    Blocks' other values move with their own largest one; what the global scale decides is whether that one fits.
    """
    blocks = torch.zeros(values.numel(), 16)
    blocks[:, 0] = values
    scale = (amax / (E2M1_MAX * E4M3_MAX)).float().reshape(())
    return dequantize_nvfp4(quantize_nvfp4(blocks, scale))[:, 0].view(values.shape)


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    magnitudes = x.detach().float().abs()
    require(bool(magnitudes.isfinite().all()), "observer", "values must be finite", "inf or nan")
    return magnitudes
