import dataclasses
import datetime
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import attention, block_sparse_attention, sweeps
from kernels.attention import HEAD_DIMS, AttentionConfig
from kernels.autotune import OPTION_MIN_GAIN, Card, Mode, Tuner, bucket, require_mode
from kernels.block_sparse_attention import BlockSparseConfig
from kernels.paged_attention import PagedConfig, default_paged_config
from kernels.quantization.nvfp4 import GemmConfig, GemvConfig, default_gemm_config, quantize_nvfp4
from kernels.quantization.nvfp4_w4a4 import W4A4Config, default_w4a4_config
from kernels.sampling import SampleConfig
from kernels.sampling_params import SamplingContext, SamplingParams
from kernels.shipped_configs import SHIPPED, UNTUNED, Shipped, card_family, shipped_config
from kernels.spec_accept import SpecAcceptConfig


@dataclasses.dataclass(frozen=True)
class Launch:
    tile: int


CARD = Card("Test Card", 86, {"torch": "1", "triton": "2", "cuda": "3"})
DAY = datetime.date(2026, 11, 30)


class Clock:
    """A timer for runs that return their own time in microseconds, or raise."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run: Callable[[], Any]) -> float:
        self.calls += 1
        return float(run())


def launch(config: Launch) -> float:
    if config.tile > 256:
        raise RuntimeError("out of shared memory")
    return 1000.0 / config.tile


def choose(tuner: Tuner, n: int = 1000) -> Any:
    return tuner.choose("op", {"n": n}, [Launch(64), Launch(512), Launch(128)], launch, Launch(16), dtype="bf16")


def test_a_sweep_is_run_once_and_kept_with_its_circumstances(tmp_path: Path) -> None:
    path, clock = tmp_path / "a/tuned.json", Clock()
    tuner = Tuner(CARD, clock, path, mode=Mode.SWEEP, today=lambda: DAY)
    choice = choose(tuner)
    assert (choice.value, choice.source, choice.gain) == (Launch(128), "swept", 8.0)
    calls = clock.calls
    assert choose(tuner).source == "cached" and choose(tuner, 520).value == Launch(128)  # the bucket's other shapes
    assert clock.calls == calls
    (entry,) = json.loads(path.read_text())["entries"].values()
    assert entry["card"] == "Test Card" and entry["arch"] == 86 and entry["date"] == "2026-11-30"
    assert entry["versions"] == dict(CARD.versions) and entry["gain"] == 8.0
    assert [row["config"]["tile"] for row in entry["sweep"]] == [16, 64, 512, 128]
    assert "out of shared memory" in entry["sweep"][2]["failed"]
    # another process reads it and never times
    again = Tuner(CARD, clock, path)
    assert (choose(again).value, choose(again).source) == (Launch(128), "cached") and clock.calls == calls


def test_other_shapes_cards_types_and_versions_are_other_choices(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    choose(Tuner(CARD, Clock(), path, mode=Mode.SWEEP))
    cached = Tuner(CARD, Clock(), path)
    assert choose(cached, 1025).source == UNTUNED
    assert cached.choose("op", {"n": 1000}, [], launch, Launch(16), dtype="fp16").value == Launch(16)
    for other in (dataclasses.replace(CARD, name="Other"), dataclasses.replace(CARD, versions={"torch": "2"})):
        assert choose(Tuner(other, Clock(), path)).value == Launch(16)
        assert choose(Tuner(other, Clock(), path, mode=Mode.SWEEP)).source == "swept"


def test_shipped_mode_never_times_nor_reads(tmp_path: Path) -> None:
    path, clock = tmp_path / "tuned.json", Clock()
    choose(Tuner(CARD, Clock(), path, mode=Mode.SWEEP))
    choice = choose(Tuner(CARD, clock, path, mode=Mode.SHIPPED))
    assert (choice.value, choice.source, clock.calls) == (Launch(16), UNTUNED, 0)


def test_times_that_differ_change_no_cached_choice(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    choose(Tuner(CARD, Clock(), path, mode=Mode.SWEEP))
    for mode in (Mode.CACHED, Mode.SWEEP):
        assert choose(Tuner(CARD, lambda run: 1 / run(), path, mode=mode)).value == Launch(128)


def test_one_hiccup_decides_nothing() -> None:
    times = iter([10.0, 10.0, 10.0, 9000.0, 5.0, 5.0])
    tuner = Tuner(CARD, lambda run: next(times), None, mode=Mode.SWEEP)
    assert tuner.choose("op", {}, [Launch(64)], launch, Launch(16)).value == Launch(64)


def test_nothing_that_runs_is_an_error() -> None:
    tuner = Tuner(CARD, Clock(), None, mode=Mode.SWEEP)
    with pytest.raises(RuntimeError, match="op at n=1: no configuration runs on Test Card: RuntimeError: out of"):
        tuner.choose("op", {"n": 1}, [Launch(512)], launch, Launch(1024))


def test_a_default_that_does_not_run_leaves_no_gain() -> None:
    choice = Tuner(CARD, Clock(), None, mode=Mode.SWEEP).choose("op", {}, [Launch(64)], launch, Launch(1024))
    assert choice.value == Launch(64) and choice.gain is None


@pytest.mark.parametrize(("with_us", "is_on"), [(50.0, True), (100.0, False), (120.0, False),
                                                (100.0 / OPTION_MIN_GAIN + 0.1, False)])
def test_an_option_is_off_where_it_does_not_win(with_us: float, is_on: bool, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tuner = Tuner(CARD, Clock(), path, mode=Mode.SWEEP)
    choice = tuner.choose_option("fp8_cache", {"n": 5}, lambda: 100.0, lambda: with_us)
    assert choice.value is is_on and choice.gain == pytest.approx(100 / with_us)
    again = Tuner(CARD, Clock(), path).choose_option("fp8_cache", {"n": 8}, lambda: 1.0, lambda: 1.0)
    assert (again.value, again.source) == (is_on, "cached")


def test_an_option_that_fails_or_is_not_known_is_off() -> None:
    def fails() -> float:
        raise RuntimeError("no fp8 here")

    assert not Tuner(CARD, Clock(), None, mode=Mode.SWEEP).choose_option("o", {}, lambda: 1.0, fails).value
    for mode in (Mode.SHIPPED, Mode.CACHED):
        choice = Tuner(CARD, Clock(), None, mode=mode).choose_option("o", {}, lambda: 9.0, lambda: 1.0)
        assert (choice.value, choice.source) == (False, UNTUNED)
    with pytest.raises(RuntimeError, match="without it nothing runs"):
        Tuner(CARD, Clock(), None, mode=Mode.SWEEP).choose_option("o", {}, fails, lambda: 1.0)


@pytest.mark.parametrize("contents", ["{", '{"schema": 99, "entries": {}}', "[]", '{"schema": 1, "entries": 3}'])
def test_a_file_that_cannot_be_used_is_said_and_replaced(
    contents: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(contents)
    with caplog.at_level(logging.WARNING):
        tuner = Tuner(CARD, Clock(), path, mode=Mode.SWEEP)
    assert "swept anew" in caplog.text and choose(tuner).source == "swept"
    assert choose(Tuner(CARD, Clock(), path)).source == "cached"


def test_entries_of_an_earlier_configuration_are_swept_again(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    choose(Tuner(CARD, Clock(), path, mode=Mode.SWEEP))
    data = json.loads(path.read_text())
    for entry in data["entries"].values():
        entry["config"] = {"block": 3}
    path.write_text(json.dumps(data))
    assert choose(Tuner(CARD, Clock(), path)).source == UNTUNED
    assert choose(Tuner(CARD, Clock(), path, mode=Mode.SWEEP)).source == "swept"


def test_two_tuners_keep_each_others_choices(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tuners = [Tuner(CARD, Clock(), path, mode=Mode.SWEEP) for _ in range(4)]  # all have read the file before
    threads = [threading.Thread(target=choose, args=(tuner, 1 << i)) for i, tuner in enumerate(tuners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(path.read_text())["entries"]) == 4


def test_buckets() -> None:
    assert bucket({"n": 1000, "m": 1, "z": 0}) == "m=1,n=1024,z=0" == bucket({"z": 0, "m": 1, "n": 513})


def test_modes_by_name() -> None:
    assert require_mode("shipped") is Mode.SHIPPED
    with pytest.raises(ValueError, match=r"autotune: mode must be one of \['shipped', 'cached', 'sweep'\], got fast"):
        require_mode("fast")


KINDS = {"attention": AttentionConfig, "block_sparse_attention": BlockSparseConfig, "paged_attention": PagedConfig,
         "nvfp4_gemv": GemvConfig, "nvfp4_gemm": GemmConfig, "nvfp4_w4a4": W4A4Config}
LARGEST = {"m": 4096, "rows": 4096, "packed": 1, "block_q": 128, "block_k": 128}


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: f"{row.op}-{row.arch}-{row.sizes}")
def test_shipped_rows_are_launches_and_reachable(row: Shipped) -> None:
    KINDS[row.op](**row.config)
    assert shipped_config(row.op, row.arch, {**LARGEST, **row.sizes}, "bf16") is row
    assert row.label == UNTUNED  # until a sweep on the card has been run


def test_shipped_rows_for_both_cards_agree_with_the_launchers() -> None:
    for arch in (90, 100):
        for d, rows in ((128, 4), (128, 32), (128, 512), (256, 16), (576, 128)):
            q = torch.empty(1, 1, d, dtype=torch.bfloat16)
            row = shipped_config("paged_attention", arch, {"rows": rows, "d": d}, "bf16")
            assert row is not None and PagedConfig(**row.config) == default_paged_config(q, rows)
        for m in (2, 16, 64, 2048):
            row = shipped_config("nvfp4_gemm", arch, {"m": m}, "bf16")
            assert row is not None and GemmConfig(**row.config) == default_gemm_config(m, torch.bfloat16)
    for m in (1, 128, 129):
        row = shipped_config("nvfp4_w4a4", 100, {"m": m}, "bf16")
        assert row is not None and W4A4Config(**row.config) == default_w4a4_config(m, True)


@pytest.mark.parametrize(("sm", "family"), [((8, 9), 89), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((11, 0), 100),
                                            ((12, 0), 120), ((12, 1), 120)])
def test_cards_of_a_family_share_their_launches(sm: tuple[int, int], family: int) -> None:
    assert card_family(sm) == family
    for d in HEAD_DIMS:
        q = torch.empty(1, 1, 1, d, dtype=torch.float16)
        dense = attention.default_config(q, sm)
        sparse = block_sparse_attention.default_config(q, 128, 64, sm)
        assert dense.use_tma == sparse.use_tma == (family in (90, 100) or (family == 120 and d <= 128))
        # a step is one key block at most
        assert sparse.block_n <= 64 and sparse.num_warps == 8
        assert attention.default_config(q.float(), sm) == AttentionConfig(64, 32, 4, 2, False)


def test_packed_sequences_take_fewer_keys_a_step_on_sm_100_alone() -> None:
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    wide = torch.empty(1, 1, 1, 256, dtype=torch.bfloat16)
    for sm, *keys in (((9, 0), 128, 128, 64, 64), ((10, 0), 128, 64, 64, 32), ((12, 0), 64, 64, 32, 32)):
        assert keys == [attention.default_config(x, sm, is_packed=is_packed).block_n
                        for x in (q, wide) for is_packed in (False, True)]


def test_ops_are_swept_by_their_own_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    times = {PagedConfig(64, 4, 5, block_m=16): 1.0}

    def record(*_: Any, **options: Any) -> float:
        config = next(c for c in (options.get(n) for n in ("config", "gemv", "gemm")) if c is not None)
        launched.append(config)
        return times.get(config, 2.0)

    for name in ("attention_triton", "block_sparse_attention_triton", "paged_attention_triton",
                 "nvfp4_linear_triton", "nvfp4_w4a4_linear_triton", "sample_triton", "spec_accept_triton"):
        monkeypatch.setattr(sweeps, name, record)
    tuner = Tuner(dataclasses.replace(CARD, arch=90), Clock(), None, mode=Mode.SWEEP)
    q, lists = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 2, 1, dtype=torch.int32)
    sweeps.attention_config(tuner, q, q, q, causal=True)
    assert set(launched) == set(sweeps.DENSE)  # the shipped one is among them
    launched.clear()
    sweeps.block_sparse_attention_config(tuner, q, q, q, lists, lists[..., 0], block_q=64, block_k=64)
    assert launched[0] == BlockSparseConfig(64, 4, 2, True) and {c.block_n for c in launched} == {64}
    launched.clear()
    cache = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16)
    choice = sweeps.paged_attention_config(tuner, torch.empty(1, 4, 64, dtype=torch.bfloat16), cache, cache,
                                           torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    assert choice.value == PagedConfig(64, 4, 5, block_m=16) and choice.gain == 2.0
    assert set(launched) == {*sweeps.PAGED, PagedConfig(block_m=16)}
    weight = quantize_nvfp4(torch.randn(8, 32))
    for m, configs in ((1, sweeps.GEMV), (16, sweeps.GEMM)):
        launched.clear()
        sweeps.nvfp4_config(tuner, torch.empty(m, 32, dtype=torch.bfloat16), weight)
        assert set(configs) <= set(launched)
    launched.clear()
    sweeps.w4a4_config(tuner, torch.empty(4, 32, dtype=torch.bfloat16), weight, torch.ones(()))
    assert set(sweeps.W4A4) <= set(launched)
    launched.clear()
    ones = torch.ones(2)
    params = SamplingParams(ones, ones.long(), ones.long())
    sweeps.sample_config(tuner, torch.empty(2, 50, dtype=torch.bfloat16), params, SamplingContext(), num_logprobs=None,
                         with_probabilities=False)
    assert launched[0] == SampleConfig() and set(launched) == set(sweeps.SAMPLE)
    launched.clear()
    drafts = torch.zeros(2, 3, dtype=torch.int64)
    sweeps.spec_accept_config(tuner, drafts, ones.int(), torch.empty(2, 4, 50), None, ones.long(), ones.long())
    assert launched[0] == SpecAcceptConfig() and set(launched) == set(sweeps.SPEC_ACCEPT)


def test_options_are_timed_against_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "paged_attention_triton",
                        lambda *a, **k: 100.0 if k.get("k_scale") is None else 60.0)
    monkeypatch.setattr(sweeps, "nvfp4_linear_triton", lambda *a, **k: 70.0)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: 50.0)
    tuner = Tuner(CARD, Clock(), None, mode=Mode.SWEEP)
    cache = torch.zeros(4, 16, 2, 64)
    assert sweeps.fp8_cache_pays(tuner, torch.empty(1, 4, 64), cache, cache, torch.zeros(1, 2, dtype=torch.int32),
                                 torch.ones(1, dtype=torch.int32)).value
    choice = sweeps.nvfp4_pays(tuner, torch.empty(64, 32), torch.empty(8, 32), quantize_nvfp4(torch.randn(8, 32)))
    assert not choice.value and choice.gain == pytest.approx(50 / 70)
