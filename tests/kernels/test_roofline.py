"""The roofline's numbers against figures worked out by hand, and the committed table against the code."""

import json
from pathlib import Path

import pytest

import kernels
from kernels.roofline import CARDS, floor_us, rows, works

TABLE = Path(kernels.__file__).with_name("compile_table.json")
WORKS = {(work.op, work.shape): work for work in works()}
WAN, DECODE = "Wan 2.1 1.3B, 480p", "8B decode, batch 64, context 4096"


def test_the_shapes_are_those_of_the_models() -> None:
    assert {work.shape for work in works()} == {WAN, "Wan 2.1 14B, 720p", "8B decode, batch 1, context 4096", DECODE}
    attention = WORKS["attention", "Wan 2.1 14B, 720p"]
    assert attention.flops == 4 * 40 * 75_600**2 * 128
    # four tensors of 75,600 x 5,120 bf16 and 40 x 75,600 fp32
    assert attention.bytes == 3_096_576_000 + 12_096_000


@pytest.mark.parametrize(("op", "shape", "card", "want_us", "bound"), [
    # 6.594e12 FLOP at 989.5e12 and 2,250e12 a second
    ("attention", WAN, "H200", 6664, "compute"),
    ("attention", WAN, "B200", 2931, "compute"),
    # 256 blocks, 32 of them chosen: an eighth of 256 x 128 = 32,768 keys instead of 32,760
    ("block_sparse_attention, 12.5 %", WAN, "H200", 833.2, "compute"),
    # 64 x 4096 x 8 x 128 x 2 x 2 B = 1.0737 GB, queries and outputs 1.05 MB
    ("paged_attention", DECODE, "H200", 223.9, "memory"),
    ("paged_attention, FP8 keys and values", DECODE, "B200", 67.24, "memory"),
    # 28,672 x 4096 weights of 0.5625 B = 66.06 MB, and 64 x 32,768 x 2 B = 4.19 MB; 15.03e9 FLOP weigh more on an H200
    ("nvfp4_linear, W4A16", DECODE, "B200", 8.782, "memory"),
    ("nvfp4_linear, W4A16", DECODE, "H200", 15.19, "compute"),
    # 32,760 x 1,536 x 2 B x 4 = 402.6 MB
    ("add_layer_norm_modulate", WAN, "B200", 50.32, "memory"),
])
def test_floors_worked_out_by_hand(op: str, shape: str, card: str, want_us: float, bound: str) -> None:
    floor = floor_us(WORKS[op, shape], CARDS[card])
    assert floor is not None
    assert floor[0] == pytest.approx(want_us, rel=2e-3) and floor[1] == bound


@pytest.mark.parametrize("card", list(CARDS))
def test_tile_order_once_a_forward_is_nothing_and_in_every_layer_is_not(card: str) -> None:
    # H200, 720p: 4 x 774 MB at 4.8 TB/s = 645 us; 320 x 774 MB = 51.6 ms; 1.81e15 + 0.59e15 FLOP = 2.42 s
    for shape in ("Wan 2.1 14B, 720p", WAN):
        once, always, forward = (floor_us(WORKS[op, shape], CARDS[card]) for op in (
            "tile_order, hidden states there and back once a forward", "tile_order, q, k, v and output in every layer",
            "forward, products and block_sparse_attention, 12.5 %"))
        assert once is not None and always is not None and forward is not None
        assert once[0] < 0.0012 * forward[0] and 0.02 * forward[0] < always[0] < 0.08 * forward[0]
        if card == "H200" and shape != WAN:
            assert (once[0], always[0], forward[0]) == pytest.approx((645, 51_600, 2.42e6), rel=5e-3)


def test_four_bit_products_have_no_floor_where_the_card_has_no_unit() -> None:
    work = WORKS["nvfp4_linear, W4A4", DECODE]
    assert floor_us(work, CARDS["H200"]) is None and floor_us(work, CARDS["B200"]) is not None


def test_no_op_is_faster_than_its_bytes() -> None:
    for work in works():
        for card in CARDS.values():
            floor = floor_us(work, card)
            assert floor is None or floor[0] >= work.bytes / card.bandwidth * 1e6 > 0


def test_the_committed_table_is_what_the_formulas_give() -> None:
    committed = json.loads(TABLE.read_text())["roofline"]
    assert committed == rows(), "write it anew: media-server kernels compile-check --roofline --update"
