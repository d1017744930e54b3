"""A planned step computes what `paged_attention` and `kv_store` compute, wherever its pages lie."""

import random
from typing import Any

import pytest
import torch

from kernels.kv_store import kv_store
from kernels.paged_attention import paged_attention_reference
from kernels.paged_attention_plan import PagedPlan

PAGE, NUM_PAGES = 16, 40
# one sum in another order: fp32 against fp32
TOLERANCE = 2e-6


def step(seed: int, *, is_scattered: bool) -> tuple[list[list[int]], list[int], list[int]]:
    """Tables, starts and lengths of five sequences: single tokens, chunks and a whole prompt."""
    rng = random.Random(seed)
    starts, lengths = [0, 33, 15, 0, 62], [1, 1, 20, 37, 2]
    pages = list(range(1, NUM_PAGES))
    if is_scattered:
        rng.shuffle(pages)
    tables = []
    for start, length in zip(starts, lengths, strict=True):
        count = -(-(start + length) // PAGE)
        tables.append(pages[:count])
        del pages[:count]
    return tables, starts, lengths


def caches(kv_heads: int = 2, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(kv_heads, NUM_PAGES * PAGE, width), torch.randn(kv_heads, NUM_PAGES * PAGE, width)


def paged(cache: torch.Tensor) -> torch.Tensor:
    pages: torch.Tensor = cache.unflatten(1, (NUM_PAGES, PAGE)).permute(1, 2, 0, 3)
    return pages


def plan_of(tables: list[list[int]], starts: list[int], lengths: list[int], **changes: Any) -> PagedPlan:
    return PagedPlan(tables, starts, lengths, page=PAGE, num_pages=NUM_PAGES, **changes)


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("window", [None, 1, 10, 40])
@pytest.mark.parametrize(("has_sinks", "soft_cap"), [(False, None), (True, None), (False, 3.0), (True, 3.0)])
def test_equals_the_reference(
    is_by_row: bool, is_scattered: bool, window: int | None, has_sinks: bool, soft_cap: float | None
) -> None:
    torch.manual_seed(0)
    tables, starts, lengths = step(1, is_scattered=is_scattered)
    keys, values = caches()
    q = torch.randn(sum(lengths), 6, 64)
    sinks = torch.randn(6) if has_sinks else None
    plan = plan_of(tables, starts, lengths, window=window, is_by_row=is_by_row)
    got = plan.attend(q, keys, values, scale=0.2, sinks=sinks, soft_cap=soft_cap)
    longest = max(map(len, tables))
    want = paged_attention_reference(
        q.double(),
        paged(keys),
        paged(values),
        torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32) + torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0),
        sinks=sinks,
        scale=0.2,
        window=window,
        soft_cap=soft_cap,
    )
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_stores_what_kv_store_stores(is_scattered: bool) -> None:
    tables, starts, lengths = step(2, is_scattered=is_scattered)
    got, want = caches(), caches()
    for x, y in zip(got, want, strict=True):
        y.copy_(x)
    k, v = torch.randn(sum(lengths) + 3, 2, 64), torch.randn(sum(lengths) + 3, 2, 64)
    plan_of(tables, starts, lengths, num_padding=3).store(k, v, *got)
    slots = [
        table[place // PAGE] * PAGE + place % PAGE
        for table, start, length in zip(tables, starts, lengths, strict=True)
        for place in range(start, start + length)
    ]
    kv_store(k, v, paged(want[0]), paged(want[1]), torch.tensor([*slots, -1, -1, -1]))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_padding_gets_zeros() -> None:
    q = torch.full((4, 4, 64), float("nan"))
    q[0] = 1.0
    out = plan_of([[3]], [4], [1], num_padding=3).attend(q, *caches(), scale=1.0)
    assert out[0].isfinite().all() and not out[1:].any()


@pytest.mark.parametrize("window", [None, 10])
def test_alone_in_a_chunk_and_among_others_a_row_has_the_same_bits(window: int | None) -> None:
    torch.manual_seed(0)
    keys, values = caches()
    table, end = [7, 8, 9, 2], 61
    q = torch.randn(end, 6, 64)
    whole = plan_of([table], [0], [end], window=window, is_by_row=True).attend(q, keys, values, scale=0.2)
    for start, stop in ((0, 1), (5, 30), (60, 61), (44, 61)):
        for others in ([], [([11, 3], 20, 3)]):
            tables = [*(other[0] for other in others), table]
            starts, lengths = [*(o[1] for o in others), start], [*(o[2] for o in others), stop - start]
            rows = torch.cat([torch.randn(sum(lengths[:-1]), 6, 64), q[start:stop]])
            plan = plan_of(tables, starts, lengths, window=window, is_by_row=True)
            assert torch.equal(plan.attend(rows, keys, values, scale=0.2)[-(stop - start) :], whole[start:stop])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (([[1, 40]], [0], [20]), "page ids must be in 0..39"),
        (([[1, -1]], [0], [20]), "page ids must be in 0..39"),
        (([[1]], [0], [17]), "a table must reach token 17"),
        (([[1]], [0], [0]), "lengths at least 1"),
    ],
)
def test_bad_plans_are_refused(arguments: tuple[Any, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        plan_of(*arguments)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"q": torch.zeros(2, 4, 64)}, r"q must be \[1, H, D\]"),
        ({"q": torch.zeros(1, 3, 64)}, "multiple of the cache's"),
        ({"q": torch.zeros(1, 4, 64, dtype=torch.float16)}, "must be torch.float16 like q"),
        ({"keys": torch.zeros(2, 16, 64)}, r"keys must be \[Hkv, 640, 64\]"),
        ({"values": torch.zeros(1, 640, 64)}, r"values must be \[2, 640, Dv\]"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[4\]"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0"),
    ],
)
def test_bad_tensors_are_refused_also_behind_good_ones(changes: dict[str, Any], rule: str) -> None:
    plan = plan_of([[3]], [4], [1])
    keys, values = caches()
    good: dict[str, Any] = {"q": torch.zeros(1, 4, 64), "keys": keys, "values": values, "scale": 1.0}
    if changes.keys() & {"q", "keys", "values"}:
        plan.attend(**good)
    with pytest.raises(ValueError, match=rule):
        plan.attend(**{**good, **changes})
    with pytest.raises(ValueError, match=r"rows must be \[1, Hkv, D\]"):
        plan.store(torch.zeros(2, 2, 64), torch.zeros(2, 2, 64), keys, values)
