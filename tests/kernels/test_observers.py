from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantization.fp8 import quantize_fp8
from kernels.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from kernels.quantization.observers import (
    AbsMaxObserver,
    MseObserver,
    PercentileObserver,
    fp8_round,
    nvfp4_round,
)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.integers(1, 7))
def test_absmax_over_batches(values: list[float], size: int) -> None:
    observer = AbsMaxObserver()
    for i in range(0, len(values), size):
        observer.observe(torch.tensor(values[i : i + size]))
    assert observer.amax() == max(abs(v) for v in values)


def test_absmax_a_channel() -> None:
    x, y = torch.randn(5, 3, 4), torch.randn(2, 3, 4)
    observer = AbsMaxObserver(axis=1)
    observer.observe(x)
    observer.observe(y)
    assert torch.equal(observer.amax(), torch.cat([x, y]).abs().amax((0, 2)))
    with pytest.raises(ValueError, match=r"channels must stay \[3\], got \[2\]"):
        observer.observe(torch.randn(5, 2, 4))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.sampled_from([50.0, 90.0, 99.9, 100.0]), st.integers(1, 5))
def test_percentile_is_the_quantile_to_within_a_bin(seed: int, percentile: float, batches: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(batches * 1000) * 10 ** float(torch.randn(()))
    observer = PercentileObserver(percentile)
    for part in x.chunk(batches):
        observer.observe(part)
    rank = max(1, -int(-(percentile * len(x)) // 100))
    exact = float(x.abs().sort().values[rank - 1])
    # the range is at most twice the largest magnitude
    assert exact - 1e-6 <= float(observer.amax()) <= exact + 2 * float(x.abs().amax()) / 2048
    assert observer.amax() <= x.abs().amax()


def test_the_order_of_batches_does_not_matter() -> None:
    batches = [torch.randn(500) * s for s in (0.01, 7.0, 0.5, 300.0)] + [torch.zeros(3)]
    results = []
    for order in (batches, batches[::-1]):
        observer = PercentileObserver(99.0)
        for x in order:
            observer.observe(x)
        results.append(float(observer.amax()))
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_percentile_ignores_an_outlier_and_absmax_does_not() -> None:
    x = torch.cat([torch.rand(100_000), torch.tensor([50.0])])
    percentile, absmax = PercentileObserver(99.99), AbsMaxObserver()
    percentile.observe(x)
    absmax.observe(x)
    assert percentile.amax() < 1.1 and absmax.amax() == 50


def test_mse_takes_the_cut_of_the_least_error() -> None:
    # integers of four bits: much mass near zero pays for cutting the few large ones
    def four_bits(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        step = amax / 7
        return (values / step).round().clamp(-8, 7) * step

    x = torch.cat([torch.randn(50_000), torch.tensor([40.0, -40.0])])
    observer = MseObserver(four_bits)
    for part in x.chunk(4):
        observer.observe(part)
    errors = {cut: float((four_bits(x, torch.tensor(cut)) - x).square().sum()) for cut in
              torch.linspace(0.5, 40.0, 200).tolist()}
    best = min(errors, key=errors.__getitem__)
    chosen = float((four_bits(x, observer.amax()) - x).square().sum())
    assert best < 10 and chosen <= 1.05 * errors[best]


def test_rounding_for_mse_is_the_formats_own() -> None:
    x = torch.rand(100) * 5
    want = quantize_fp8(x[None], per="tensor", scale=torch.tensor(5 / 448)).codes.float()[0] * torch.tensor(5 / 448)
    torch.testing.assert_close(fp8_round(x, torch.tensor(5.0)), want)
    blocks = torch.zeros(100, 16)
    blocks[:, 0] = x
    want = dequantize_nvfp4(quantize_nvfp4(blocks, torch.tensor(5.0) / 2688))[:, 0]
    torch.testing.assert_close(nvfp4_round(x, torch.tensor(5.0)), want)


@pytest.mark.parametrize("make", [AbsMaxObserver, PercentileObserver, lambda: MseObserver(fp8_round)])
def test_what_cannot_be_observed_is_named(make: Any) -> None:
    with pytest.raises(ValueError, match="something must be observed first"):
        make().amax()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="values must be finite"):
            make().observe(torch.tensor([1.0, bad]))
    observer = make()
    observer.observe(torch.zeros(4))
    assert observer.amax() == 0


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"percentile must be in \(0, 100\], got 101"):
        PercentileObserver(101)
    with pytest.raises(ValueError, match="num_bins must be even and at least 2, got 3"):
        PercentileObserver(99, num_bins=3)
